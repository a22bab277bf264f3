"""Trajectories of one iteration -> one batch: columns, advantages, levels, masks.

A batch has a row for each step; of a recurrent policy, one for each sequence: what one environment
did in the iteration, ``T`` steps, so that all columns are ``[N, T]`` and minibatches are of whole
sequences. It begins with the memory that the acting policy had there, and forgets at the steps that
begin an episode, as that one did: for the policy that acted, before the first update, the log-probs
are those with which it did.
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
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp import ppo as levels
from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, PPOConfig
from rlinf_async.backends.fsdp.ppo import FlatBatch
from rlinf_async.backends.policies.base import ObservationTensors, Policy, to_tensors
from rlinf_async.backends.policies.moments import Moments, batch_moments, merge_moments
from rlinf_async.backends.policies.recurrent import MEMORY, STARTS, RecurrentPolicy
from rlinf_async.messages.embodied import Bools, Floats, Trajectory
from rlinf_async.messages.spaces import STATE


def side_by_side(ordered: Sequence[Trajectory], field: str) -> NDArray[Any]:
    """The envs of all stages as columns of one array: [T, E, ...] each -> [T, sum E, ...]."""
    return np.concatenate([getattr(one, field) for one in ordered], axis=1)


def _acted(ordered: Sequence[Trajectory]) -> NDArray[Any]:
    """What the policy evaluates: its actions, or the chains by which they came about."""
    return side_by_side(ordered, "action" if ordered[0].chain is None else "chain")


def behind(member: collectives.Rank, trajectories: Sequence[Trajectory], version: int) -> bool:
    """Whether older weights than ``version`` acted in a step, on any rank. Collective."""
    mine = any(bool((one.version < version).any()) for one in trajectories)
    return any(bool(one) for one in collectives.all_gather(member, torch.tensor([mine])))


def valid_steps(ordered: Sequence[Trajectory]) -> Bools | None:
    """``[T, E]``: which steps are samples; None where all are."""
    if all(one.valid is None for one in ordered):
        return None
    every = [np.ones_like(one.terminated) if one.valid is None else one.valid for one in ordered]
    return np.concatenate(every, axis=1)


def _inputs(ordered: Sequence[Trajectory], reward: Floats) -> AdvantageInputs:
    """What one number for each step has to say about advantages."""
    return AdvantageInputs(
        reward=reward,
        value=side_by_side(ordered, "value"),
        terminated=side_by_side(ordered, "terminated"),
        truncated=side_by_side(ordered, "truncated"),
        final_value=side_by_side(ordered, "final_value"),
    )


def flat_batch(
    member: collectives.Rank,
    policy: Policy[Any],
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
) -> FlatBatch:
    """Return the samples of all trajectories, with their advantages. Collective.

    A sample of a recurrent policy is a whole sequence.
    """
    reward = side_by_side(ordered, "reward")
    if config.normalize_reward:
        reward = policy.return_normalizer.normalize(reward)
    if isinstance(policy, RecurrentPolicy):
        return _sequence_batch(member, policy, ordered, config, reward)
    observation = policy.normalized(
        to_tensors(rows(side_by_side(ordered, "observation")), member.device)
    )
    one_by_one = ordered[0].executed is None and ordered[0].log_prob.ndim == 2
    if one_by_one and config.advantage.group_size == 1:
        return _plain(member, ordered, config, reward, observation)
    return _masked(member, policy, ordered, config, reward, observation)


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


def _sequence_batch(
    member: collectives.Rank,
    policy: RecurrentPolicy,
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
    reward: Floats,
) -> FlatBatch:
    """Return the sequences of all trajectories, with their advantages. Collective."""
    inputs = _inputs(ordered, reward)
    made = compute_advantages(inputs, config.advantage)
    valid = valid_steps(ordered)
    counted = None if valid is None else _sequences(member, valid)
    advantage = _sequences(member, made.advantage)
    if config.ppo.normalize_advantage == "batch":
        advantage = _normalized_over_ranks(member, advantage, counted)
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


def _starts(inputs: AdvantageInputs, valid: Bools | None) -> Floats:
    """``[T, E]``: 1 at the steps that begin an episode. At the first step the memory tells."""
    ends = inputs.terminated | inputs.truncated
    if valid is not None:
        ends = ends | ~valid  # what such a step showed belonged to the old episode
    starts = np.zeros(ends.shape, np.float32)
    starts[1:] = ends[:-1]
    return starts


def _memory(
    member: collectives.Rank, policy: RecurrentPolicy, ordered: Sequence[Trajectory]
) -> Tensor:
    """``[N, H]`` before the first step of each sequence."""
    each = [
        np.zeros((one.reward.shape[1], policy.memory_size), np.float32)
        if one.memory is None
        else one.memory
        for one in ordered
    ]
    return torch.from_numpy(np.concatenate(each)).to(member.device)


def _sequences(member: collectives.Rank, array: NDArray[Any]) -> Tensor:
    """[T, N, ...] -> [N, T, ...]."""
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, 1))).to(member.device)


def rows(array: NDArray[Any]) -> NDArray[Any]:
    """[T, E, ...] -> [T * E, ...]."""
    return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))


def _plain(
    member: collectives.Rank,
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
    reward: Floats,
    observation: ObservationTensors,
) -> FlatBatch:
    """One number for each step, and nothing masked."""
    inputs = _inputs(ordered, reward)
    advantages = compute_advantages(inputs, config.advantage)
    batch = FlatBatch(
        observation=observation,
        action=_flat(member, _acted(ordered)),
        log_prob=_flat(member, side_by_side(ordered, "log_prob")),
        value=_flat(member, inputs.value[:-1]),
        advantage=_flat(member, advantages.advantage),
        returns=_flat(member, advantages.returns),
    )
    valid = valid_steps(ordered)
    if valid is not None:
        batch = _samples(member, batch, valid)
    if config.ppo.normalize_advantage == "batch":
        counted = None if batch.weight is None else batch.weight > 0
        advantage = _normalized_over_ranks(member, batch.advantage, counted)
        batch = batch._replace(advantage=advantage)
    return batch


def _samples(member: collectives.Rank, batch: FlatBatch, valid: Bools) -> FlatBatch:
    """Return the samples among the steps ``[T, E]``, as many rows on every rank. Collective.

    Ranks make the same optimizer steps. One that has fewer samples than another fills up with steps
    that are none: they have weight 0 in all means.
    """
    mask = _flat(member, valid)
    kept = mask.nonzero().squeeze(-1)
    counts = torch.cat(collectives.all_gather(member, torch.tensor([len(kept)])))
    most = int(counts.max())
    if most == int(counts.min()):
        return batch.take(kept)
    others = (~mask).nonzero().squeeze(-1)[: most - len(kept)]
    rows = batch.take(torch.cat([kept, others]))
    counted = (torch.arange(most, device=mask.device) < len(kept)).unsqueeze(1)
    weight = levels.weights(member, counted)
    return rows._replace(
        log_prob=rows.log_prob.unsqueeze(1),
        value=rows.value.unsqueeze(1),
        advantage=rows.advantage.unsqueeze(1),
        returns=rows.returns.unsqueeze(1),
        executed=counted,
        weight=weight,
        value_weight=weight,
    )


def _masked(
    member: collectives.Rank,
    policy: Policy[Any],
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
    reward: Floats,
    observation: ObservationTensors,
) -> FlatBatch:
    """Numbers at the configured levels; see `levels`."""
    steps = _steps(policy, ordered, config, reward)
    made = levels.chunk_advantages(steps, config.advantage)
    executed = _flat(member, steps.executed)
    old = _flat(member, side_by_side(ordered, "log_prob"))
    token_log_prob = old if old.ndim == 2 else old.unsqueeze(1)
    tokens = token_log_prob.shape[1]
    # A policy with one log-prob for a whole chunk has nothing that could be left out of it.
    taken = executed.any(1, keepdim=True) if tokens == 1 else levels.spread(executed, tokens)
    parts = levels.parts_of(config.ppo.log_prob_level, tokens, executed.shape[1])
    valid = taken.view(len(taken), parts, -1).any(-1)
    advantage = _flat(member, made.advantage)
    counted = executed.any(1, keepdim=True)
    if advantage.shape[1] > 1:
        counted = levels.spread(executed, advantage.shape[1])
    if config.ppo.normalize_advantage == "batch":
        advantage = _normalized_over_ranks(member, advantage, counted)
    value = _flat(member, steps.value[:-1])[:, : advantage.shape[1]]
    return FlatBatch(
        observation=observation,
        action=_flat(member, _acted(ordered)),
        log_prob=levels.summed(token_log_prob, taken, parts),
        value=value,
        advantage=levels.spread(advantage, parts),
        returns=_flat(member, made.returns),
        executed=taken,
        weight=levels.weights(member, valid),
        value_weight=levels.weights(member, counted),
    )


def _steps(
    policy: Policy[Any],
    ordered: Sequence[Trajectory],
    config: EmbodiedTrainerConfig,
    reward: Floats,
) -> levels.Steps:
    chunked = ordered[0].executed is not None
    executed = np.ones((*reward.shape, 1), np.bool_)
    each = reward[..., None]
    if chunked:
        executed = side_by_side(ordered, "executed")
        each = side_by_side(ordered, "action_reward")
        if config.normalize_reward:
            each = policy.return_normalizer.normalize(each)
    inputs, log_prob = _inputs(ordered, reward), side_by_side(ordered, "log_prob")
    if config.advantage.group_size > 1:
        executed = levels.masked_after_done(executed, inputs.terminated | inputs.truncated)
    return levels.Steps(
        reward=each,
        executed=executed,
        value=inputs.value if inputs.value.ndim == 3 else inputs.value[..., None],
        tokens=log_prob.shape[2] if log_prob.ndim == 3 else 1,
        terminated=inputs.terminated,
        truncated=inputs.truncated,
        final_value=inputs.final_value,
    )


def _flat(member: collectives.Rank, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(rows(array)).to(member.device)


def _normalized_over_ranks(
    member: collectives.Rank, advantage: Tensor, counted: Tensor | None = None
) -> Tensor:
    seen = advantage.flatten() if counted is None else advantage[counted]
    moments = merged_moments(member, batch_moments(seen))
    deviation = moments.variance.sqrt() + 1e-8
    return ((advantage - moments.mean) / deviation).to(torch.float32)


def merged_moments(member: collectives.Rank, moments: Moments) -> Moments:
    """Return the moments of all ranks together, equal on each to the last bit."""
    columns = [collectives.all_gather(member, part) for part in moments]
    parts = [Moments(*row) for row in zip(*columns, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = merge_moments(total, part)
    return total
