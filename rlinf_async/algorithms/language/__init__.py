"""Advantages and losses over the tokens of language-model samples, registered by name.

::

    config.py           which ones, and their coefficients (no torch)
    advantages.py       the table, rewards per token, unscored samples, normalisation
      group_relative.py   grpo, rloo, reinforce++, reinforce++_baseline
      token_gae.py        gae
    losses.py           the table; ppo, gspo, reinforce, supervised
    off_policy.py       weights for samples of older or other policies
    kl.py               k1, k2, k3
    aggregation.py      from the losses of tokens to the loss of a batch
"""
