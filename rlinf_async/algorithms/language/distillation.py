"""Divergences between the next-token distributions of a policy ``p`` and its teacher ``q``.

``N`` is the number of trained tokens; all log-probs are under the temperature of the sample.

::

    reverse   KL(p, q)  = sum p (log p - log q)       seeks a mode of the teacher
    forward   KL(q, p)  = sum q (log q - log p)       covers all that the teacher may say
    mixed     beta KL(q, p) + (1 - beta) KL(p, q)
    jsd       beta KL(q, m) + (1 - beta) KL(p, m),    m = beta q + (1 - beta) p

Sources: generalized JSD, Agarwal et al. 2024, "On-Policy Distillation of Language Models", equation
1, as TRL's ``GKDTrainer`` has it (its ``beta`` 0 is ``forward``, 1 is ``reverse``); ``mixed`` as in
NeMo RL's ``DistillationLossFn``.

Of a teacher that tells its ``k`` most likely tokens alone, the others count as one token: each
divergence is then a lower bound of that over the whole vocabulary, and probability that the policy
gives to other tokens costs something. ``left_out`` compares the distributions over the ``k``
tokens, as NeMo RL does by default (``zero_outside_topk = false``): what the policy gives to others
costs nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig

LEAST_REST = 1e-9
"""least probability of all tokens that are not among the most likely ones: what float32 leaves of 1
less their sum is rounding below 1e-7"""

NEVER = -1e30
"""log-prob of a token that cannot be drawn"""


def divergence(
    policy: Tensor, teacher: Tensor, config: LanguageLossConfig, *, whole: bool
) -> Tensor:
    """Return the divergence of each token ``[N]``.

    Args:
        policy: ``[N, k]``: log-probs of tokens, with their gradient.
        teacher: ``[N, k]``: its log-probs of the same tokens.
        config: which divergence.
        whole: the tokens are the whole vocabulary.
    """
    # Tokens from which sampling by top-k or top-p kept neither to draw: they add 0, and not NaN.
    policy, teacher = policy.clamp(min=NEVER), teacher.clamp(min=NEVER)
    if not whole:
        policy, teacher = _complete(policy, config), _complete(teacher, config)
    beta = config.divergence_beta
    if config.divergence == "reverse":
        return _kl(policy, teacher)
    if config.divergence == "forward":
        return _kl(teacher, policy)
    if config.divergence == "mixed":
        return beta * _kl(teacher, policy) + (1.0 - beta) * _kl(policy, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(policy, mixture)


def _complete(log_prob: Tensor, config: LanguageLossConfig) -> Tensor:
    """Return a distribution over the tokens ``[N, k]``, or over these and all others together
    ``[N, k + 1]``."""
    if config.divergence_outside == "left_out":
        return log_prob.log_softmax(-1)
    rest = (1.0 - log_prob.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([log_prob, rest.log()], -1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one, other) ``[N]`` of log-probs ``[N, k]``."""
    return (one.exp() * (one - other)).sum(-1)
