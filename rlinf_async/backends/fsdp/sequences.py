"""Trajectories of one iteration -> whole sequences, for a recurrent policy.

A sequence is what one environment did in the iteration, ``T`` steps; all columns are ``[N, T]``,
with ``N`` sequences, and minibatches are of whole sequences. It begins with the memory that the
acting policy had there, and forgets at the steps that begin an episode, as that one did: before the
first update the log-probs are those of the acting policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.algorithms.advantages import AdvantageInputs, compute_advantages
from rlinf_async.backends.fsdp import levels, ranks
from rlinf_async.backends.fsdp.columns import side_by_side, valid_steps
from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, PPOConfig
from rlinf_async.backends.fsdp.minibatch import FlatBatch
from rlinf_async.backends.policies.moments import batch_moments
from rlinf_async.backends.policies.recurrent import MEMORY, STARTS, RecurrentPolicy
from rlinf_async.messages.embodied import Bools, Floats, Trajectory
from rlinf_async.messages.spaces import STATE


def sequence_batch(
    member: ranks.Rank,
    policy: RecurrentPolicy,
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
) -> FlatBatch:
    """Return the sequences of all trajectories, with their advantages. Collective."""
    reward = side_by_side(ordered, "reward")
    if config.normalize_reward:
        reward = policy.return_normalizer.normalize(reward)
    inputs = AdvantageInputs(
        reward=reward,
        value=side_by_side(ordered, "value"),
        terminated=side_by_side(ordered, "terminated"),
        truncated=side_by_side(ordered, "truncated"),
        final_value=side_by_side(ordered, "final_value"),
    )
    made = compute_advantages(inputs, config.advantage)
    valid = valid_steps(ordered)
    counted = None if valid is None else _sequences(member, valid)
    advantage = _sequences(member, made.advantage)
    if config.ppo.normalize_advantage == "batch":
        seen = advantage.flatten() if counted is None else advantage[counted]
        moments = ranks.merged_moments(member, batch_moments(seen))
        advantage = ((advantage - moments.mean) / (moments.variance.sqrt() + 1e-8)).float()
    weight = None if counted is None else levels.weights(member, counted)
    observation = policy.normalized(
        {STATE: _sequences(member, side_by_side(ordered, "observation"))}
    )
    return FlatBatch(
        observation={
            **observation,
            MEMORY: _memory(member, policy, ordered),
            STARTS: _sequences(member, _starts(inputs, valid)),
        },
        action=_sequences(member, side_by_side(ordered, "action")),
        log_prob=_sequences(member, side_by_side(ordered, "log_prob")),
        value=_sequences(member, inputs.value[:-1]),
        advantage=advantage,
        returns=_sequences(member, made.returns),
        weight=weight,
        value_weight=weight,
    )


def of_sequences(config: PPOConfig, steps: int) -> PPOConfig:
    """Return sizes in sequences of ``steps`` steps; `ValueError` where they do not divide."""
    micro = config.micro_batch_size
    if config.minibatch_size % steps or (micro or 0) % steps:
        raise ValueError(
            f"minibatch_size is {config.minibatch_size}, micro_batch_size is {micro}: a recurrent "
            f"policy is trained on whole sequences of {steps} steps, take multiples of that"
        )
    return msgspec.structs.replace(
        config,
        minibatch_size=config.minibatch_size // steps,
        micro_batch_size=None if micro is None else micro // steps,
    )


def _starts(inputs: AdvantageInputs, valid: Bools | None) -> Floats:
    """``[T, E]``: 1 at the steps that begin an episode. At the first step the memory tells."""
    ends = inputs.terminated | inputs.truncated
    if valid is not None:
        ends = ends | ~valid  # what such a step showed belonged to the old episode
    starts = np.zeros(ends.shape, np.float32)
    starts[1:] = ends[:-1]
    return starts


def _memory(member: ranks.Rank, policy: RecurrentPolicy, ordered: Sequence[Trajectory]) -> Tensor:
    """``[N, H]`` before the first step of each sequence."""
    each = [
        np.zeros((one.reward.shape[1], policy.memory_size), np.float32)
        if one.memory is None
        else one.memory
        for one in ordered
    ]
    return torch.from_numpy(np.concatenate(each)).to(member.device)


def _sequences(member: ranks.Rank, array: NDArray[Any]) -> Tensor:
    """[T, N, ...] -> [N, T, ...]."""
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, 1))).to(member.device)
