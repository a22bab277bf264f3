"""How the command line finds jobs, and the state of one invocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the command line loads the runtime only when a command needs it
    from rlinf_async.runtime.jobs import Job

FindJob: TypeAlias = "Callable[[str], Job]"
"""Gives the job of a name; raises `UsageError` that lists the known names for any other."""


@dataclasses.dataclass
class Session:
    """One invocation of the command line."""

    find_job: FindJob
    traceback: bool = False
    """Show the driver's own traceback when a run fails."""


def registered_job(name: str) -> Job:
    """The job of this name from the runtime's registry, which is loaded only now."""
    from rlinf_async.runtime.jobs import get_job

    return get_job(name)
