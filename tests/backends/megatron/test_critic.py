"""`MegatronCriticTrainer` learns what FSDP's critic does, and either goes on from the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language import kit as language
from tests.backends.language.kit import episodes, micro_batches, samples, trainer_config
from tests.backends.megatron.test_trainer import assert_same

pytest.importorskip("megatron.core")

MODEL = language.QWEN3 | {"num_hidden_layers": 4}
GAE = LanguageAdvantageConfig(name="gae", gae_lambda=0.9)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=0.5)
STRATEGIES: dict[str, dict[str, Any]] = {
    "tp2dp2": {"tp": 2, "sequence_parallel": True},
    "tp2pp2": {"tp": 2, "pp": 2},
    "interleaved": {"pp": 2, "virtual_stages": 2},
}


def fsdp(model: dict[str, Any]) -> CriticTrainer:
    config: LanguageTrainerConfig = trainer_config(
        model, advantage=GAE, value_clip=0.5, fsdp={"optimizer": OPTIMIZER}
    )
    return CriticTrainer(config, 1, 0)


def megatron(model: dict[str, Any], fields: dict[str, Any], world_size: int, rank: int) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronCriticTrainer

    described = LanguageModelConfig(config=model)
    config = MegatronTrainerConfig(
        megatron=MegatronConfig(model=described, optimizer=OPTIMIZER, **fields),
        advantage=GAE,
        value_clip=0.5,
        max_tokens_per_forward=40,
    )
    return MegatronCriticTrainer(config, world_size, rank)


def learn(trainer: Any) -> dict[str, Any]:
    """One step on this data rank's groups; values of all samples after it."""
    at = trainer.data_rank
    every = [*samples(4)[:8], *episodes(4)[8:]]
    batch = [one for one in every if one.group % at.size == at.rank] if at.is_io else []
    for one, value in zip(batch, trainer.values(batch), strict=False):
        one.value, one.returns, one.advantage = value, None, None
    arriving: Any = micro_batches(trainer.compute_advantages(batch), 2) if at.is_io else ()
    metrics = dict(trainer.training_step(iter(arriving)))
    trainer.end_iteration()
    values = trainer.values(samples(4) if at.is_io else [])
    return {"metrics": metrics, "values": [torch.from_numpy(one) for one in values]}


def go_on_from_each_other(rank: int, world_size: int, folder: Path, model: dict[str, Any]) -> None:
    found, before = [], "fsdp"
    for name, fields in STRATEGIES.items():
        trainer = megatron(model, fields, world_size, rank)
        trainer.load_checkpoint(folder / before)
        found.append(learn(trainer))
        trainer.save_checkpoint(folder / name)
        before = name
    save_result(folder, rank, found)


def test_a_critic_under_any_strategy_goes_on_where_fsdp_stopped(tmp_path: Path) -> None:
    critic = fsdp(MODEL)
    learn(critic)
    critic.save_checkpoint(tmp_path / "fsdp")
    expected = [learn(critic) for _ in STRATEGIES]
    for results in in_processes(go_on_from_each_other, 4, tmp_path, MODEL):
        assert_same([one["metrics"] for one in results], [one["metrics"] for one in expected])
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one["values"], other["values"], atol=1e-4, rtol=0)
    last = fsdp(MODEL)
    last.load_checkpoint(tmp_path / "interleaved")
    assert_same([learn(last)["metrics"]], [learn(critic)["metrics"]])


def refusals(rank: int, world_size: int, folder: Path) -> None:
    critic = megatron(MODEL, {}, world_size, rank)
    assert not any(np.any(one) for one in critic.values(samples(1)))
    assert not critic.normalizes
    for work in (
        lambda: critic.log_probs(samples(1)),
        critic.publish,
        lambda: critic.save_pretrained(folder),
    ):
        with pytest.raises(ValueError, match=r"a critic has no .*: ask the actor"):
            work()
    save_result(folder, rank, None)


def test_a_critic_begins_at_0_and_says_what_it_is_not(tmp_path: Path) -> None:
    in_processes(refusals, 1, tmp_path)
