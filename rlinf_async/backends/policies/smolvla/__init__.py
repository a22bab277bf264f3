"""The policy ``smolvla``: the flow of a folder that LeRobot wrote of a SmolVLA.

::

    folder.py    what the folder says, and whether it fits an environment (no torch)
    model.py     trunk, action expert, weights from and to the folder's names
    policy.py    the policy: actions, log-probs of chains, flow matching
    writing.py   a trained policy as such a folder
"""
