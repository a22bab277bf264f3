"""What can go wrong in the FSDP backend.

::

    FSDPError
    ├── CheckpointError     a checkpoint could not be written, or does not fit the model
    └── OffloadedError      the model is asked to compute while it is offloaded
"""

from __future__ import annotations


class FSDPError(Exception):
    """Base of the errors of this backend."""


class CheckpointError(FSDPError):
    """The message names the file, the tensor, and what differs."""


class OffloadedError(FSDPError):
    """Call `load_param_and_grad` and `load_optimizer` first."""
