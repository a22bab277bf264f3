"""Jobs: kinds of runs that a configuration file describes, by name.

A TOML file says at its top which job it is for: ``job = "embodied_ppo"``, or one of the user's own
by its import path: ``job = "file.py:Class"``. Packages add names by the entry point group
``rlinf_async.jobs``. ``docs/jobs.md`` shows how to write a job.

::

    run.py          a run in its folder: cluster, live view, summary, pictures
    view.py         the live view, and the trace
    checkpoints.py  how far a run has come, and the folder of checkpoints; what ends a run early
    targets.py      where training ends before its last iteration; which checkpoint is the best
    hooks.py        code of the user's own that a run calls while it goes on
    config.py       settings that every run has, and checks
    placement.py    which devices each role gets
    embodied/  embodied_sac/  embodied_offline/  language/  supervised/  world_model/
                    the built-in jobs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from rlinf_async.config.registry import Registry
from rlinf_async.observe.summary import Summary

if TYPE_CHECKING:
    from rlinf_async.observe.evaluations import Evaluated
    from rlinf_async.runtime.jobs.placement import PlacementPlan
    from rlinf_async.workers.base import Device

GROUP = "rlinf_async.jobs"


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


@runtime_checkable
class PlacingJob(Job, Protocol):
    """A job whose workers get devices by its configuration: ``check`` prints which."""

    def plan(self, config: Any, devices: Sequence[Device] | None = None) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        ...

    def check(self, config: Any, devices: Sequence[Device] | None = None) -> None:
        """Check a configuration as `Job.check` does, for this host or for a machine with
        ``devices``."""
        ...


@runtime_checkable
class InspectingJob(Job, Protocol):
    """A job that reads data or weights before its workers start: ``check`` reads them, too."""

    def inspect(self, config: Any, devices: Sequence[Device] | None = None) -> None:
        """Read what the run of a checked configuration reads first, and keep nothing.

        Raises `UsageError` with the setting that names what is wrong.
        """
        ...


OnAnswer = Callable[[int, int], object]
"""is told how many answers are there, and of how many"""


@runtime_checkable
class AnsweringJob(Job, Protocol):
    """A job that trains a model which answers prompts: ``evaluate`` has it answer again."""

    def answers(
        self, config: Any, folder: Path, *, seed: int, on_answer: OnAnswer
    ) -> Sequence[Evaluated]:
        """Evaluate the model in a folder on the prompts of a configuration.

        Args:
            config: the configuration of a run, or one like it.
            folder: folder of a Hugging Face checkpoint.
            seed: seed of the random numbers of the answers.
            on_answer: is called with each answer.

        Raises:
            UsageError: it cannot be evaluated.
        """
        ...


jobs: Registry[Callable[[], Job]] = Registry(
    "job",
    entries={
        "embodied_ppo": "rlinf_async.runtime.jobs.embodied.job:EmbodiedPPO",
        "embodied_sac": "rlinf_async.runtime.jobs.embodied_sac.job:EmbodiedSAC",
        "embodied_offline": "rlinf_async.runtime.jobs.embodied_offline.job:EmbodiedOffline",
        "language_rl": "rlinf_async.runtime.jobs.language.job:LanguageRL",
        "sft": "rlinf_async.runtime.jobs.supervised.job:Sft",
        "dpo": "rlinf_async.runtime.jobs.supervised.job:Dpo",
        "distill": "rlinf_async.runtime.jobs.supervised.job:Distill",
        "world_model": "rlinf_async.runtime.jobs.world_model.job:WorldModel",
    },  # imported when asked for: one kind of run does not pay for the other
    group=GROUP,
    called_with=(),
)


def get_job(name: str) -> Job:
    """The job of this name, or at this import path.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    return jobs.check(name, ("job",))()
