"""Training language models with FSDP.

::

    samples --pack--> one row of tokens --model--> hidden states --head--> log-probs, entropies
                                                                    |
                        gradients, added up undivided <--backward-- token losses x weights

    config.py      settings                      packing.py     samples -> one row of tokens
    model.py       folder or config -> model     attention.py   each sample sees only itself
    network.py     the modules that are sharded  head.py        log-probs with few logits at a time
    step.py        one optimizer step            forward.py     log-probs and values of many samples
    trainer.py     `LanguageTrainer`: a policy   critic.py      `LanguageTrainer`: a critic
    reference.py   weights to swap in            supervised.py  a short warm start
    publishing.py  names of weights              sharded_publishing.py  each rank writes its rows
"""
