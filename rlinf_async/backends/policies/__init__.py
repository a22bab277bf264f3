"""Policies by name: MLPs, a CNN, vision-language-action, flows, and those of a user.

::

    config.py     name and size of a policy (no torch)
    base.py       the base class, distributions, the registry
    mlp.py        one vector of numbers; actions of one or several factors
    images.py     images
    recurrent.py  one vector of numbers, and a memory
    off_policy.py for soft actor-critic: what its policies share, and that of one choice
    squashed.py   and that of continuous actions within [-1, 1]
    bounded.py    policies that learn from data alone
    vision_language/   images and text, actions as tokens
    flow_action/       chunks of actions, integrated from noise
    expert_flow/       the flows of folders that LeRobot wrote
    moments.py    running statistics, published with the weights
    serving.py    a policy that answers observations in numpy
    left.py       the note of a policy that has left the framework (no torch)
    leaving.py    writes such a policy: weights, or one graph
"""
