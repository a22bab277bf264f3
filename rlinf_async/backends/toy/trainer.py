"""A trainer that only takes time, by a cost model: seconds by tokens, while the CPU is free.

It has no model. Its weights are bytes that depend on their version, with valid checksums.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.toy.config import ToyTrainerConfig
from rlinf_async.backends.toy.responses import token_log_probs
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, TensorSlot, WeightBucket, WeightUpdate
from rlinf_async.parallel import DataRank


class ToyTrainer:
    """A `LanguageTrainer` that waits as long as training would take."""

    normalizes = False

    def __init__(self, config: ToyTrainerConfig, world_size: int, rank: int) -> None:
        if world_size > 1:
            raise ValueError(f"world_size is {world_size}; the toy trainer has one rank: use 1")
        self.config = config
        self._version = 0

    @property
    def version(self) -> int:
        """Number of iterations that were trained."""
        return self._version

    @property
    def data_rank(self) -> DataRank:
        """There is one rank."""
        return DataRank(0, 1)

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with their reward as the advantage of every token."""
        return [
            msgspec.structs.replace(
                one,
                advantage=np.full(
                    len(one.response_ids), one.reward if one.scored else 0.0, np.float32
                ),
            )
            for one in samples
        ]

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples as they are."""
        return list(samples)

    def agree(self, count: int, /) -> int:
        """Return the count: there is one rank."""
        return count

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Take the time of one optimizer step."""
        samples = tokens = 0
        for batch in micro_batches:
            here = sum(one.tokens for one in batch.samples)
            _pass(here * self.config.seconds_per_token)
            samples += len(batch.samples)
            tokens += here
        _pass(self.config.seconds_per_step)
        return {"samples_trained": float(samples), "tokens_trained": float(tokens)}

    def end_iteration(self) -> None:
        """Count the version up."""
        self._version += 1

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Log-probs as the toy engine gives them, of this version; of version 0 as reference."""
        _pass(sum(one.tokens for one in samples) * self.config.seconds_per_token / 3)
        version = 0 if reference else self._version
        return [
            token_log_probs(one.response_ids, np.full(len(one.response_ids), version, np.int32))
            for one in samples
        ]

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Zeros."""
        return [np.zeros(len(one.response_ids), np.float32) for one in samples]

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return one bucket of ``weight_bytes`` bytes."""
        data = np.full(self.config.weight_bytes, self._version % 256, np.uint8)
        slot = TensorSlot("weights", "uint8", (len(data),), 0)
        bucket = WeightBucket((slot,), data, xxhash.xxh3_64_intdigest(data.data))
        headers = msgspec.msgpack.encode((self._version, [(bucket.slots, bucket.checksum)]))
        return WeightUpdate(self._version, (bucket,), xxhash.xxh3_64_intdigest(headers))

    def load(self, update: WeightUpdate) -> None:
        """Take the version of these weights."""
        self._version = update.version

    def offload(self, *, keep_weights: bool = False) -> None:
        """Take the time of it."""
        _pass(self.config.seconds_to_move)

    def onload(self) -> None:
        """Take the time of it."""
        _pass(self.config.seconds_to_move)

    def save_pretrained(self, folder: Path) -> None:
        """Write the version."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "toy.json").write_bytes(msgspec.json.encode({"version": self._version}))

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
        self._version = msgspec.json.decode((path / "toy.json").read_bytes())["version"]
        return [{}]


def _pass(seconds: float) -> None:
    """Wait as long as a device would compute."""
    if seconds > 0.0:
        time.sleep(seconds)
