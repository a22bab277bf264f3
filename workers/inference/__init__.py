"""Inference: the workers that add the actor's log-probs, or a critic's values, to samples."""

from rlinf_async.workers.inference.worker import (
    InferenceConfig,
    InferenceReport,
    InferenceWorker,
)

__all__ = ["InferenceConfig", "InferenceReport", "InferenceWorker"]
