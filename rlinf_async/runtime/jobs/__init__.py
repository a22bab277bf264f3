"""Jobs: kinds of runs that a configuration file describes, by name.

A TOML file says at its top which job it is for: ``job = "embodied_ppo"``. Packages of others add
jobs by the entry point group ``rlinf_async.jobs``.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.observe.summary import Summary

GROUP = "rlinf_async.jobs"
BUILT_IN = {
    "embodied_ppo": "rlinf_async.runtime.jobs.embodied.job:EmbodiedPPO",
    "language_rl": "rlinf_async.runtime.jobs.language.job:LanguageRL",
}
"""name -> ``module:class``"""


class Job(Protocol):
    """A kind of run: a dataflow that a configuration file describes."""

    @property
    def config_type(self) -> type[msgspec.Struct]:
        """The Struct that its file is read as."""
        ...

    def check(self, config: Any) -> None:
        """Raise `UsageError` where the run could not start. Starts nothing."""
        ...

    def run(self, config: Any, out: Path | None, resume: bool) -> Summary:
        """Run to the end; ``out`` is the run folder (None: the job's choice).

        Reports progress and results to the terminal itself.
        """
        ...


def get_job(name: str) -> Job:
    """The job of this name.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name in BUILT_IN:  # imported only now: one kind of run does not pay for the other
        module, _, kind = BUILT_IN[name].partition(":")
        job: Job = getattr(importlib.import_module(module), kind)()
        return job
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in others:
        job = others[name].load()()
        return job
    known = sorted([*BUILT_IN, *others])
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"no job is called {name!r}{hint} (known: {', '.join(known)})", path=("job",))
