"""A trainer that only takes time, by a cost model: seconds by tokens, while the CPU is free. On a
virtual loop they pass by its clock.

It has no model. Its weights are bytes that depend on their version, with valid checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from rlinf_async.algorithms.config import LARGEST_LOG_RATIO, LanguageLossConfig
from rlinf_async.algorithms.off_policy import leave_out
from rlinf_async.backends.language import MicroBatch, VersionTrainer
from rlinf_async.backends.toy.config import ToyPolicyConfig, ToyTrainerConfig
from rlinf_async.backends.toy.engine import token_log_probs
from rlinf_async.deadlines import let_pass
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import Allocate, TensorSlot, WeightBucket, WeightUpdate


class ToyTrainer(VersionTrainer):
    """A `LanguageTrainer` that waits as long as training would take."""

    file = "toy.json"

    def __init__(self, config: ToyTrainerConfig, world_size: int, rank: int) -> None:
        super().__init__(world_size, rank)
        self.config = config
        self._loss = config.loss if isinstance(config, ToyPolicyConfig) else LanguageLossConfig()

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        """The loss compares with the weights that the iteration began with."""
        return self._loss.proximal == "step"

    def take_rescale(self) -> float:
        """Move what is not there, on every rank."""
        let_pass(self.config.seconds_to_move)
        return self.config.seconds_to_move

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

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Take the time of one optimizer step; compare what the engine said of this version."""
        samples = tokens = compared = 0
        difference = 0.0
        weights: list[Floats] = []
        for batch in micro_batches:
            weights += self._weights(batch.samples)
            for one, own in zip(batch.samples, self._log_probs(batch.samples), strict=True):
                same = one.loss_mask & (one.version == self.version)
                compared += int(same.sum())
                difference += float(np.abs(own - one.log_prob)[same].sum())
            here = sum(one.tokens for one in batch.samples)
            let_pass(here * self.config.seconds_per_token)
            samples += len(batch.samples)
            tokens += here
        let_pass(self.config.seconds_per_step)
        found = {"samples_trained": float(samples), "tokens_trained": float(tokens)}
        if weights:
            found |= self._of_weights(np.concatenate(weights))
        if compared:
            found["engine_actor_difference"] = difference / compared
        return found | {"engine_actor_tokens": float(compared)}

    def _of_weights(self, every: Floats) -> dict[str, float]:
        """Return what the metrics say of ``proximal / behaviour`` of all trained tokens."""
        loss = self._loss
        left = loss.off_policy_cap if loss.off_policy.startswith("truncated") else 0.0
        floor = loss.off_policy_floor if loss.off_policy == "icepop" else 0.0
        capped = (every > loss.off_policy_cap) | (every < floor)
        held = np.where(capped, left, every)
        return {
            "off_policy_weight": float(held.mean()),
            "off_policy_change": float(np.abs(held - 1.0).mean()),
            "off_policy_capped": float(capped.mean()),
        }

    def leave_out(self, samples: Sequence[TrainingSample]) -> int:
        """Clear the ``loss_mask`` of samples that the masks of the loss leave out."""
        return leave_out(samples, self._loss)

    def _weights(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return ``proximal / behaviour`` of the trained tokens of each sample, before the cap."""
        if self._loss.off_policy == "none":
            return []
        proximal = [one.prev_log_prob for one in samples]
        if self._loss.proximal == "current":
            proximal = list(self.log_probs(samples))
        found = [
            ((one.log_prob if log_prob is None else log_prob) - one.log_prob)[one.loss_mask]
            for one, log_prob in zip(samples, proximal, strict=True)
        ]
        if self._loss.off_policy == "truncated_sequence":
            found = [np.full_like(one, one.sum()) for one in found]
        return [np.exp(np.minimum(one, LARGEST_LOG_RATIO)) for one in found]

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Log-probs as the toy engine gives them, of this version; of version 0 as reference."""
        let_pass(sum(one.tokens for one in samples) * self.config.seconds_per_token / 3)
        return self._log_probs(samples, 0 if reference else None)

    def _log_probs(
        self, samples: Sequence[TrainingSample], version: int | None = None
    ) -> list[Floats]:
        version = self.version if version is None else version
        return [
            one.drawn_mask
            * token_log_probs(
                one.response_ids, np.full(len(one.response_ids), version, np.int32), one.kept
            )
            for one in samples
        ]

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return one bucket of ``weight_bytes`` bytes."""
        data = np.full(self.config.weight_bytes, self.version % 256, np.uint8)
        slot = TensorSlot("weights", "uint8", (len(data),), 0)
        bucket = WeightBucket((slot,), data, xxhash.xxh3_64_intdigest(data.data))
        headers = msgspec.msgpack.encode((self.version, [(bucket.slots, bucket.checksum)]))
        return WeightUpdate(self.version, (bucket,), xxhash.xxh3_64_intdigest(headers))

    def offload(self, *, keep_weights: bool = False) -> None:
        """Take the time of it."""
        let_pass(self.config.seconds_to_move)

    def onload(self) -> None:
        """Take the time of it."""
        let_pass(self.config.seconds_to_move)
