"""Weights as buckets of bytes, under one version, checked before they are used."""

from rlinf_async.messages.weight_errors import (
    WeightsDamaged,
    WeightsError,
    WeightsMismatch,
    WeightsOutdated,
    refuse_older,
)
from rlinf_async.messages.weights import DEFAULT_BUCKET_BYTES
from rlinf_async.weights.pack import pack
from rlinf_async.weights.unpack import check_fit, load, unpack, verify

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
