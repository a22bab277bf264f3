"""Training language models with FSDP; see `language_training` for what every backend shares.

::

    packed row --model--> hidden states --head--> log-probs, entropies

    config.py       settings
    network.py      the modules that are sharded; log-probs with few logits
    trainer.py      `LanguageTrainer` of a policy or a critic: forward passes, optimizer steps
    publishing.py   names of weights; each rank writes its rows
"""
