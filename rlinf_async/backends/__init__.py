"""What computes: models, optimizers, sharding. Never imports channels or workers.

`base` says what workers ask of a backend, `registry` loads one by name; neither needs torch.
"""
