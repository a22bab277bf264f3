"""Errors in showing a run and writing its files, by what the caller can do about them.

::

    ObserveError
     +-- RunFolderError     the run folder: taken, not ours, full, not writable
     +-- MetricsError       a metric that is not a number, a sink that is unknown or broke
     +-- VideoError         the env does not render, or renders nothing
"""

from __future__ import annotations


class ObserveError(Exception):
    """Root of everything that `rlinf_async.observe` raises."""


class RunFolderError(ObserveError):
    """The run folder cannot be used; says which path, why, and what to do."""


class MetricsError(ObserveError):
    """A metric or a metrics sink is at fault, and is named."""


class VideoError(ObserveError):
    """No video could be made of the env; says which step of it failed."""
