"""Gradients of episodes are those of plain torch: on one rank, on two, and over Megatron.

The whole table: ways to add up the losses of tokens x advantages x KL and entropy.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.algorithms.config import Aggregation, LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.language_training.objective import by_tokens, pack_responses
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.messages.language import TrainingSample
from rlinf_async.workers.inference import bare_sample, with_log_probs
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language import oracle
from tests.backends.language.kit import (
    QWEN3,
    as_sample,
    assert_close,
    episodes,
    micro_batches,
    samples,
    trainer_config,
    weights,
    whole_gradients,
)

ADVANTAGES = ("grpo", "gae", "turn_grpo")
TABLE = {
    f"{aggregation}, {advantage}, kl {kl}, entropy {entropy}": (
        LanguageAdvantageConfig(name=advantage),
        LanguageLossConfig(aggregation=aggregation, kl_coefficient=kl, entropy_coefficient=entropy),
    )
    for aggregation, advantage, kl, entropy in itertools.product(
        get_args(Aggregation), ADVANTAGES, (0.0, 0.1), (0.0, 0.01)
    )
}
MEGATRON = {
    "tp2": {"tp": 2},
    "tp2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}


def by_trainer(trainer: Any, cell: str, size: int = 3) -> dict[str, Tensor]:
    """The same by a trainer of any kind, which is left as it was."""
    advantage, loss = TABLE[cell]
    config = msgspec.structs.replace(trainer.config, advantage=advantage, loss=loss)
    trainer.config = trainer.objective.config = config
    at = trainer.data_rank
    batch = [one for one in episodes() if one.group % at.size == at.rank] if at.is_io else []
    ready = trainer.compute_advantages(batch)
    if trainer.normalizes and at.is_io:
        ready = trainer.normalize_advantages(ready)
    return whole_gradients(trainer, ready, size)


def megatron_trainer(world_size: int, rank: int, **fields: Any) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    model = LanguageModelConfig(config=QWEN3)
    config = MegatronTrainerConfig(megatron=MegatronConfig(model=model, **fields))
    return MegatronTrainer(config, world_size, rank)


def on_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    found: dict[str, Any] = {}
    trainers: dict[str, Any] = {"fsdp": PolicyTrainer(trainer_config(), world_size, rank)}
    if importlib.util.find_spec("megatron") is not None:
        for name, fields in MEGATRON.items():
            trainers[name] = megatron_trainer(world_size, rank, **fields)
    for name, trainer in trainers.items():
        found[name] = {cell: by_trainer(trainer, cell) for cell in TABLE}
    save_result(folder, rank, found)


@pytest.fixture(scope="module")
def alone() -> PolicyTrainer:
    return PolicyTrainer(trainer_config(), 1, 0)


@pytest.fixture(scope="module")
def expected(alone: PolicyTrainer) -> dict[str, dict[str, Tensor]]:
    """By plain torch, with an untouched model of transformers."""
    transformers: Any = importlib.import_module("transformers")
    live: Any = alone.language
    model = transformers.AutoModelForCausalLM.from_config(
        type(live.config).from_dict(live.config.to_dict()), attn_implementation="eager"
    )
    model.load_state_dict(weights(alone), strict=False)
    model.tie_weights()
    return {
        cell: oracle.gradients(model.eval(), episodes(), advantage.name, loss)
        for cell, (advantage, loss) in TABLE.items()
    }


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = in_processes(on_two_ranks, 2, tmp_path_factory.mktemp("double"))[0]
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-3
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("cell", TABLE)
def test_one_rank_has_the_gradients_of_plain_torch(
    cell: str, alone: PolicyTrainer, expected: dict[str, dict[str, Tensor]]
) -> None:
    for size in (1, 3, 8):
        assert_same(by_trainer(alone, cell, size), expected[cell])


@pytest.mark.parametrize("name", ["fsdp", *MEGATRON])
def test_two_ranks_have_the_gradients_of_plain_torch(
    name: str, expected: dict[str, dict[str, Tensor]], double: dict[str, Any]
) -> None:
    if name != "fsdp":
        pytest.importorskip("megatron.core")
    for cell in TABLE:
        assert_same(double[name][cell], expected[cell])


def apart(one: TrainingSample) -> list[TrainingSample]:
    """Its branches, each as a sample whose tokens all were drawn."""
    return [
        bare_sample(prompt, one.response_ids[part], temperature=one.temperature)
        for prompt, part in one.sequences
    ]


@pytest.mark.parametrize("limit", [10_000, 20])
def test_log_probs_are_those_of_each_branch_alone_and_0_where_a_token_was_given(limit: int) -> None:
    trainer = PolicyTrainer(trainer_config(max_tokens_per_forward=limit), 1, 0)
    batch = [msgspec.structs.replace(one, kept=None) for one in episodes()]
    for one, found in zip(batch, trainer.log_probs(batch), strict=True):
        alone = np.concatenate(trainer.log_probs(apart(one)))
        expected = np.where(one.drawn_mask, alone, 0.0)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_inference_workers_see_an_episode_as_the_trainer_does() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    batch = episodes()
    done = with_log_probs(trainer, [as_sample(one) for one in batch], reference=False)
    for one, expected in zip(done, trainer.log_probs(batch), strict=True):
        assert one.prev_log_prob is not None
        np.testing.assert_array_equal(one.prev_log_prob, expected)


def test_a_token_that_was_given_has_no_part_in_any_number() -> None:
    trainer = PolicyTrainer(trainer_config(loss=TABLE[next(reversed(TABLE))][1]), 1, 0)
    batch = trainer.compute_advantages(episodes())
    drawn = sum(int(one.loss_mask.sum()) for one in batch)
    assert drawn < sum(len(one.response_ids) for one in batch if one.scored)
    metrics = trainer.training_step(micro_batches(batch, 3))
    assert metrics["tokens"] == metrics["engine_actor_tokens"] == drawn
    assert all(math.isfinite(number) for number in metrics.values())


LOSSES = [
    LanguageLossConfig(
        name=name, proximal=proximal, off_policy=off_policy, early_stop_ratio=1.05,
        aggregation="sequence-mean-token-mean", kl_coefficient=0.1, entropy_coefficient=0.01,
    )
    for name in ("ppo", "gspo", "cispo", "sapo", "reinforce")
    for proximal in ("auto", "behaviour", "current", "step")
    for off_policy in ("none", "truncated", "truncated_sequence", "decoupled", "icepop")
    if proximal != "behaviour" or off_policy == "none"
]  # fmt: skip


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss.name}, {loss.proximal}, {loss.off_policy}"
)
def test_whatever_stands_at_a_token_that_was_given_changes_nothing_to_the_bit(
    loss: LanguageLossConfig,
) -> None:
    """Not where it is NaN, and not where it is a number like another."""
    found = []
    for filler in (math.nan, -0.3):
        trainer = PolicyTrainer(trainer_config(loss=loss), 1, 0)
        batch = trainer.compute_advantages(episodes())
        assert all(one.advantage is not None for one in batch)
        for one, name in itertools.product(batch, ("prev", "ref", "behaviour", "advantage")):
            field = {"behaviour": "log_prob", "advantage": "advantage"}.get(
                name, f"{name}_log_prob"
            )
            getattr(one, field)[~one.drawn_mask] = filler
        found.append(dict(trainer.training_step(micro_batches(batch, 3))))
    assert found[0] == found[1]
    assert all(math.isfinite(number) for number in found[0].values())


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "gae", "reinforce++"])
def test_samples_that_were_drawn_whole_are_trained_as_ever_to_the_bit(advantage: str) -> None:
    config = trainer_config(advantage=LanguageAdvantageConfig(name=advantage))
    found = []
    for drawn in (True, False):
        trainer = PolicyTrainer(config, 1, 0)
        batch = samples(2)
        for one in batch:
            one.drawn = np.ones(len(one.response_ids), np.bool_) if drawn else None
        batch = trainer.normalize_advantages(trainer.compute_advantages(batch))
        found.append(
            (trainer.log_probs(batch), dict(trainer.training_step(micro_batches(batch, 3))))
        )
    (masked, numbers), (plain, expected) = found
    assert numbers == expected
    for left, right in zip(masked, plain, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_critic_learns_the_returns_of_what_was_drawn() -> None:
    config = trainer_config(advantage=LanguageAdvantageConfig(name="gae"))
    trainer = CriticTrainer(config, 1, 0)
    batch = trainer.compute_advantages(episodes())
    returns = np.concatenate(
        [one.returns[one.loss_mask] for one in batch if one.returns is not None]
    )
    values = np.concatenate(trainer.values(batch))
    assert not values.any()  # its head begins at 0
    found = trainer.training_step(micro_batches(batch, 3))
    assert found["loss"] == pytest.approx(0.5 * float(np.square(returns).mean()), rel=1e-5)


def test_a_limit_of_tokens_counts_all_branches() -> None:
    one = next(one for one in episodes() if one.branches)
    every = sum(one.tokens for one in apart(one))
    assert one.tokens == every
    assert by_tokens([one.tokens] * 3, 2 * every) == [[0, 1], [2]]
    packed = pack_responses([one], torch.device("cpu"))
    assert packed.lengths == [one.tokens - 1 for one in apart(one)]
    starts = [at for at, place in enumerate(packed.position_ids[0].tolist()) if place == 0]
    assert starts == [0, *itertools.accumulate(packed.lengths)][:-1]
