"""A world model: what an environment shows, pays and when it ends, learnt from recorded episodes.

::

    config.py    sizes, spaces, what its file says of it. No torch
    recorded.py  recorded episodes as windows of steps. No torch
    model.py     encoder, latent transition, heads
    trainer.py   one rank that trains it, over `FSDPModelManager`; its file
    dreaming.py  many environments that it is
"""
