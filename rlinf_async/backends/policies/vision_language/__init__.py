"""The policy ``vision_language_action``: a vision-language model whose last words are actions.

::

    config.py     sizes, bins, chunks, LoRA (no torch)
    backbone.py   the model, from sizes or a folder: images and text -> hidden states
    tokens.py     action values <-> bins
    policy.py     the policy
    lora.py       adapters (peft)
"""
