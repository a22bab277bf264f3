"""The policy ``vision_language_action``: a vision-language model whose last words are actions.

::

    config.py    sizes, bins, chunks, LoRA (no torch)
    policy.py    the policy: its model, action values <-> bins, adapters (peft)
    continuous.py  action values as they are, of a network
    fitting.py   whether a folder, sizes and spaces fit
"""
