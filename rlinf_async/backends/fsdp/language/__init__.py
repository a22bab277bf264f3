"""Training language models with FSDP.

::

    samples --pack--> one row of tokens --model--> hidden states --head--> log-probs, entropies
                                                                    |
                        gradients, added up undivided <--backward-- token losses x weights

    config.py     what can be told                packing.py    samples -> one row of tokens
    model.py      folder or config -> model       attention.py  each sample sees only itself
    network.py    what is sharded and called      head.py       log-probs without all logits at once
    manager.py    model and optimizer             forward.py    log-probs and values of any number
    step.py       one optimizer step              trainer.py    `LanguageTrainer` of a policy
    publishing.py names of weights                critic.py     and of a critic
    reference.py  weights to swap in              supervised.py a short warm start
"""
