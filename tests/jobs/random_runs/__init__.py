"""Runs of random configurations: whatever ``check`` accepts has to train, exactly as configured.

Every mechanism has tests of its own; these mix them. A configuration is drawn from a seed over
backends, sizes, advantages, losses, levels, placements and schedulers. ``check`` may refuse it, in
one line that names the setting and with exit code 2. If it does not, the run has to end in success
with every iteration once, all of its samples, no number that is not finite, and no token staler
than allowed; also when a worker that can be restarted is killed in its middle.
"""
