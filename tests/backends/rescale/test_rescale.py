"""Four real ranks over gloo: the number of those that train changes, the numbers do not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.backends.base import IdleRank
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.backends.rescale.transaction import RescaleError
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import config as policy_config
from tests.backends.fsdp_helpers import in_processes, save_result, set_up
from tests.backends.rescale.kit import (
    BUCKET,
    EACH,
    EPOCHS,
    LIMIT,
    RING,
    Numbers,
    critic_step,
    critic_trainer,
    embodied_step,
    embodied_trainer,
    language_step,
    language_trainer,
    mean_over_ranks,
    small_shards_too,
)

WARMUP = 2 * EACH
"""optimizer steps of the critic alone: the first two sizes of the ring"""


Trainer = PolicyTrainer | CriticTrainer | EmbodiedTrainer


def round_the_ring(trainer: Trainer, rank: int) -> list[dict[str, Any]]:
    """Train on each number of ranks for 4 optimizer steps; one row a size."""
    rows, at = [], 0
    for size in RING:
        with collections() as collected:
            report = trainer.rescale(Strategy(dp=size), timeout=LIMIT, bucket_bytes=BUCKET)
        count = EACH // EPOCHS if isinstance(trainer, EmbodiedTrainer) else EACH
        numbers = [_step(trainer, at + more) for more in range(count)] if report.active else []
        at += count
        rows.append(
            {
                "numbers": numbers,
                "bytes": held_bytes(trainer.manager),
                "version": trainer.version,
                "sent": report.sent_bytes,
                "peak": report.peak_bytes,
                "collections": len(collected),
            }
        )
    return rows


@contextmanager
def collections() -> Iterator[list[int]]:
    """Collect the full garbage collections that are asked for inside; none runs by itself."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def _step(trainer: Trainer, at: int) -> Numbers:
    if isinstance(trainer, PolicyTrainer):
        return language_step(trainer, at)
    if isinstance(trainer, CriticTrainer):
        return critic_step(trainer, at)
    return embodied_step(trainer, at)


def held_bytes(manager: FSDPModelManager) -> int:
    """What parameters, gradients, moments and kept weights of this rank take."""
    held = [*manager.model.parameters(), *manager.model.buffers()]
    held += [one.grad for one in held if one.grad is not None]
    held += [one for state in manager.optimizer.state.values() for one in state.values()]
    held += [one for kept in manager.kept.values() for one in kept.values()]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in held]
    return sum(one.nbytes for one in local if not one.is_meta)


def everything(rank: int, world_size: int, folder: Path) -> None:
    small_shards_too()
    language, embodied = language_trainer(world_size, rank), embodied_trainer(world_size, rank)
    warming = embodied_trainer(world_size, rank, WARMUP)
    result: dict[str, Any] = {
        "language": round_the_ring(language, rank),
        "critic": round_the_ring(critic_trainer(world_size, rank), rank),
        "embodied": round_the_ring(embodied, rank),
        "warming": round_the_ring(warming, rank),
        "weights": unpack(language.publish()) if rank == 0 else {},
        "refused": refused(language, rank),
    }
    save_result(folder, rank, result)


def refused(trainer: PolicyTrainer, rank: int) -> dict[str, str]:
    """What is said to wrong calls, and to calls on idle ranks; one rank trains now."""
    manager = trainer.manager
    said = {
        "too many": _said(lambda: rescale(manager, Strategy(dp=5), timeout=LIMIT)),
        "different": _said(lambda: rescale(manager, Strategy(dp=2 + rank % 2), timeout=LIMIT)),
        "idle": _said(manager.optimizer_step) if rank else "",
        "idle publishes": str(len(trainer.publish().buckets)) if rank else "0",
    }
    rescale(manager, Strategy(dp=2), timeout=LIMIT)
    if rank == 1:
        next(manager.model.parameters()).grad = torch.zeros_like(next(manager.model.parameters()))
    said["gradients"] = _said(lambda: rescale(manager, Strategy(dp=4), timeout=LIMIT))
    manager.zero_grad()
    manager.param_offloaded = rank == 0  # as on an accelerator; on the CPU it makes no difference
    said["offloaded"] = _said(lambda: rescale(manager, Strategy(dp=4), timeout=LIMIT))
    manager.param_offloaded = False
    rescale(manager, Strategy(dp=4), timeout=LIMIT)
    fsdp1 = set_up(policy_config(strategy="fsdp1"), 4, rank)
    said["fsdp1"] = _said(lambda: rescale(fsdp1, Strategy(dp=2), timeout=LIMIT))
    return said


def _said(call: Any) -> str:
    try:
        call()
    except (FSDPError, IdleRank, RescaleError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(everything, 4, tmp_path_factory.mktemp("ranks"))


def test_losses_of_a_language_model_on_1_2_4_3_1_ranks_are_those_of_one(
    ranks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = language_trainer(1, 0)
    expected = torch.tensor([language_step(alone, at) for at in range(len(RING) * EACH)])
    found = torch.tensor([row for one in ranks[0]["language"] for row in one["numbers"]])
    difference = (found - expected).abs()
    with capsys.disabled():
        worst = difference.max(0).values.tolist()
        print(f"\nlanguage: loss, grad norm, lr differ by at most {worst}", end="")
    assert difference[:, 0].max() < 1e-6
    assert difference[:, 1].max() < 1e-5
    assert difference[:, 2].max() == 0.0
    for name, tensor in unpack(alone.publish()).items():
        torch.testing.assert_close(ranks[0]["weights"][name], tensor, atol=2e-5, rtol=0.0)


def test_losses_of_a_critic_on_1_2_4_3_1_ranks_are_those_of_one(
    ranks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = critic_trainer(1, 0)
    expected = torch.tensor([critic_step(alone, at) for at in range(len(RING) * EACH)])
    found = torch.tensor([row for one in ranks[0]["critic"] for row in one["numbers"]])
    difference = (found - expected).abs()
    with capsys.disabled():
        worst = difference.max(0).values.tolist()
        print(f"\ncritic: loss, grad norm, lr differ by at most {worst}", end="")
    assert difference[:, 0].max() < 1e-6
    assert difference[:, 1].max() < 1e-5
    assert difference[:, 2].max() == 0.0


@pytest.mark.parametrize(("kind", "warmup"), [("embodied", 0), ("warming", WARMUP)])
def test_losses_of_an_embodied_policy_on_1_2_4_3_1_ranks_are_those_of_one(
    ranks: list[dict[str, Any]], kind: str, warmup: int, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = embodied_trainer(1, 0, warmup)
    expected = torch.tensor([embodied_step(alone, at) for at in range(len(RING) * EACH // EPOCHS)])
    found = torch.tensor(
        [
            mean_over_ranks([ranks[rank][kind][at]["numbers"][step] for rank in range(size)])
            for at, size in enumerate(RING)
            for step in range(EACH // EPOCHS)
        ]
    )
    difference = (found - expected).abs()
    with capsys.disabled():
        worst = difference.max(0).values.tolist()
        print(f"\n{kind}: policy loss, value loss, grad norm differ by at most {worst}", end="")
    assert difference[:, :2].max() < 1e-6
    assert difference[:, 2].max() < 1e-5


@pytest.mark.parametrize("kind", ["language", "critic", "embodied", "warming"])
def test_memory_of_the_old_model_goes_back_nearly_always_without_a_garbage_collection(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    # Seldom torch itself still holds a gradient's end of the old graph, and one is made.
    collections = [row["collections"] for result in ranks for row in result[kind]]
    assert len(collections) == 20
    assert sum(collections) <= 2


@pytest.mark.parametrize("kind", ["language", "critic", "embodied"])
def test_idle_ranks_hold_no_memory_and_active_ones_their_part(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    for at, size in enumerate(RING):
        held = [ranks[rank][kind][at]["bytes"] for rank in range(4)]
        assert all(one > 0 for one in held[:size])
        assert held[size:] == [0] * (4 - size)
    whole, half = (ranks[0][kind][at]["bytes"] for at in (0, 1))
    assert half < 0.7 * whole


def test_ranks_that_join_know_the_version(ranks: list[dict[str, Any]]) -> None:
    for at in range(1, len(RING)):
        versions = [ranks[rank]["language"][at]["version"] for rank in range(4)]
        assert versions == [(at + 1) * EACH if rank < RING[at] else at * EACH for rank in range(4)]


def test_state_travels_in_bounded_buckets(ranks: list[dict[str, Any]]) -> None:
    steps = [step for result in ranks for step in result["language"]]
    assert max(step["sent"] for step in steps) > 4 * BUCKET
    # Runs here are small, and each is padded to 16 bytes; shared memory comes in pages.
    assert max(step["peak"] for step in steps) <= 1.6 * BUCKET + 2 * 4096


def test_wrong_calls_are_refused_by_all_ranks_and_change_nothing(
    ranks: list[dict[str, Any]],
) -> None:
    said = [result["refused"] for result in ranks]
    for one in said:
        assert one["too many"] == "StrategyError: dp=5: only 4 ranks were launched"
        assert one["different"].startswith("RescaleError: ")
        assert (
            "the ranks were asked for different strategy: dp=2, dp=3, dp=2, dp=3"
            in one["different"]
        )
        assert one["idle publishes"] == "0"
    idle = "IdleRank: optimizer_step() on rank {rank}, which is idle: 1 of 4 ranks are active"
    assert [one["idle"] for one in said[1:]] == [idle.format(rank=rank) for rank in (1, 2, 3)]
    for name, culprit, text in (
        ("gradients", 1, "FSDPError: rescale() between a backward pass and its optimizer step"),
        ("offloaded", 0, "OffloadedError: rescale() while model or optimizer is offloaded"),
    ):
        for rank, one in enumerate(said):
            assert ("on this rank" if rank == culprit else f"rank {culprit}") in one[name]
            assert text in one[name]
    assert all("strategy 'fsdp1' cannot change its number of ranks" in one["fsdp1"] for one in said)
