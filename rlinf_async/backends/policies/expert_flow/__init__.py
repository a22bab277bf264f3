"""Flows of folders that LeRobot wrote: an action expert beside a vision-language model.

::

    folder.py    what such a folder says, and whether it fits an environment (no torch)
    model.py     layers, expert, weights from and to the folder's names
    policy.py    the policy: actions, log-probs of chains, flow matching
    writing.py   a trained policy as such a folder
    smolvla.py   the policy "smolvla": trunk and settings of a SmolVLA
    pi0.py       the policy "pi0": those of a pi0
"""
