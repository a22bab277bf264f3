"""The policy ``flow_action``: actions by a few steps along a learned velocity field, from noise.

::

    config.py    steps, and the noise in them (no torch)
    policy.py    the policy: integration, log-probs of chains, flow matching
    trunks.py    what the field sees of an observation: numbers, images, images and text
"""
