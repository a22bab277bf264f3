"""Arrays in shared memory, between two processes of one host."""
