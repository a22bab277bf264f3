"""`EnvironmentJob`: what every job in environments does with its configuration.

::

    check    settings -> spaces of the environment -> fitted -> weights to begin with
    run      the same, then a trial of the environment -> the run in its folder
    trained  fitted -> what lets a policy act
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.jobs.config import Reads, every_file
from rlinf_async.runtime.jobs.embodied.beginning import Beginning, as_begun, pinned
from rlinf_async.runtime.jobs.embodied.choosing import planned, tried_and_chosen
from rlinf_async.runtime.jobs.embodied.playing import (
    TrainedPolicy,
    TrainerMaker,
    check_scripted_policy,
)
from rlinf_async.runtime.jobs.embodied.settings import (
    EnvironmentSettings,
    described,
    described_for_run,
)
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import Run, run_in_folder
from rlinf_async.workers.base import Device

ConfigT = TypeVar("ConfigT", bound=EnvironmentSettings)
FittedT = TypeVar("FittedT", bound=EnvironmentSettings)

JUDGES: Final = "evaluation.env.reward.classifier"
"""setting of a classifier that judges evaluations alone"""


class EnvironmentJob(ABC, Generic[ConfigT, FittedT]):
    """A job in environments; a subclass says what its settings are, and which run they make."""

    may_differ: ClassVar[tuple[str, ...]]
    """settings and sections that a resumed run may change"""

    def plan(self, config: ConfigT, devices: Sequence[Device] | None = None) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        return planned(config, devices)

    def check(self, config: ConfigT, devices: Sequence[Device] | None = None) -> None:
        """Check all that can be checked before a worker starts; asks an environment.

        Args:
            config: the run's configuration.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        self.check_settings(config, devices)
        self.begins_with(self.checked(config, described(config)))
        if script := self.script_of(config):
            check_scripted_policy(config, script)

    def run(self, config: ConfigT, out: Path | None, resume: bool) -> EmbodiedSummary:
        """Train, evaluate, and leave everything in the run folder."""
        config = pinned(config, out, resume=resume)
        full = self.checked(config, described_for_run(config))
        beginning = self.begins_with(full, starts=True)
        cluster = tried_and_chosen(config, full)
        full = msgspec.structs.replace(full, cluster=cluster)
        as_run = msgspec.structs.replace(as_begun(config, beginning), cluster=cluster)

        def build(folder: RunFolder) -> Run[EmbodiedSummary]:
            return self.build(full, folder, beginning)

        return run_in_folder(
            as_run,
            out,
            resume=resume,
            may_differ=self.may_differ,
            build=build,
            reads=self.read_by,
        )

    def trained(self, config: ConfigT) -> TrainedPolicy:
        """Return what lets a policy act that was trained with this configuration."""
        full = self.fitted(config, described(config))
        return TrainedPolicy(full, self.trainer(full))

    @abstractmethod
    def check_settings(self, config: ConfigT, devices: Sequence[Device] | None) -> None:
        """Check what no environment has to be asked for. Raises: as `check`."""

    @abstractmethod
    def fitted(self, config: ConfigT, spec: EnvSpec) -> FittedT:
        """Return the configuration with the environment's spaces."""

    @abstractmethod
    def checked(self, config: ConfigT, spec: EnvSpec) -> FittedT:
        """Return it `fitted`, and all checked that depends on the spaces."""

    @abstractmethod
    def begins_with(self, full: FittedT, *, starts: bool = False) -> Beginning | None:
        """Return the weights that a run begins with; None: new ones."""

    @abstractmethod
    def script_of(self, config: ConfigT) -> str:
        """Name the scripted policy whose episodes the run records; empty: there is none."""

    @abstractmethod
    def build(
        self, full: FittedT, folder: RunFolder, beginning: Beginning | None
    ) -> Run[EmbodiedSummary]:
        """Make the run."""

    def read_by(self, run: Any) -> Reads:
        """Return the files that a run reads, its classifiers of success among them."""
        found, config = self.reads(run), run.config
        judging = config.evaluation.env
        named = {
            "env.reward.classifier": config.env.reward.classifier,
            JUDGES: judging.reward.classifier if judging is not None else "",
        }
        files = {name: (Path(one), every_file(Path(one))) for name, one in named.items() if one}
        may_differ = (*found.may_differ, JUDGES)  # as all of `[evaluation]`
        return found._replace(files={**found.files, **files}, may_differ=may_differ)

    @abstractmethod
    def trainer(self, full: FittedT) -> TrainerMaker:
        """Return what makes a trainer that reads a checkpoint."""

    @staticmethod
    @abstractmethod
    def reads(run: Any) -> Reads:
        """Return the files that a run reads, by setting."""
