"""``python -m tests.jobs.on_hosts.driven FILE ARGUMENTS``: ``rlinf-async ARGUMENTS``, with records.

FILE gets what the channels of the run carried, once it has ended. The workers, which import this
module as the driver's main one, write each training step with its items to the file that
TRAINING_JOURNAL names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rlinf_async.channels import Channel, Statistics
from rlinf_async.channels.queue import statistics_of
from rlinf_async.cli import main
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.workers.actor.embodied import EmbodiedFSDPActor
from rlinf_async.workers.actor.language import LanguageTrainingWorker

JOURNAL: Final = "TRAINING_JOURNAL"
FAIL_AT: Final = "FAIL_AT_VERSION"
"""variable that says at which version training raises, ``version 6``"""


class Step(msgspec.Struct):
    """One call of a trainer that has returned."""

    rank: int
    version: int
    """before it"""
    items: list[tuple[int, int, int]]
    """iteration, env rank and stage of trajectories; version, group and index of samples"""


def note_clusters(clusters: list[Cluster]) -> None:
    """Append each cluster of a job that is made from now on."""
    make = HostConfig.make_cluster

    def making(host: HostConfig, log: Path | None = None) -> Cluster:
        clusters.append(make(host, log))
        return clusters[-1]

    setattr(HostConfig, "make_cluster", making)  # noqa: B010


def note_training(journal: Path) -> None:
    """Have the trainers of this process write down what they train."""

    def noting(rank: int, trainer: Any, train: Callable[..., Any]) -> Callable[..., Any]:
        def noted(batch: Iterable[Any]) -> Any:
            version, items = trainer.version, list[Any]()
            if f"version {version}" == os.environ.get(FAIL_AT):
                raise ArithmeticError(f"version {version} cannot be trained")
            if isinstance(batch, list):
                items, result = batch, train(batch)
            else:  # it may still be arriving
                result = train(_kept(batch, items))
            line = msgspec.json.encode(Step(rank, version, _names(version, items)))
            with journal.open("ab") as file:  # one write: lines of other processes stay whole
                file.write(line + b"\n")
            return result

        return noted

    def wrap(cls: Any, method: str) -> None:
        make = cls.make_trainer

        def making(worker: Any) -> Any:
            trainer = make(worker)
            setattr(trainer, method, noting(worker.rank, trainer, getattr(trainer, method)))
            return trainer

        cls.make_trainer = making

    wrap(EmbodiedFSDPActor, "train")
    wrap(LanguageTrainingWorker, "training_step")


def _kept(items: Iterable[Any], kept: list[Any]) -> Iterator[Any]:
    for item in items:
        kept.append(item)
        yield item


def _names(version: int, items: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Names of trajectories, or of the samples of micro-batches."""
    if items and hasattr(items[0], "env_rank"):
        return [(one.iteration, one.env_rank, one.stage) for one in items]
    samples = (sample for one in items for sample in one.samples)
    return [(version, sample.group, sample.index) for sample in samples]


def drive(record: Path, arguments: Sequence[str]) -> int:
    """Run the command; its exit code."""
    clusters: list[Cluster] = []
    note_clusters(clusters)
    sys.argv = ["rlinf-async", *arguments]
    try:
        return main()
    finally:
        channels = [one for cluster in clusters for one in cluster.channels.values()]
        carried: dict[str, Statistics] = {
            one.name: statistics_of(one.queue) for one in channels if isinstance(one, Channel)
        }
        record.write_bytes(msgspec.json.encode(carried))


if JOURNAL in os.environ:
    note_training(Path(os.environ[JOURNAL]))

if __name__ == "__main__":
    sys.exit(drive(Path(sys.argv[1]), sys.argv[2:]))
