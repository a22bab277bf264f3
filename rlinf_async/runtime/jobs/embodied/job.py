"""The ``embodied_ppo`` job: checks a configuration, and runs it from the first ticket to the
video."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from rlinf_async.config import ConfigError, UsageError, to_toml
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary, last_line, write_summary
from rlinf_async.runtime.jobs.checks import check_device, check_sinks
from rlinf_async.runtime.jobs.embodied.checks import FSDP, check_names
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig, check_sizes, fitted
from rlinf_async.runtime.jobs.embodied.pictures import draw_busy, draw_pictures
from rlinf_async.runtime.jobs.embodied.run import EmbodiedRun, failed_summary
from rlinf_async.runtime.loop import run
from rlinf_async.workers.env import EnvError, describe_env

log = logging.getLogger(__name__)


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
        folder_path = out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder = RunFolder.create(folder_path, config_text=to_toml(config), resume=resume)
        except ObserveError as error:
            raise UsageError(str(error)) from error
        with folder:
            for note in folder.notes:
                print(note, file=sys.stderr)
            training = self._training(full, folder)
            summary = self._train(training)
            write_summary(folder.summary, summary)  # now: the pictures take seconds
            if draw_pictures(full, folder, summary, training.left_out):
                write_summary(folder.summary, summary)
            print(last_line(folder, summary), flush=True)
        return summary

    def _training(self, config: EmbodiedConfig, folder: RunFolder) -> EmbodiedRun:
        try:
            return EmbodiedRun(config, folder)
        except ObserveError as error:  # what is to be resumed cannot be
            raise UsageError(str(error)) from error

    def _train(self, training: EmbodiedRun) -> EmbodiedSummary:
        try:
            return run(training.main())
        except BaseException as error:
            _leave_what_there_is(training, error)
            raise

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


def _leave_what_there_is(training: EmbodiedRun, cause: BaseException) -> None:
    """Write summary and timeline of a run that failed; on a full disk its own error is still what
    is raised."""
    config, folder = training.config, training.folder
    try:
        write_summary(folder.summary, failed_summary(config, training.reached, cause))
    except ObserveError as error:
        print(f"the summary was not written: {error}", file=sys.stderr)
    try:
        if folder.trace.exists():
            draw_busy(config, folder, training.left_out)
    except ObserveError as error:
        print(f"the timeline was not made: {error}", file=sys.stderr)
