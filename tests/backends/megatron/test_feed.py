"""What a rank that reads samples cannot give is an error on every rank, not a wait."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlinf_async.backends.language import MicroBatch, RankFailed
from rlinf_async.backends.megatron.config import NoSamples
from rlinf_async.backends.megatron.feed import GroupMessages
from tests.backends.fsdp_helpers import exit_codes, in_processes, save_result
from tests.backends.language.kit import micro_batches, samples
from tests.backends.megatron.test_manager import learn, made

pytest.importorskip("megatron.core")

STRATEGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 interleaved": {"pp": 2, "virtual_stages": 2},
    "dp2": {},
    "dp2 overlapped": {"overlap": True},
}
COUNT = 4
"""micro-batches of a global batch"""


class Broken(Exception):
    """What a channel raises."""


def train_on_nothing(rank: int, world_size: int, folder: Path) -> None:
    found = {}
    for name, fields in STRATEGIES.items():
        trainer = made(world_size, rank, layers=4, **fields)
        for step in (trainer.training_step, trainer.forward_backward):
            with pytest.raises(NoSamples):
                step(iter(()))
        found[name] = {
            "pending": trainer.manager.pending,
            "norms": learn(trainer, 2),
            "expected": learn(made(world_size, rank, layers=4, **fields), 2),
        }
    save_result(folder, rank, found)


def test_without_samples_every_rank_raises_and_training_goes_on(tmp_path: Path) -> None:
    for result in in_processes(train_on_nothing, 2, tmp_path):
        assert result.keys() == STRATEGIES.keys()
        for found in result.values():
            assert not found["pending"]
            assert found["norms"] == found["expected"]


def arriving(trainer: Any, seed: int = 0) -> Iterator[MicroBatch]:
    """This data rank's micro-batches of a global batch, whose number is known."""
    at = trainer.data_rank
    batch = [one for one in samples(4, seed=seed) if one.group % at.size == at.rank]
    ready = trainer.compute_advantages(batch)
    for one in micro_batches(ready, len(ready) // COUNT):
        trainer.agree(1)  # as ranks do whose micro-batches have a limit of tokens
        yield one._replace(of=COUNT)


def broken(trainer: Any, at: int) -> Iterator[MicroBatch]:
    """The same, of which one reading rank has only the first ``at``."""
    reads_last = trainer.data_rank.rank == trainer.data_rank.size - 1
    for number, one in enumerate(arriving(trainer)):
        if reads_last and number == at:
            raise Broken(f"after {number}")
        yield one


def fail_and_go_on(rank: int, world_size: int, folder: Path) -> None:
    found = {}
    for name, fields in STRATEGIES.items():
        trainer = made(world_size, rank, layers=4, **fields)
        manager = trainer.manager
        errors, causes, gradients = [], [], []
        first = [trainer.training_step(arriving(trainer))["grad_norm"]]
        for at in range(COUNT):
            for step in (trainer.training_step, trainer.forward_backward):
                with pytest.raises(RankFailed) as caught:
                    step(broken(trainer, at))
                errors.append(str(caught.value))
                causes.append(type(caught.value.__cause__).__name__)
                buffers = [buffer.grad_data for model in manager.models for buffer in model.buffers]
                gradients.append(manager.pending or any(bool(one.any()) for one in buffers))
        expected = made(world_size, rank, layers=4, **fields)
        found[name] = {
            "errors": errors,
            "causes": causes,
            "gradients": gradients,
            "steps": manager.steps,
            "norms": [*first, trainer.training_step(arriving(trainer, 1))["grad_norm"]],
            "expected": [
                expected.training_step(arriving(expected, seed))["grad_norm"] for seed in range(2)
            ],
        }
    save_result(folder, rank, found)


def test_an_error_of_the_rank_that_reads_is_raised_on_all_and_trains_nothing(
    tmp_path: Path,
) -> None:
    for rank, result in enumerate(in_processes(fail_and_go_on, 2, tmp_path)):
        assert result.keys() == STRATEGIES.keys()
        for name, found in result.items():
            reader = 1 if name.startswith("dp2") else 0
            assert found["errors"] == [
                f"rank {reader}, which others wait for, failed: Broken: after {at}"
                for at in range(COUNT)
                for _ in range(2)
            ]
            if rank == reader:
                assert set(found["causes"]) == {"Broken"}
            assert not any(found["gradients"])
            assert found["steps"] == 1
            assert found["norms"] == found["expected"]


def order_of_stage(rank: int, world_size: int, folder: Path) -> None:
    """What the second stage does, in order: takes a micro-batch, or waits for activations."""
    from rlinf_async.backends.megatron.cpu import of_megatron

    p2p = of_megatron("pipeline_parallel.p2p_communication").P2PCommunicator
    receive, communicate = GroupMessages.receive, p2p._communicate
    events: list[str] = []

    def received(peers: GroupMessages, *arguments: Any) -> Any:
        found = receive(peers, *arguments)
        events.append("micro-batch")
        return found

    def communicated(self: Any, *, recv_prev: bool, **options: Any) -> Any:
        events.extend(["activations"] * recv_prev)
        return communicate(self, recv_prev=recv_prev, **options)

    found = {}
    for name in ("pp2", "pp2 interleaved"):
        trainer = made(world_size, rank, layers=4, **STRATEGIES[name])
        events.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupMessages, "receive", received)
            patch.setattr(p2p, "_communicate", communicated)
            trainer.training_step(arriving(trainer))
        found[name] = list(events)
    save_result(folder, rank, found)


def test_a_stage_waits_for_activations_only_once_it_has_their_micro_batch(tmp_path: Path) -> None:
    _, found = in_processes(order_of_stage, 2, tmp_path)
    for name, events in found.items():
        chunks = 2 if "interleaved" in name else 1
        assert events.count("activations") == COUNT * chunks
        taken = received = 0
        for event in events:
            if event == "micro-batch":
                taken += 1
                continue
            group, number = divmod(received, 2 * chunks)
            assert taken > group * 2 + number % 2
            received += 1


def wait_longer_than_the_limit(rank: int, world_size: int, folder: Path) -> None:
    limit = timedelta(seconds=0.2)
    group: Any = dist.new_group([0, 1], timeout=limit)
    other: Any = dist.new_group([0, 1], timeout=limit)
    peers = GroupMessages(group)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.recv(torch.zeros(1), 1, group=other)  # what is shorter than the other rank's wait
        peers.send([1.0])
        peers.finish()
        save_result(folder, rank, [])
    else:
        save_result(folder, rank, peers.receive(list[float], 0))


def test_samples_may_take_longer_than_the_limit_of_a_group(tmp_path: Path) -> None:
    assert in_processes(wait_longer_than_the_limit, 2, tmp_path) == [[], [1.0]]


def lose_the_reader(rank: int, folder: Path) -> None:
    import os

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'lost'}", rank=rank, world_size=2)
    trainer = made(2, rank, tp=2)

    def dying() -> Iterator[MicroBatch]:
        yield next(arriving(trainer))
        os._exit(3)

    try:
        trainer.training_step(dying())
    except RuntimeError:
        os._exit(4)
    os._exit(5)


def test_a_rank_whose_reader_is_lost_does_not_wait_for_its_samples(tmp_path: Path) -> None:
    assert exit_codes(lose_the_reader, 2, tmp_path) == [3, 4]
