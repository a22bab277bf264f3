"""Soft actor-critic on two ranks takes the steps that one takes, over gloo, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.sac import SacTrainer
from rlinf_async.backends.sac_config import (
    SacLossConfig,
    SacOptimizerConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.embodied import ReplayBatch
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.test_residual_update import POLICY as CORRECTING
from tests.backends.test_sac_choices import POLICY as CHOOSING
from tests.backends.test_sac_choices import chosen
from tests.backends.test_sac_images import IMAGES, image_batch
from tests.backends.test_sac_trainer import POLICY, batch

UPDATES = 10
POLICIES = {
    "vector": POLICY,
    "images": IMAGES,
    "rlpd": POLICY,
    "cloning": POLICY,
    "choices": CHOOSING,
    "residual": CORRECTING,
}
COLUMNS = ("weight", "observation", "action", "reward", "next_observation", "discount", "version")
CONFIG = SacTrainerConfig(
    fsdp=SacShardingConfig(optimizer=SacOptimizerConfig(lr=3e-3, value_lr=1e-2, max_grad_norm=5.0))
)
LOSSES = {
    "rlpd": SacLossConfig(critics=5, target_critics=2, critic_layer_norm=True, policy_every=2),
    "cloning": SacLossConfig(cloning=1.0, critics=0),
}
"""of kinds with demonstrations"""


def config(kind: str) -> SacTrainerConfig:
    return msgspec.structs.replace(CONFIG, sac=LOSSES.get(kind, SacLossConfig()))


def share(whole: ReplayBatch, world_size: int, rank: int) -> ReplayBatch:
    """What the replay worker gives to a rank."""
    columns = (*COLUMNS, *(() if whole.demonstrated is None else ("demonstrated",)))
    parts = {name: np.split(getattr(whole, name), world_size)[rank] for name in columns}
    return msgspec.structs.replace(whole, **parts)


def weighted(kind: str, number: int) -> ReplayBatch:
    drawn = {"images": image_batch, "choices": chosen}
    one = drawn.get(kind, batch)(number)
    one.weight = np.random.default_rng(number).uniform(0.2, 1.0, len(one.weight)).astype("f4")
    if kind in LOSSES:
        one.demonstrated = np.arange(len(one.weight)) < 4  # all on the first rank
        one.index = np.where(one.demonstrated, -1, one.index)
    return one


def learn(rank: int, world_size: int, folder: Path, kind: str) -> None:
    trainer = SacTrainer(config(kind), POLICIES[kind], world_size, rank)
    steps = [
        trainer.step(share(weighted(kind, number), world_size, rank)) for number in range(UPDATES)
    ]
    trainer.end_iteration()
    trainer.save_checkpoint(folder / "checkpoint")
    update = trainer.publish()
    result = {
        "metrics": [dict(one.metrics) for one in steps],
        "error": torch.tensor(np.stack([one.error for one in steps])),
        "state": trainer.manager.get_model_state_dict(everywhere=True),
        "published": sum(bucket.data.nbytes for bucket in update.buckets),
    }
    save_result(folder, rank, result)


class Runs(NamedTuple):
    """The same updates on one rank and on two."""

    kind: str
    checkpoint: Path
    """of two"""
    alone: Any
    together: list[Any]


@pytest.fixture(scope="module", params=POLICIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    learn(0, 1, one, request.param)
    together = in_processes(learn, 2, two, request.param)
    return Runs(request.param, two / "checkpoint", load_result(one, 0), together)


def test_losses_errors_and_weights_of_two_ranks_are_those_of_one(runs: Runs) -> None:
    alone, together = runs.alone, runs.together
    for rank in together:
        torch.testing.assert_close(rank["error"], alone["error"], atol=1e-5, rtol=1e-5)
        for step, expected in zip(rank["metrics"], alone["metrics"], strict=True):
            assert step == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert rank["state"].keys() == alone["state"].keys()
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, alone["state"][name], atol=1e-5, rtol=1e-5)
    assert together[0]["published"] == alone["published"] > 0
    assert together[1]["published"] == 0


def test_a_checkpoint_of_two_ranks_goes_on_with_one(runs: Runs) -> None:
    trainer = SacTrainer(config(runs.kind), POLICIES[runs.kind])
    trainer.load_checkpoint(runs.checkpoint)
    assert trainer.version == 1
    for name, value in trainer.manager.get_model_state_dict().items():
        torch.testing.assert_close(value, runs.alone["state"][name], atol=1e-5, rtol=1e-5)
    numbers = trainer.step(weighted(runs.kind, UPDATES)).metrics
    assert numbers["grad_norm"] > 0.0
    assert ("critic_loss" in numbers) == (runs.kind != "cloning")


def test_fsdp1_over_several_ranks_is_refused() -> None:
    config = SacTrainerConfig(fsdp=SacShardingConfig(strategy="fsdp1"))
    with pytest.raises(ValueError, match="over several ranks take 'fsdp2'"):
        SacTrainer(config, POLICY, 2, 0)
