"""`MegatronTrainRayActor`: a language model that Megatron cuts, as one rank of a training group.

::

    tp 2, dp 2   rank                  0   1   2   3
                 share of a rollout    0   0   1   1      train_parallel_config: dp_size 2
"""

from __future__ import annotations

from rlinf_async.runtime.ray.training.language_actor import LanguageTrainRayActor


class MegatronTrainRayActor(LanguageTrainRayActor):
    """``tensor_model_parallel_size`` x ``pipeline_model_parallel_size`` ranks hold one model, and
    take the same share of each rollout."""

    train_backend = "megatron"
