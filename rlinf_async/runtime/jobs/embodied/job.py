"""The ``embodied_ppo`` job: checks a configuration, and runs it from the first ticket to the
video."""

from __future__ import annotations

from pathlib import Path

from rlinf_async.config import ConfigError
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.jobs.checks import check_device, check_sinks
from rlinf_async.runtime.jobs.embodied.checks import FSDP, check_names
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig, check_sizes, fitted
from rlinf_async.runtime.jobs.embodied.run import EmbodiedRun
from rlinf_async.runtime.jobs.in_folder import run_in_folder
from rlinf_async.workers.env import EnvError, describe_env


class EmbodiedPPO:
    """PPO on a Gymnasium environment, over env, rollout and actor workers."""

    name = "embodied_ppo"
    config_type = EmbodiedConfig

    def check(self, config: EmbodiedConfig) -> None:
        """Everything that can be known before a worker starts; makes one environment to ask it.

        Raises:
            UsageError: says what is wrong, and where.
        """
        check_sizes(config)
        check_names(config)
        check_device(config.actor.fsdp.device, actors=config.cluster.actors, path=(*FSDP, "device"))
        check_sinks(config.training.metrics)
        self._fitted(config)

    def run(self, config: EmbodiedConfig, out: Path | None, resume: bool) -> EmbodiedSummary:
        """Train, evaluate, and leave everything in the run folder."""
        full = self._fitted(config)

        def build(folder: RunFolder) -> EmbodiedRun:
            return EmbodiedRun(full, folder)

        return run_in_folder(config.name, config, out, resume=resume, build=build)

    def _fitted(self, config: EmbodiedConfig) -> EmbodiedConfig:
        try:
            return fitted(config, describe_env(config.env))
        except ConfigError as error:
            if error.path[:1] in (("actor",), ("env",)):
                raise
            raise ConfigError(error.problem, path=("env", *error.path)) from error
        except EnvError as error:
            setting = "entry_point" if config.env.entry_point else "id"
            raise ConfigError(str(error), path=("env", setting)) from error
