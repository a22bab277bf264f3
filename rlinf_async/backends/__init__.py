"""What computes: models, optimizers, sharding. Never imports channels or workers.

`base` and `language` say what workers ask of a backend, `parts` finds one by name; none of them
needs torch.
"""
