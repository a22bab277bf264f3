"""World size 2 against world size 1, over gloo, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.language.kit import QWEN3, UNTIED, micro_batches, samples, trainer_config

VARIANTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, untied, activation checkpointing": {"model": UNTIED, "checkpointing": True},
    "fsdp1": {"fsdp": {"strategy": "fsdp1"}},
}
LOSS = LanguageLossConfig(kl_coefficient=0.05, entropy_coefficient=0.01)
WHITENED = LanguageAdvantageConfig(name="reinforce++")


def train(rank: int, world_size: int, folder: Path, variant: str, resume: bool = False) -> None:
    """Two steps, a checkpoint, one more step; every other group is this rank's."""
    fields: dict[str, Any] = {"loss": LOSS, "advantage": WHITENED, "reference": True} | VARIANTS[
        variant
    ]
    trainer = PolicyTrainer(trainer_config(**fields), world_size, rank)
    batch = [one for one in samples(4) if one.group % world_size == rank]
    metrics: list[dict[str, float]] = []
    if resume:
        assert trainer.load_checkpoint(folder / "checkpoint") == [{"rank": at} for at in (0, 1)]
    for step in range(2 if resume else 0, 3):
        reference = trainer.log_probs(batch, reference=True)
        for one, previous, first in zip(batch, trainer.log_probs(batch), reference, strict=True):
            one.prev_log_prob, one.ref_log_prob, one.advantage = previous, first, None
        ready = trainer.normalize_advantages(trainer.compute_advantages(batch))
        metrics.append(dict(trainer.training_step(micro_batches(ready, len(batch) // 2))))
        if step == 1:
            trainer.end_iteration()
            trainer.save_checkpoint(folder / "checkpoint", {"rank": rank})
    update = trainer.publish()
    trainer.save_pretrained(folder / f"hugging_face_{world_size}")
    log_probs = [torch.from_numpy(one) for one in trainer.log_probs(batch)]
    kept = [torch.from_numpy(one) for one in trainer.log_probs(batch, reference=True)]
    result = {"metrics": metrics, "state": unpack(update), "log_probs": log_probs}
    save_result(folder, rank, {**result, "reference": kept, "version": trainer.version})


def assert_same(metrics: dict[str, float], expected: dict[str, float]) -> None:
    for name, number in expected.items():
        if name != "micro_batches":
            assert metrics[name] == pytest.approx(number, rel=1e-4, abs=1e-5), name


def everything(rank: int, world_size: int, folder: Path) -> None:
    """All that two ranks do here: starting them takes longer than the work."""
    for variant in VARIANTS:
        train(rank, world_size, folder / variant, variant)
    uneven(rank, world_size, folder / "uneven")
    train_critic(rank, world_size, folder / "critic")
    save_result(folder, rank, "done")


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("double")
    for name in (*VARIANTS, "uneven", "critic"):
        (folder / name).mkdir()
    assert in_processes(everything, 2, folder) == ["done", "done"]
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_like_one(variant: str, double: Path, tmp_path: Path) -> None:
    train(0, 1, tmp_path, variant)
    alone = load_result(tmp_path, 0)
    ranks = [load_result(double / variant, rank) for rank in range(2)]
    for rank, result in enumerate(ranks):
        for found, expected in zip(result["metrics"], alone["metrics"], strict=True):
            assert_same(found, expected)
        assert result["version"] == 1
        for name in ("log_probs", "reference"):
            theirs = [alone[name][at] for at, one in enumerate(samples(4)) if one.group % 2 == rank]
            for found, expected in zip(result[name], theirs, strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert ranks[1]["state"] == {}
    assert ranks[0]["state"].keys() == alone["state"].keys()
    for name, tensor in alone["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], tensor, atol=1e-5, rtol=0.0, msg=name)
    assert (double / variant / "hugging_face_2" / "model.safetensors").is_file()


def test_one_rank_goes_on_from_the_checkpoint_of_two(double: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").symlink_to(double / "fsdp2" / "checkpoint")
    train(0, 1, tmp_path, "fsdp2", resume=True)
    [resumed] = load_result(tmp_path, 0)["metrics"]
    assert_same(resumed, load_result(double / "fsdp2", 0)["metrics"][2])


def uneven(rank: int, world_size: int, folder: Path) -> None:
    """Ranks with other numbers of tokens, a rank without scores, a NaN on one rank only."""
    trainer = PolicyTrainer(trainer_config(QWEN3, max_tokens_per_forward=24), world_size, rank)
    many = samples(4) if rank else samples(1)[:1]
    lengths = [len(one) for one in trainer.log_probs(many)]
    unscored = [one for one in samples(8) if one.scored == (rank == 0)][:2]
    metrics = trainer.training_step(micro_batches(trainer.compute_advantages(unscored), 1))
    batch = trainer.compute_advantages(samples(1))
    if rank:
        assert batch[0].advantage is not None
        batch[0].advantage[0] = np.nan
    try:
        trainer.training_step(micro_batches(batch, 2))
        said = "nothing"
    except TrainingDiverged as error:
        said = str(error)
    assert trainer.agree(3 + rank) == 4
    again = trainer.training_step(micro_batches(trainer.compute_advantages(samples(1)), 4))
    save_result(folder, rank, {"lengths": lengths, "units": metrics, "said": said, "again": again})


def test_ranks_that_differ_stay_together(double: Path) -> None:
    first, second = (load_result(double / "uneven", rank) for rank in range(2))
    assert second["lengths"] == [len(one.response_ids) for one in samples(4)]
    assert first["lengths"] == second["lengths"][:1]
    assert first["units"] == second["units"]
    assert first["units"]["tokens"] > 0
    for result in (first, second):
        assert result["said"].startswith("the loss is nan")
        assert result["again"]["skipped"] == 0.0


def train_critic(rank: int, world_size: int, folder: Path) -> None:
    config = trainer_config(advantage=LanguageAdvantageConfig(name="gae"))
    trainer = CriticTrainer(config, world_size, rank)
    batch = trainer.compute_advantages(
        [one for one in samples(4) if one.group % world_size == rank]
    )
    errors = [
        trainer.training_step(micro_batches(batch, len(batch)))["value_error"] for _ in range(5)
    ]
    save_result(folder, rank, {"errors": errors})


def test_two_ranks_of_a_critic_train_like_one(double: Path, tmp_path: Path) -> None:
    train_critic(0, 1, tmp_path)
    alone = load_result(tmp_path, 0)["errors"]
    assert alone[-1] < alone[0]
    for rank in range(2):
        result = load_result(double / "critic", rank)
        assert result["errors"] == pytest.approx(alone, rel=1e-4)
