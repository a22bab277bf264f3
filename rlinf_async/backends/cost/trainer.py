"""`CostTrainer`: a `LanguageTrainer` that says how long training would take, for any ranks.

It never blocks: whoever drives it in virtual time asks `seconds`, and lets them pass on the loop.
One trainer stands for all ranks of an actor. They share a mini-batch by its tokens; it takes as
long as the busiest of them, which has at least the longest sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np

from rlinf_async.backends.cost.config import CostTrainerConfig
from rlinf_async.backends.language import MicroBatch
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import DataRank, Strategy

ADVANTAGE = np.ones(1, np.float32)


class CostTrainer:
    """Counts versions and says how long everything takes."""

    normalizes = False

    def __init__(self, config: CostTrainerConfig, world_size: int, rank: int) -> None:
        self.config = config
        self.strategy = Strategy(dp=world_size)
        self._version = 0

    def seconds(self, tokens: Sequence[int]) -> float:
        """Seconds of a forward and backward pass of samples of so many tokens each.

        Ranks of one data rank share each of its samples.
        """
        strategy = self.strategy
        together = strategy.world_size // strategy.dp
        busiest = max(sum(tokens) / strategy.dp, max(tokens, default=0))
        return busiest * self.config.token_seconds / together

    def rank_seconds(self, tokens: int) -> float:
        """Seconds of a forward and backward pass of so many tokens of one data rank."""
        together = self.strategy.world_size // self.strategy.dp
        return tokens * self.config.token_seconds / together

    @property
    def version(self) -> int:
        """Number of iterations that were trained."""
        return self._version

    @property
    def data_rank(self) -> DataRank:
        """It reads for all ranks."""
        return DataRank(0, 1)

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with constant advantages."""
        return [
            msgspec.structs.replace(
                one, advantage=np.broadcast_to(ADVANTAGE, len(one.response_ids))
            )
            for one in samples
        ]

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples as they are."""
        return list(samples)

    def agree(self, count: int, /) -> int:
        """Return the count: it stands for all ranks."""
        return count

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Count what is trained; takes no time, see `seconds`."""
        counts = [len(one.samples) for one in micro_batches]
        return {"samples_trained": float(sum(counts))}

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return constants."""
        return [np.broadcast_to(np.float32(-1.0), len(one.response_ids)) for one in samples]

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return zeros."""
        return [np.broadcast_to(np.float32(0.0), len(one.response_ids)) for one in samples]

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the version without any weights."""
        return WeightUpdate(self._version, (), self._version)

    def load(self, update: WeightUpdate) -> None:
        """Take the version of these weights."""
        self._version = update.version

    def offload(self, *, keep_weights: bool = False) -> None:
        """Do nothing: see ``move_seconds``."""

    def onload(self) -> None:
        """Do nothing: see ``move_seconds``."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the version."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cost.json").write_bytes(msgspec.json.encode({"version": self._version}))

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write the version."""
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
        self._version = msgspec.json.decode((path / "cost.json").read_bytes())["version"]
        return [{}]
