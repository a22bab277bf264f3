"""What trainers of language models share: a version; of those without a model, its checkpoints."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import msgspec

from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy


class VersionCounter(ABC):
    """Counts versions."""

    def __init__(self) -> None:
        self._version = 0

    @property
    def version(self) -> int:
        """Number of iterations that were trained, or the version that `load` took."""
        return self._version

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def skip_iteration(self) -> None:
        """Count an iteration that other ranks train."""
        self.end_iteration()

    @abstractmethod
    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response. Collective."""


class VersionTrainer(VersionCounter):
    """A version without a model; a checkpoint is the version.

    Args:
        world_size: data ranks that were launched.
        rank: of this one.
        tp: tensor-parallel ranks of a copy of the model.
    """

    normalizes = False
    recomputes = False
    file: ClassVar[str]
    """of a checkpoint"""

    def __init__(self, world_size: int, rank: int, *, tp: int = 1) -> None:
        super().__init__()
        self._launched, self._rank = world_size, rank
        self._strategy = Strategy(dp=world_size, tp=tp)

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return self._strategy

    def agree(self, count: int, /) -> int:
        """Return the count: ranks do not wait for one another."""
        return count

    def first_log_probs(
        self, samples: Sequence[TrainingSample], *, batch: int, batches: int
    ) -> list[Floats]:
        """Return the log-probs: within an iteration the version is the same."""
        return self.log_probs(samples)

    def load(self, update: WeightUpdate) -> None:
        """Take the version of these weights."""
        self._version = update.version

    def save_pretrained(self, folder: Path) -> None:
        """Write the version."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file).write_bytes(msgspec.json.encode({"version": self._version}))

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write the version, from rank 0; it replaces a checkpoint that was there."""
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            self.save_pretrained(path)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Write the version, at once."""
        self.save_checkpoint(path, extra)
        done: Future[Path] = Future()
        done.set_result(path)
        return done

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Take the version that was written."""
        self._version = msgspec.json.decode((path / self.file).read_bytes())["version"]
        return [{}]
