"""What training a language model takes, whichever library computes.

::

    samples --pack--> one row of tokens --model (FSDP, Megatron)--> log-probs, entropies, or values
                                                                            |
    one optimizer step <--gradient / units-- backward <-- token losses x weights

    config.py     settings
    supervised.py a short warm start
    objective.py  samples -> one row of tokens; losses of a policy and a critic; sums of a batch
    model.py      folder or config -> model; each sample of a row sees only itself
    trainer.py    what the trainers of all libraries share
    weights.py    published in place; other weights, by tag
"""
