"""One rank of four breaks, is late or dies at each stage of a rescale; nobody is fooled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.rescale import transaction
from rlinf_async.backends.rescale.rescale import Rescale
from rlinf_async.backends.rescale.transaction import (
    RescaleError,
    RescaleUndecided,
    StageResult,
    Transaction,
)
from rlinf_async.backends.reshard import PeerLost, buckets
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import exit_codes, in_processes, save_result
from tests.backends.rescale.breaking import Injected, break_it, nothing_to_mend
from tests.backends.rescale.kit import (
    BUCKET,
    LIMIT,
    Numbers,
    language_step,
    language_trainer,
    small_shards_too,
)

STAGES = ("propose", "connect", "drain", "build", "move", "verify", "decide")
FAULTS = [
    # (how, stage, rank, from so many ranks, to so many)
    *(("raises", stage, at % 4, 2, 4) for at, stage in enumerate(STAGES)),
    ("raises", "move", 3, 4, 1),
    ("raises", "decide", 0, 4, 3),
    ("damages", "move", 0, 2, 4),
    ("late", "propose", 2, 2, 4),
    ("late", "connect", 0, 2, 4),
    ("late", "drain", 3, 2, 4),
    ("late", "build", 2, 2, 3),
    ("late", "move", 1, 2, 4),
    ("late", "verify", 1, 3, 4),
]


def faults(rank: int, world_size: int, folder: Path) -> None:
    """A fault, an optimizer step, the next fault, ...; then a rescale that goes well."""
    small_shards_too()
    trainer = language_trainer(world_size, rank)
    outcomes: list[tuple[str, str, int]] = []
    numbers: list[Numbers] = []
    for how, stage, culprit, old, new in FAULTS:
        if trainer.manager.world_size != old:
            trainer.rescale(Strategy(dp=old), timeout=LIMIT, bucket_bytes=BUCKET)
        mend = nothing_to_mend
        if rank == culprit:
            mend = break_it(how, stage)
        elif stage == "decide":
            # Who decides first decides for all: let it be the one that fails.
            mend = break_it("late", stage)
        elif how == "late":
            mend = break_it("waits for it", stage)
        outcomes.append(attempt(trainer, new))
        mend()
        numbers.append(step(trainer, len(numbers)))
    trainer.rescale(Strategy(dp=3), timeout=LIMIT, bucket_bytes=BUCKET)
    numbers.append(step(trainer, len(numbers)))
    save_result(folder, rank, {"outcomes": outcomes, "numbers": numbers})


def attempt(trainer: PolicyTrainer, size: int) -> tuple[str, str, int]:
    """What a rescale raises, and how many ranks train after it."""
    try:
        trainer.rescale(Strategy(dp=size), timeout=LIMIT, bucket_bytes=BUCKET)
    except (RescaleError, PeerLost) as error:
        return type(error).__name__, str(error), trainer.manager.world_size
    return "", "", trainer.manager.world_size


def step(trainer: PolicyTrainer, at: int) -> Numbers:
    return language_step(trainer, at) if trainer.manager.active else []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(faults, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("at", range(len(FAULTS)), ids=lambda at: "-".join(map(str, FAULTS[at])))
def test_a_fault_on_one_rank_leaves_all_ranks_on_the_old_strategy(
    ranks: list[dict[str, Any]], at: int
) -> None:
    how, stage, culprit, old, _ = FAULTS[at]
    outcomes = [result["outcomes"][at] for result in ranks]
    assert [size for _, _, size in outcomes] == [old] * 4
    assert all(kind for kind, _, _ in outcomes)
    for rank, (kind, text, _) in enumerate(outcomes):
        if how == "late" and stage == "connect":
            # Who waits does so in torch, which may give up before the ranks' own deadline.
            assert f"stage {stage!r}" in text
        elif how == "late":
            # The one that is late may find the others gone in its own way.
            assert kind == "PeerLost" or rank == culprit
            assert "did not finish stage" in text or "lost" in text or rank == culprit
        elif how == "damages":
            assert kind == "RescaleError"
            assert "BucketDamaged: the bucket of round" in text
        elif stage == "decide":
            assert "as the test wants it" in text
        else:
            assert kind == "RescaleError"
            who = f"this rank ({rank})" if rank == culprit else f"rank {culprit}"
            assert who in text
            assert f"stage {stage!r}" in text
            assert "Injected: as the test wants it" in text


def test_losses_after_all_faults_are_those_of_a_run_without(
    ranks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = language_trainer(1, 0)
    expected = torch.tensor([language_step(alone, at) for at in range(len(FAULTS) + 1)])
    difference = (torch.tensor(ranks[0]["numbers"]) - expected).abs()
    with capsys.disabled():
        print(f"\nloss after faults differs by at most {difference[:, 0].max().item()}", end="")
    assert difference[:, 0].max() < 1e-6


def committed(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 fails after the others have committed: it is too late to go back."""
    trainer = language_trainer(world_size, rank)
    mend = nothing_to_mend
    if rank == 1:
        whole = Rescale.decide

        def fails(one: Rescale) -> None:
            one._transaction._store.wait(["decision/1"], timedelta(seconds=LIMIT))
            raise Injected("too late")

        setattr(Rescale, "decide", fails)  # noqa: B010
        mend = partial(setattr, Rescale, "decide", whole)
    outcome = attempt(trainer, 2)
    mend()
    save_result(folder, rank, {"outcome": outcome, "numbers": step(trainer, 0)})


class StoreGone:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")


def without_store(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 loses the store at a stage: with its word on `verify` said, or not yet."""
    said: dict[str, list[str]] = {}
    for stage in ("move", "decide"):
        trainer = language_trainer(world_size, rank)
        whole = getattr(Rescale, stage)

        def loses(one: Rescale, whole: Callable[[Rescale], None] = whole) -> None:
            one._transaction._store = cast(Any, StoreGone())
            whole(one)

        def waits_in_vain(one: Rescale, whole: Callable[[Rescale], None] = whole) -> None:
            whole(one)
            one._transaction._deadline = time.monotonic() + 0.1

        if rank == 1:
            setattr(Rescale, stage, loses)
        elif stage == "move":
            setattr(Rescale, stage, waits_in_vain)
        try:
            trainer.rescale(Strategy(dp=1), timeout=LIMIT, bucket_bytes=BUCKET)
            said[stage] = ["", "", str(trainer.manager.world_size)]
        except (RescaleError, PeerLost, RescaleUndecided) as error:
            said[stage] = [type(error).__name__, str(error), str(trainer.manager.world_size)]
        setattr(Rescale, stage, whole)
    save_result(folder, rank, said)


def test_a_rank_that_was_ready_and_lost_the_store_does_not_take_the_old_strategy_to_be_in_force(
    tmp_path: Path,
) -> None:
    other, lost = in_processes(without_store, 2, tmp_path)
    assert (other["move"][0], other["move"][2]) == ("PeerLost", "2")
    assert (lost["move"][0], lost["move"][2]) == ("RescaleError", "2")
    assert other["decide"] == ["", "", "1"]
    assert lost["decide"][0] == "RescaleUndecided"
    assert "lost the store of the process group (Connection reset" in lost["decide"][1]


def test_a_rank_that_fails_says_why_before_it_hangs_up() -> None:
    order: list[str] = []
    transfer = SimpleNamespace(forget=lambda: order.append("hung up"))
    attempt = Rescale.__new__(Rescale)
    attempt._rank, attempt.change = 1, cast(Any, SimpleNamespace(transfer=transfer))
    attempt._transaction = cast(
        Any, SimpleNamespace(decisions=1, report=lambda _, result: order.append(result.reason))
    )

    def fails() -> None:
        raise Injected("as the test wants it")

    with pytest.raises(RescaleError, match="stage 'move' failed on this rank"):
        attempt._run_stage("move", fails)
    assert order == ["Injected: as the test wants it", "hung up"]


def give_up_once_all_who_live_have_reported() -> None:
    """Wait for those three however slow they are, and for rank 2 no longer than for them."""
    transaction.GRACE = LIMIT
    check = Transaction._check_done

    def checked(one: Transaction, stage: str, results: dict[int, StageResult]) -> None:
        check(one, stage, results)
        if stage == "move" and len(results) == 3:
            one._deadline = 0.0

    setattr(Transaction, "_check_done", checked)  # noqa: B010


def dying(rank: int, folder: str) -> None:
    """Rank 2 is killed in the middle of the move, with some of its buckets sent."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    give_up_once_all_who_live_have_reported()
    trainer = language_trainer(4, rank)
    step(trainer, 0)
    trainer.save_checkpoint(Path(folder) / "checkpoint")
    seal, sealed = cast(Any, buckets.seal), []

    def die(bucket: torch.Tensor, *checksum_and_round: int) -> None:
        sealed.append(len(bucket))
        if len(sealed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        seal(bucket, *checksum_and_round)

    if rank == 2:
        cast(Any, buckets).seal = die
    save_result(Path(folder), rank, attempt(trainer, 2))
    os._exit(0)  # the group is broken


def test_a_rank_that_is_killed_in_the_move_is_named_and_the_checkpoint_is_intact(
    tmp_path: Path,
) -> None:
    assert exit_codes(dying, 4, str(tmp_path)) == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        kind, text, size = torch.load(tmp_path / f"result_{rank}.pt", weights_only=True)
        assert (kind, size) == ("PeerLost", 4), text
        assert "rank 2 did not finish stage 'move'" in text
    alone = language_trainer(1, 0)
    alone.load_checkpoint(tmp_path / "checkpoint")
    expected = language_trainer(1, 0)
    language_step(expected, 0)
    assert language_step(alone, 1) == pytest.approx(language_step(expected, 1), abs=1e-5)


def test_a_rank_that_fails_after_the_others_have_committed_commits_too(tmp_path: Path) -> None:
    results = in_processes(committed, 3, tmp_path)
    assert [result["outcome"] for result in results] == [("", "", 2)] * 3
    assert [len(result["numbers"]) for result in results] == [3, 3, 0]
