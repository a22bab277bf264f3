"""Tokens, actions, chunks: what is summed, what is masked, and what the loss is then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.algorithms.advantages import AdvantageInputs, compute_advantages
from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.backends.fsdp import ppo as levels
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.rollout_batch import flat_batch
from tests.backends.vision_language.kit import EXECUTED, NUMBERS, trainer_config, trajectory

ALONE: Any = SimpleNamespace(rank=0, world_size=1, group=None, device=torch.device("cpu"))


def steps(executed: Any, reward: Any, **fields: Any) -> levels.Steps:
    shown = np.array(executed, bool)
    rows = shown.shape[:2]
    given = {
        "value": np.zeros((rows[0] + 1, rows[1], shown.shape[2]), np.float32),
        "terminated": np.zeros(rows, bool),
        "truncated": np.zeros(rows, bool),
        "final_value": np.zeros(rows, np.float32),
        "tokens": shown.shape[2],
    } | fields
    return levels.Steps(reward=np.array(reward, np.float32), executed=shown, **given)


def test_actions_of_a_chunk_have_the_advantages_of_steps() -> None:
    """With whole chunks, the level 'action' is GAE over all steps one by one."""
    drawn = np.random.default_rng(0)
    reward, value = drawn.normal(size=(4, 3, 2)), drawn.normal(size=(5, 3, 2)).astype(np.float32)
    terminated = np.array(drawn.random((4, 3)) < 0.3)
    config = AdvantageConfig(gamma=0.9, level="action")
    made = levels.chunk_advantages(
        steps(np.ones((4, 3, 2)), reward, value=value, terminated=terminated), config
    )
    unrolled = np.zeros((8, 3), bool)
    unrolled[1::2] = terminated
    expected = compute_advantages(
        AdvantageInputs(
            reward=reward.swapaxes(1, 2).reshape(8, 3).astype(np.float32),
            value=np.concatenate([value[:-1].swapaxes(1, 2).reshape(8, 3), value[-1:, :, 0]]),
            terminated=unrolled,
            truncated=np.zeros((8, 3), bool),
            final_value=np.zeros((8, 3), np.float32),
        ),
        config,
    )
    assert np.allclose(made.advantage.swapaxes(1, 2).reshape(8, 3), expected.advantage)
    assert np.allclose(made.returns.swapaxes(1, 2).reshape(8, 3), expected.returns)


def test_the_reward_of_a_chunk_is_the_sum_of_the_executed_actions() -> None:
    executed = [[[1, 1]], [[1, 0]]]
    made = levels.chunk_advantages(
        steps(executed, [[[1, 2]], [[4, 100]]]), AdvantageConfig(gamma=0.0)
    )
    assert made.advantage[..., 0].tolist() == [[3.0], [4.0]]


def test_an_episode_that_ends_within_a_chunk_learns_nothing_from_what_follows() -> None:
    executed, reward = [[[1, 0]], [[1, 1]]], np.array([[[1.0, 9.0]], [[5.0, 5.0]]])
    ended = np.array([[True], [False]])
    config = AdvantageConfig(gamma=1.0, gae_lambda=1.0, level="action")
    made = levels.chunk_advantages(steps(executed, reward, terminated=ended), config)
    assert made.advantage[0, 0, 0] == 1.0
    assert made.advantage[1, 0].tolist() == [10.0, 5.0]


@pytest.mark.parametrize("values", [1, 2, 3], ids=["chunk", "actions", "neither"])
def test_a_policy_without_a_value_for_each_token_is_refused_at_their_level(values: int) -> None:
    made = steps([[[1, 1]], [[1, 1]]], [[[1.0, 9.0]], [[2.0, 4.0]]], tokens=4)
    other = made._replace(value=np.zeros((3, 1, values), np.float32))
    said = f"{values} values for the 4 tokens of 2 actions.*one for each token"
    with pytest.raises(ValueError, match=said):
        levels.chunk_advantages(other, AdvantageConfig(level="token"))


def test_tokens_have_the_advantages_of_steps_and_the_last_of_an_action_its_reward() -> None:
    """Two actions of two tokens, of which the episode's end leaves out the second action."""
    executed, reward = [[[1, 0]], [[1, 1]]], [[[1.0, 9.0]], [[2.0, 4.0]]]
    value = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    ended = np.array([[True], [False]])
    config = AdvantageConfig(gamma=0.5, gae_lambda=0.0, level="token")
    made = levels.chunk_advantages(
        steps(executed, reward, value=value, terminated=ended, tokens=4), config
    )
    assert made.advantage.shape == made.returns.shape == (2, 1, 4)
    # r + 0.5 V(next token) - V(token), whose values are 0, 1 | 4, 5, 6, 7 and 8 at the end.
    assert made.advantage[0, 0, :2].tolist() == [0.0 + 0.5 * 1 - 0, 1.0 - 1]
    assert made.advantage[1, 0].tolist() == [
        0.5 * 5 - 4, 2 + 0.5 * 6 - 5, 0.5 * 7 - 6, 4 + 0.5 * 8 - 7
    ]  # fmt: skip


def test_nothing_counts_after_the_first_episode_of_a_group() -> None:
    ended = np.array([[0, 0], [1, 0], [0, 0], [1, 1]], bool)
    kept = levels.masked_after_done(np.ones((4, 2, 1), bool), ended)
    assert kept[..., 0].T.tolist() == [[True, True, False, False], [True] * 4]


def test_log_probs_are_summed_over_executed_tokens() -> None:
    tokens = torch.arange(8.0).reshape(1, 8)
    executed = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    assert levels.summed(tokens, executed, 1).tolist() == [[6.0]]
    assert levels.summed(tokens, executed, 4).tolist() == [[1.0, 5.0, 0.0, 0.0]]
    assert levels.summed(tokens, executed, 8).tolist() == [[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]]


def test_the_mean_of_weights_is_one_however_much_is_masked() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    made = levels.weights(ALONE, mask)
    assert made.mean() == 1.0
    assert made.tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("advantage", "log_prob", "parts", "values"),
    [
        ("chunk", "chunk", 1, 1),
        ("chunk", "action", EXECUTED, 1),
        ("chunk", "token", EXECUTED * NUMBERS, 1),
        ("action", "action", EXECUTED, EXECUTED),
        ("action", "token", EXECUTED * NUMBERS, EXECUTED),
        ("token", "token", EXECUTED * NUMBERS, EXECUTED * NUMBERS),
    ],
)
def test_every_level_trains(advantage: Any, log_prob: Any, parts: int, values: int) -> None:
    config = trainer_config()
    by_token = advantage == "token"
    policy = msgspec.structs.replace(config.fsdp.policy, token_values=by_token)
    config = msgspec.structs.replace(
        config,
        fsdp=msgspec.structs.replace(config.fsdp, policy=policy),
        advantage=AdvantageConfig(level=advantage),
        ppo=msgspec.structs.replace(config.ppo, log_prob_level=log_prob, epochs=1),
    )
    trainer = EmbodiedTrainer(config, 1, 0)
    ordered = [trajectory(0), trajectory(1)]
    if by_token:
        for one in ordered:
            one.value = one.value.repeat(NUMBERS, axis=-1)
    batch = flat_batch(ALONE, trainer._policy, ordered, config)
    assert batch.log_prob.shape == batch.advantage.shape == (32, parts)
    assert batch.returns.shape == batch.value.shape == (32, values)
    assert batch.weight is not None
    assert batch.weight.shape == (32, parts)
    assert float(batch.weight.mean()) == pytest.approx(1.0)
    assert trainer.train(ordered)["skipped_updates"] == 0.0
