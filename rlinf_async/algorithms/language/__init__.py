"""Advantages and losses over the tokens of language-model samples, registered by name.

::

    advantages.py   the table; grpo, rloo, reinforce++, reinforce++_baseline, gae
    losses.py       the table; ppo, gspo, cispo, sapo, reinforce, supervised; off-policy weights;
                    k1, k2, k3
"""
