"""The policy ``vision_language_action``: a vision-language model whose last words are actions.

::

    config.py    sizes, bins, chunks, LoRA (no torch)
    policy.py    the policy: its model, action values <-> bins, adapters (peft)
    fitting.py   whether a folder, sizes and spaces fit
"""
