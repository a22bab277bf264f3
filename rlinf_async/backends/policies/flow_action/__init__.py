"""The policy ``flow_action``: actions by a few steps along a learned velocity field, from noise.

::

    config.py    steps, and the noise in them (no torch)
    policy.py    the policy: integration, log-probs of chains, flow matching
    noise.py     the distribution of a step with noise in it
    trunks.py    what the field sees of an observation: numbers, images, images and text
"""
