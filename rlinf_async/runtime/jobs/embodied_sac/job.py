"""The ``embodied_sac`` job, as the command line uses it: checks a configuration, and runs it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec
import psutil

from rlinf_async.config import ConfigError
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import count_steps
from rlinf_async.messages.embodied import InterventionCounts
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.config import Reads, every_file
from rlinf_async.runtime.jobs.embodied.beginning import (
    Beginning,
    begins_with,
    files_of,
)
from rlinf_async.runtime.jobs.embodied.environment_job import EnvironmentJob
from rlinf_async.runtime.jobs.embodied.intervening import check_person
from rlinf_async.runtime.jobs.embodied.playing import TrainerMaker
from rlinf_async.runtime.jobs.embodied.run import check_judged
from rlinf_async.runtime.jobs.embodied.settings import (
    check_host,
    check_judging_env,
    goals_of,
)
from rlinf_async.runtime.jobs.embodied_sac.config import (
    MAY_DIFFER,
    FittedSac,
    ReplaySettings,
    SacConfig,
    check_sizes,
    fitted,
)
from rlinf_async.runtime.jobs.embodied_sac.run import (
    ReplayedT,
    ReplayRun,
    SacRun,
    check_transitions,
    make_trainer,
)
from rlinf_async.workers.base import Device
from rlinf_async.workers.env import EnvSpec
from rlinf_async.workers.replay.columns import bytes_of, columns_of

if TYPE_CHECKING:
    from torch import nn

COEFFICIENT: Final = "log_entropy_coefficient"
OF_CRITICS: Final = ("critic_loss", "entropy", "entropy_coefficient", "value")
COLUMNS: Final = (
    *("policy_loss", "grad_norm", "updates"),
    *("replay_size", "replay_age_mean", "replay_age_max"),
)
"""columns of soft actor-critic, beside those of its critics"""
OF_VALUES: Final = ("value_demonstrations", "value_own", "error_demonstrations", "error_own")
"""columns where batches have demonstrations, and critics value them"""


FittedT = TypeVar("FittedT", bound=ReplaySettings)


class ReplayJob(EnvironmentJob[ReplayedT, FittedT]):
    """A job that learns from batches of a replay worker."""

    run_type: ClassVar[type[ReplayRun[Any]]]

    def script_of(self, config: ReplayedT) -> str:
        return config.demonstrations.policy

    def build(
        self, full: FittedT, folder: RunFolder, beginning: Beginning | None
    ) -> ReplayRun[Any]:
        return self.run_type(full, folder, beginning)

    def trainer(self, full: FittedT) -> TrainerMaker:
        return partial(make_trainer, full, self.run_type.trainer)

    @staticmethod
    def reads(run: ReplayRun[Any]) -> Reads:
        files, shown = files_of(run.beginning), run.config.replay.demonstrations
        if shown:
            files["replay.demonstrations"] = Path(shown), every_file(Path(shown))
        return Reads(files)


class EmbodiedSAC(ReplayJob[SacConfig, FittedSac]):
    """Soft actor-critic on a Gymnasium environment, over env, rollout, replay and actor workers."""

    name = "embodied_sac"
    config_type = SacConfig
    may_differ = MAY_DIFFER
    run_type = SacRun

    def check_settings(self, config: SacConfig, devices: Sequence[Device] | None) -> None:
        check_sizes(config)
        check_host(config, devices, config.actor.fsdp.device)
        check_person(config)

    def fitted(self, config: SacConfig, spec: EnvSpec) -> FittedSac:
        full = fitted(config, spec)
        if not config.residual.path:
            return full
        from rlinf_async.runtime.jobs.embodied_sac.residual import residual_of

        return msgspec.structs.replace(full, policy=residual_of(config, full.policy))

    def checked(self, config: SacConfig, spec: EnvSpec) -> FittedSac:
        full = self.fitted(config, spec)
        if config.replay.hindsight != "none":
            full = msgspec.structs.replace(full, goals=goals_of(config))
        check_judging_env(config, spec)
        shown = checked_demonstrations(full, spec)
        check_store(full, shown)
        check_judged(full, columns_of_run(full))
        return full

    def begins_with(self, full: FittedSac, *, starts: bool = False) -> Beginning | None:
        if full.residual.path:
            from rlinf_async.runtime.jobs.embodied_sac.residual import begins_with_base

            return begins_with_base(full)

        def make_model() -> nn.Module:
            from rlinf_async.backends.building import building
            from rlinf_async.backends.fsdp.sac import model_for

            with building(full.actor.seed):
                return model_for(full.policy, full.actor.sac)

        beginning = begins_with(full, self, make_model, prefix="policy.", starts=starts)
        if beginning is not None and COEFFICIENT in beginning.first.tensors:
            _check_coefficient(full, beginning)
        return beginning


def columns_of_run(full: FittedSac) -> tuple[str, ...]:
    """Return the columns that the run has, beside those of every run in environments."""
    valued = OF_CRITICS + OF_VALUES * full.shows if full.actor.sac.critics else ()
    shown = ("demonstrations_share",) * full.shows
    of_person = (*InterventionCounts().metrics(),) if full.asked.person else ()
    return COLUMNS + valued + shown + of_person


def _check_coefficient(full: FittedSac, beginning: Beginning) -> None:
    """Refuse another initial entropy coefficient than that of the run whose own is taken."""
    there, wanted = beginning.origin.config, full.actor.sac.initial_entropy_coefficient
    began = there.actor.sac.initial_entropy_coefficient if isinstance(there, SacConfig) else wanted
    if wanted != began:
        raise ConfigError(
            f"{wanted} would have no effect: the entropy coefficient is that of "
            f"{full.model.path}, which began with {began}: leave it out",
            path=("actor", "sac", "initial_entropy_coefficient"),
        )


def checked_demonstrations(full: ReplaySettings, spec: EnvSpec) -> int:
    """Return the number of demonstrated transitions; 0 where the run records them itself.

    Raises:
        ConfigError: they do not fit the environment, or lack what a transition needs.
    """
    folder = full.replay.demonstrations
    if not folder:
        return 0
    try:
        check_transitions(Path(folder), full, spec.bounds)
        return count_steps(Path(folder))
    except DataError as error:
        raise ConfigError(str(error), path=("replay", "demonstrations")) from error


def check_store(full: ReplaySettings, shown: int) -> None:
    """Raise `ConfigError` where the store has no room, or its folder cannot be written.

    ``shown`` demonstrations lie beside the transitions. How much compressed images need is not
    known before.
    """
    replay, policy = full.store, full.acting_policy
    goals, compressed = isinstance(full, FittedSac) and full.goals is not None, replay.compressed
    columns = columns_of(policy.observation, policy.action, episodes=goals, compressed=compressed)
    rings = 1 + (full.asked.demonstrates if full.asked.person else 0)
    if replay.storage == "memory":
        needed, there = (
            bytes_of(columns, rings * replay.capacity + shown),
            psutil.virtual_memory().total,
        )
        place = "this host's memory"
    else:
        folder = _existing(Path(replay.folder or "."))
        _check_writable(folder)
        needed = bytes_of(columns, rings * (replay.capacity + full.spare) + shown)
        there, place = shutil.disk_usage(folder).free, f"the disk of {folder.absolute()}"
    if needed > there:
        beside = ", as many that a person may add," * (rings - 1)
        beside += f", and {shown} demonstrations," if shown else ""
        images = policy.observation.of_kind("image")
        without = ", without their images," * compressed
        instead = ", or set replay.images = 'compressed'" * bool(images and not compressed)
        raise ConfigError(
            f"{replay.capacity} transitions{beside} of {bytes_of(columns, 1)} bytes{without} need "
            f"{needed / 2**30:.1f} GiB, and {place} has {there / 2**30:.1f} GiB: take fewer"
            f"{instead}",
            path=("replay", "capacity"),
        )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _check_writable(folder: Path) -> None:
    try:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
        with tempfile.TemporaryFile(dir=folder):  # a disk may be read-only, whatever it says
            pass
    except OSError as error:
        raise ConfigError(
            f"the replay store cannot be written there: {error}", path=("replay", "folder")
        ) from error
