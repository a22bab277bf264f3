"""What training a language model takes, whichever library computes.

::

    samples --pack--> one row of tokens --model (FSDP, Megatron)--> log-probs, entropies, or values
                                                                            |
    one optimizer step <--gradient / units-- backward <-- token losses x weights

    config.py     settings                            packing.py    samples -> one row of tokens
    objective.py  losses of a policy and a critic     totals.py     sums of a global batch
    supervised.py a short warm start                  hugging_face.py  folder or config -> model
    attention.py  each sample sees only itself        describing.py    files of a model's folder
    kept_weights.py  other weights, by tag
"""
