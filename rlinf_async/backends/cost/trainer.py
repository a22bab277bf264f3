"""`CostTrainer`: a `LanguageTrainer` that takes the time that training would take.

On a virtual loop the seconds pass by its clock: see `let_pass`. Each data rank trains its own share
of a mini-batch; whoever drives several has them wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from rlinf_async.backends.cost.config import CostTrainerConfig
from rlinf_async.backends.language import MicroBatch, VersionTrainer
from rlinf_async.deadlines import let_pass
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate

ADVANTAGE = np.ones(1, np.float32)


def _nobody() -> bool:
    """Return False: nobody generates."""
    return False


class CostTrainer(VersionTrainer):
    """Counts versions and takes time.

    Args:
        config: configuration of the cost model.
        world_size: copies of the model that were launched: data ranks.
        rank: number of this rank.
        tp: tensor-parallel ranks of a copy, for all of which it stands.
        beside: whether somebody generates at this moment.
    """

    file = "cost.json"

    def __init__(
        self,
        config: CostTrainerConfig,
        world_size: int,
        rank: int,
        *,
        tp: int = 1,
        beside: Callable[[], bool] = _nobody,
    ) -> None:
        super().__init__(world_size, rank, tp=tp)
        self.config = config
        self._beside = beside
        self._spent: dict[str, float] = {}

    def _take(self, cause: str, seconds: float) -> None:
        self._spent[cause] = self._spent.get(cause, 0.0) + seconds
        let_pass(seconds)

    def take_spent(self) -> dict[str, float]:
        """Return the seconds since the last call by cause: ``training``, ``resharding``,
        ``publishing``."""
        spent, self._spent = self._spent, {}
        return spent

    def take_rescale(self) -> float:
        """Take the time of it, on the ranks that train afterwards."""
        if self.trains:
            self._take("resharding", self.config.rescale_seconds)
        return self.config.rescale_seconds

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with constant advantages."""
        return [
            msgspec.structs.replace(
                one, advantage=np.broadcast_to(ADVANTAGE, len(one.response_ids))
            )
            for one in samples
        ]

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Take the time of one optimizer step."""
        count = 0
        for one in micro_batches:
            self.micro_batch(one.samples)
            count += len(one.samples)
        self.optimizer_step()
        return {"samples_trained": float(count)}

    def micro_batch(self, samples: Sequence[TrainingSample]) -> None:
        """Take the time of a forward and backward pass."""
        config, tokens = self.config, sum(one.tokens for one in samples)
        seconds = tokens * config.token_seconds / self.strategy.tp
        seconds += len(samples) * config.sample_seconds
        if config.beside_generation > 1.0 and self._beside():
            seconds *= config.beside_generation
        self._take("training", seconds)

    def optimizer_step(self) -> None:
        """Take the time of an optimizer step."""
        self._take("training", self.config.step_seconds)

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return constants."""
        return [np.broadcast_to(np.float32(-1.0), len(one.response_ids)) for one in samples]

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the version without any weights."""
        if self.trains:
            self._take("publishing", self.config.publish_seconds)
        return WeightUpdate(self.version, (), self.version)

    def offload(self, *, keep_weights: bool = False) -> None:
        """Take the time of it."""
        self._take("resharding", self.config.move_seconds)

    def onload(self) -> None:
        """Take the time of it."""
        self._take("resharding", self.config.move_seconds)
