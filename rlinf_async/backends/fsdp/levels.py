"""At which level an embodied sample is trained: token, action or chunk, and what is masked.

A step of an environment that takes chunks executes ``k`` actions, each of some tokens. A policy may
answer with a log-prob for each token, ``[N, k * tokens]``, and with a value for each action,
``[N, k]``, or each token. Two settings say what the loss is made of::

    advantage.level      chunk    rewards are summed; one value, one advantage for a chunk
                         action   each action has its own
                         token    each token has its own; the reward of an action is that of its
                                  last token
    ppo.log_prob_level   chunk    one ratio for all tokens of a chunk
                         action   one for those of each action
                         token    one for each

Actions that were not executed, because the episode had ended, count nowhere: log-probs of their
tokens are left out of sums, and their rows have weight 0. Weights have mean 1 over all ranks, so
that the mean of weighted losses is the masked mean, whatever share of the batch a rank or a
micro-batch holds.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.algorithms.advantages import AdvantageInputs, Advantages, compute_advantages
from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.backends.fsdp import ranks
from rlinf_async.messages.embodied import Bools, Floats

ORDER: Final = ("token", "action", "chunk")
"""from fine to coarse"""


class Steps(NamedTuple):
    """One iteration of ``E`` environments; ``k`` is 1 where actions come one by one."""

    reward: Floats
    """``[T, E, k]``"""
    executed: Bools
    """``[T, E, k]``"""
    value: Floats
    """``[T + 1, E, V]``: ``V`` is 1, or ``k``, or ``tokens``"""
    tokens: int
    """log-probs of a sample: 1, or the tokens of ``k`` actions"""
    terminated: Bools
    truncated: Bools
    final_value: Floats
    """all three ``[T, E]``"""


def masked_after_done(executed: Bools, ended: Bools) -> Bools:
    """Leave out all steps after the first that ended an episode, ``[T, E, k]``."""
    before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended
    kept: Bools = executed & (before == 0)[..., None]
    return kept


def chunk_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    """Return advantages and returns ``[T, E, 1]``, or ``[T, E, k]`` at the level ``action``, or as
    many as there are values at the level ``token``."""
    if config.level == "chunk":
        rows = AdvantageInputs(
            reward=(steps.reward * steps.executed).sum(-1, dtype=np.float32),
            value=steps.value[..., 0],
            terminated=steps.terminated,
            truncated=steps.truncated,
            final_value=steps.final_value,
            valid=np.asarray(steps.executed.any(-1)),
        )
        made = compute_advantages(rows, config)
        return Advantages(made.advantage[..., None], made.returns[..., None])
    return _action_advantages(steps if config.level == "action" else by_token(steps), config)


def by_token(steps: Steps) -> Steps:
    """Return steps whose actions are the tokens of the given ones: as many as there are values.

    Raises:
        ValueError: the policy gives no value for each token.
    """
    *shape, actions = steps.reward.shape
    values = steps.value.shape[-1]
    tokens, rest = divmod(steps.tokens, actions)
    if rest or values != steps.tokens:
        raise ValueError(
            f"actor.advantage.level is 'token', and the policy gives {values} values for the "
            f"{steps.tokens} tokens of {actions} actions: it must give one for each token (its "
            "setting token_values says so), or set 'action' or 'chunk'"
        )
    reward = np.zeros((*shape, actions * tokens), np.float32)
    reward[..., tokens - 1 :: tokens] = steps.reward
    return steps._replace(reward=reward, executed=steps.executed.repeat(tokens, axis=-1))


def _action_advantages(steps: Steps, config: AdvantageConfig) -> Advantages:
    length, envs, size = steps.reward.shape
    last = np.maximum(
        steps.executed.sum(-1) - 1, 0
    )  # the action at which an episode may have ended
    at_end = np.arange(size) == last[..., None]
    rows = AdvantageInputs(
        reward=_by_action(steps.reward * steps.executed),
        value=np.concatenate([_by_action(steps.value[:-1]), steps.value[-1:, :, 0]]),
        terminated=_by_action(at_end & steps.terminated[..., None]),
        truncated=_by_action(at_end & steps.truncated[..., None]),
        final_value=_by_action(at_end * steps.final_value[..., None]),
        valid=_by_action(steps.executed),
    )
    made = compute_advantages(rows, config)
    return Advantages(*(one.reshape(length, size, envs).swapaxes(1, 2) for one in made))


def _by_action(array: NDArray[Any]) -> NDArray[Any]:
    """``[T, E, k]`` -> ``[T * k, E]``, in the order of time."""
    length, envs, size = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(length * size, envs)


def parts_of(level: str, tokens: int, actions: int) -> int:
    """Return how many log-probs a sample of so many tokens has at the level."""
    return {"token": tokens, "action": actions, "chunk": 1}[level]


def summed(tokens: Tensor, executed: Tensor, parts: int) -> Tensor:
    """Return ``[N, parts]``: sums of ``[N, tokens]`` over the executed ones of each part."""
    return torch.where(executed, tokens, 0.0).view(len(tokens), parts, -1).sum(-1)


def spread(action: Tensor, columns: int) -> Tensor:
    """Return ``[N, columns]`` of a number for each action (or one for all), ``[N, k]``."""
    return action.repeat_interleave(columns // action.shape[1], dim=1)


def weights(member: ranks.Rank, mask: Tensor) -> Tensor:
    """Return weights for ``mask``, 0 where it is False, with mean 1 over all ranks. Collective."""
    counts = torch.tensor([float(mask.sum()), float(mask.numel())], dtype=torch.float64)
    valid, total = torch.stack(ranks.all_gather(member, counts)).sum(0).tolist()
    scale: float = total / max(valid, 1.0)
    return mask.to(torch.float32) * scale
