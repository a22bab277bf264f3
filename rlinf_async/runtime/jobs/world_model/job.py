"""The ``world_model`` job, as the command line uses it: checks a configuration, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf_async.backends.world_model.config import WorldModelInfo
from rlinf_async.config import ConfigError
from rlinf_async.data.config import DataError
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.sinks.config import check_sinks
from rlinf_async.observe.summary import WorldModelSummary
from rlinf_async.runtime.jobs.config import Reads, every_file
from rlinf_async.runtime.jobs.embodied.playing import check_scripted_policy
from rlinf_async.runtime.jobs.embodied.settings import described
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import run_in_folder
from rlinf_async.runtime.jobs.world_model.config import MAY_DIFFER, WorldModelConfig
from rlinf_async.runtime.jobs.world_model.run import WorldModelRun
from rlinf_async.workers.base import Device


class WorldModel:
    """A model of an environment, learnt from recorded episodes."""

    name = "world_model"
    config_type = WorldModelConfig

    def plan(
        self, config: WorldModelConfig, devices: Sequence[Device] | None = None
    ) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        return config.plan(config.cluster.devices() if devices is None else devices)

    def check(self, config: WorldModelConfig, devices: Sequence[Device] | None = None) -> None:
        """Check all that can be checked without reading episodes; asks the environment.

        Args:
            config: the run's configuration.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        self.plan(config, devices)
        config.cluster.check_interpreters(config.cluster.placement)
        check_sinks(config.observe)
        _modelled(config, described(config.reality))
        if config.demonstrations.policy:
            check_scripted_policy(config.reality, config.demonstrations.policy)

    def inspect(self, config: WorldModelConfig, devices: Sequence[Device] | None = None) -> None:
        """Read all recorded episodes, where they are there already.

        Args:
            config: the run's configuration, checked.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with what it names.
        """
        _read(config, _modelled(config, described(config.reality)))

    def run(self, config: WorldModelConfig, out: Path | None, resume: bool) -> WorldModelSummary:
        """Train, and leave everything in the run folder."""
        info = _modelled(config, described(config.reality))

        def build(folder: RunFolder) -> WorldModelRun:
            _read(config, info)
            return WorldModelRun(config, info, folder)

        return run_in_folder(
            config, out, resume=resume, may_differ=MAY_DIFFER, build=build, reads=_reads
        )


def _modelled(config: WorldModelConfig, spec: EnvSpec) -> WorldModelInfo:
    """What the model is of.

    Raises:
        ConfigError: actions are of several spaces.
    """
    if not (spec.action.continuous or spec.action.discrete):
        raise ConfigError(
            f"{config.env.single.name} takes {spec.action}; a world model is for actions of one "
            "Box or one Discrete: wrap it",
            path=("env",),
        )
    return WorldModelInfo(
        env=config.env.single.name,
        observation=spec.observation,
        action=spec.action,
        bounds=tuple(spec.bounds),
        sizes=config.model,
    )


def _read(config: WorldModelConfig, info: WorldModelInfo) -> None:
    """Read the folders, where there are any; raises `ConfigError`."""
    from rlinf_async.backends.world_model.recorded import check_recorded, load_recorded

    folders = config.data.folders
    if not folders:
        return
    try:
        for folder in folders:
            check_recorded(Path(folder), info.spec, info.env)
        load_recorded(folders, info, config.data.held_out)
    except DataError as error:
        raise ConfigError(str(error), path=("data", "folders")) from error


def _reads(run: WorldModelRun) -> Reads:
    folders = run.config.data.folders
    return Reads(
        {f"data.folders.{at}": (Path(one), every_file(Path(one))) for at, one in enumerate(folders)}
    )
