"""What the language trainers of all backends have in common: what needs no model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from rlinf_async.algorithms.language.advantages import compute_group_advantages
from rlinf_async.backends.language import OPTIMIZER, PARTS, VersionCounter
from rlinf_async.backends.language_training.config import LanguageTrainingConfig
from rlinf_async.backends.language_training.objective import Objective
from rlinf_async.backends.language_training.weights import STEP, KeptWeights
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample

C = TypeVar("C", bound=LanguageTrainingConfig)


class IterationTrainer(VersionCounter, Generic[C]):
    """Counts iterations, computes advantages, and is offloaded in parts."""

    critic = False
    objective: Objective
    kept_weights: KeptWeights
    """copies of weights on the CPU, the reference's among them"""

    def __init__(self, config: C) -> None:
        super().__init__()
        self.config = config
        self._stepped = False
        """an optimizer step has changed the weights since they were those of ``version``"""

    def end_iteration(self) -> None:
        """Count the version up."""
        super().end_iteration()
        self._stepped = False

    @property
    def compared_version(self) -> int | None:
        """The version that the weights are of; None between two steps of an iteration. Tokens of
        this version have the same log-probs here as in the engine."""
        return None if self._stepped else self._version

    def _content(self, extra: Mapping[str, object] | None) -> dict[str, object]:
        """Return what a checkpoint holds beside weights and optimizer, for `_take_content`."""
        return {"version": self._version, "stepped": self._stepped, "extra": dict(extra or {})}

    def _take_content(self, content: Mapping[str, Any]) -> None:
        self._version, self._stepped = content["version"], content.get("stepped", False)

    def _told(self) -> bytes:
        """Return what a rank that begins to train has to know, for `_take`."""
        return msgspec.msgpack.encode((self._version, self._stepped))

    def _take(self, told: bytes) -> None:
        self._version, self._stepped = msgspec.msgpack.decode(told, type=tuple[int, bool])

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of whole groups with advantages and returns, never normalised."""
        return compute_group_advantages(samples, self.config.advantage)

    @property
    def normalizes(self) -> bool:
        """Advantages are normalised over the global batch."""
        return self.config.advantage.whitens and not self.critic

    @property
    def recomputes(self) -> bool:
        """The loss needs `first_log_probs`."""
        return self.objective.recomputes

    def first_log_probs(
        self, samples: Sequence[TrainingSample], *, batch: int, batches: int
    ) -> list[Floats]:
        """Return log-probs ``[R]`` under the weights that the iteration began with.

        Until the last batch a copy of these is kept on the CPU. Collective.
        """
        if batch == 0:
            if batches > 1:
                self.kept_weights.backup(STEP)
            return self.log_probs(samples)
        with self.kept_weights.swapped_in(STEP):
            found = self.log_probs(samples)
        if batch == batches - 1:
            self.kept_weights.drop(STEP)
        return found

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and weights to the CPU, and drop the gradients."""
        self.sleep({OPTIMIZER} if keep_weights else PARTS)

    def onload(self) -> None:
        """Take weights and optimizer state back to the device."""
        self.wake_up()

    @abstractmethod
    def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Move these parts to the CPU."""

    @abstractmethod
    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device."""
