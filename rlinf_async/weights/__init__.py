"""Weights as buckets of bytes, under one version, checked before they are used."""

from rlinf_async.messages.weights import (
    DEFAULT_BUCKET_BYTES,
    WeightsDamaged,
    WeightsError,
    WeightsMismatch,
    WeightsOutdated,
    refuse_older,
)
from rlinf_async.weights.pack import check_fit, load, pack, unpack, verify

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "WeightsDamaged",
    "WeightsError",
    "WeightsMismatch",
    "WeightsOutdated",
    "check_fit",
    "load",
    "pack",
    "refuse_older",
    "unpack",
    "verify",
]
