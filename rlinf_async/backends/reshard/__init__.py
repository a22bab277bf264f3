"""Plans of `rlinf_async.parallel`, carried out on live tensors."""

from rlinf_async.backends.reshard.arena import Arena
from rlinf_async.backends.reshard.errors import (
    BucketDamaged,
    BuffersDiffer,
    NotAgreed,
    PeerLost,
    ReshardError,
)
from rlinf_async.backends.reshard.executor import Report, State, allocate, reshard
from rlinf_async.backends.reshard.reserved import Reservations

__all__ = [
    "Arena",
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
