"""How the command line finds jobs, and the state of one invocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from rlinf_async.runtime.jobs import Job

FindJob: TypeAlias = Callable[[str], Job]
"""Gives the job of a name; raises `UsageError` that lists the known names for any other."""


@dataclasses.dataclass
class Session:
    """One invocation of the command line."""

    find_job: FindJob
    traceback: bool = False
    """Show the driver's own traceback when a run fails."""
