"""Recordings of a run: everything that passed its channels, in order, in a file that can be read
while it is written, and after the run was killed."""
