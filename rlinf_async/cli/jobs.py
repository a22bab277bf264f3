"""What the command line needs of a job, and what one invocation carries along."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec


class Job(Protocol):
    """A kind of run: a dataflow that a configuration file describes."""

    @property
    def config_type(self) -> type[msgspec.Struct]:
        """The Struct that the file is read as."""
        ...

    def check(self, config: Any) -> None:
        """Raise `UsageError` where the run could not start; starts nothing itself."""

    def run(self, config: Any, out: pathlib.Path | None, resume: bool) -> object:
        """Run to the end and return a summary; ``out`` is the run folder (None: the job's choice).

        Reports progress and results to the terminal itself.
        """


FindJob: TypeAlias = Callable[[str], Job]
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
