"""The error of this folder.

::

    CheckpointError     a checkpoint could not be written or read, or does not fit
"""

from __future__ import annotations


class CheckpointError(Exception):
    """The message names the file, the tensor, and what differs."""
