"""What can go wrong in the FSDP backend.

::

    FSDPError
    ├── OffloadedError      computation with a model that is offloaded
    ├── IdleRank            training on a rank outside the active world size
    ├── RescaleError        another number of ranks was refused or failed; nothing has changed
    └── RescaleUndecided    what the other ranks decided cannot be known: end this one

`CheckpointError` is that of `rlinf_async.backends.checkpoint`.
"""

from __future__ import annotations

from rlinf_async.backends.base import StrategyUnknown
from rlinf_async.backends.checkpoint.errors import CheckpointError as CheckpointError


class FSDPError(Exception):
    """Base of the errors of this backend."""


class OffloadedError(FSDPError):
    """Call `load_param_and_grad` and `load_optimizer` first."""


class IdleRank(FSDPError):
    """The rank holds no part of the model: only the active ranks train."""


class RescaleError(FSDPError):
    """The message names the stage, the rank, and the cause; every rank trains on as before.

    A rank that was lost is a `reshard.PeerLost` instead.
    """


class RescaleUndecided(FSDPError, StrategyUnknown):
    """This rank was ready, so the others may have changed, and the store with the decision is gone.

    Its model may be the old or the new one: end the process, and go on from a checkpoint.
    """
