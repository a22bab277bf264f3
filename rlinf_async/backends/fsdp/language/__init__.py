"""Training language models with FSDP; see `language_training` for what every backend shares.

::

    packed row --model--> hidden states --head--> log-probs, entropies

    config.py      settings                      network.py     the modules that are sharded
    head.py        log-probs with few logits     step.py        one optimizer step
    forward.py     log-probs and values of many samples         reference.py   weights to swap in
    trainer.py     `LanguageTrainer`: a policy   critic.py      `LanguageTrainer`: a critic
    publishing.py  names of weights              sharded_publishing.py  each rank writes its rows
"""
