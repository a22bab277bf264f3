"""What can go wrong in the FSDP backend.

::

    FSDPError
    ├── OffloadedError      the model is asked to compute while it is offloaded
    ├── IdleRank            a rank outside the active world size is asked to train
    ├── RescaleError        another number of ranks was refused or failed; all is as it was
    └── RescaleUndecided    nobody can tell this rank what the others decided: end it

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
    """It holds no part of the model: only the active ranks train."""


class RescaleError(FSDPError):
    """The message names the stage, the rank, and what failed there; every rank trains on as before.

    A rank that was lost is a `reshard.PeerLost` instead.
    """


class RescaleUndecided(FSDPError, StrategyUnknown):
    """This rank was ready, so the others may have changed, and the store that would say so is gone.

    Its model is neither surely the old nor surely the new one: end the process, and go on from a
    checkpoint.
    """
