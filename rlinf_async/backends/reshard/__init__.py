"""Plans of `rlinf_async.parallel`, carried out on live tensors."""

from rlinf_async.backends.reshard.executor import Report, State, allocate, reshard
from rlinf_async.backends.reshard.reserved import Reservations
from rlinf_async.backends.reshard.signals import (
    BucketDamaged,
    BuffersDiffer,
    NotAgreed,
    PeerLost,
    ReshardError,
)

__all__ = [
    "BucketDamaged",
    "BuffersDiffer",
    "NotAgreed",
    "PeerLost",
    "Report",
    "Reservations",
    "ReshardError",
    "State",
    "allocate",
    "reshard",
]
