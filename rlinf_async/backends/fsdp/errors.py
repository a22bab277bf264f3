"""What can go wrong in the FSDP backend.

::

    FSDPError
    ├── OffloadedError      computation with a model that is offloaded
    └── IdleRank            training on a rank outside the active world size

`CheckpointError` is that of `rlinf_async.backends.checkpoint`, `RescaleError` that of
`rlinf_async.backends.rescale`.
"""

from __future__ import annotations

from rlinf_async.backends.checkpoint.errors import CheckpointError as CheckpointError


class FSDPError(Exception):
    """Base of the errors of this backend."""


class OffloadedError(FSDPError):
    """Call `load_param_and_grad` and `load_optimizer` first."""


class IdleRank(FSDPError):
    """The rank holds no part of the model: only the active ranks train."""
