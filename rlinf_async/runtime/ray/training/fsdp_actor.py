"""`FSDPTrainRayActor`: a Hugging Face model, sharded by FSDP, as one rank of a training group."""

from __future__ import annotations

from rlinf_async.runtime.ray.training.language_actor import LanguageTrainRayActor


class FSDPTrainRayActor(LanguageTrainRayActor):
    """Every rank has a shard of the model, and a share of each rollout."""

    train_backend = "fsdp"
