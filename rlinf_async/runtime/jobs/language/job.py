"""The ``language_rl`` job: checks a configuration, and runs it from the first prompt to the
pictures."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlinf_async.config import ConfigError, UsageError, to_toml
from rlinf_async.data import DataError
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.learning_curve import LANGUAGE, draw_learning_curve
from rlinf_async.observe.perfetto import read_perfetto
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary, Summary, last_line, write_summary
from rlinf_async.observe.timeline import draw_timeline
from rlinf_async.runtime.jobs.checks import check_device, check_sinks
from rlinf_async.runtime.jobs.language.checks import check_backends
from rlinf_async.runtime.jobs.language.config import LanguageConfig, check_sizes
from rlinf_async.runtime.jobs.language.fits import open_prompts
from rlinf_async.runtime.jobs.language.model_folder import checkpoint_folder, make_model_folder
from rlinf_async.runtime.jobs.language.run import LanguageRun, failed_summary
from rlinf_async.runtime.jobs.language.warm_start import has_weights, warm_start
from rlinf_async.runtime.loop import run


class LanguageRL:
    """Reinforcement learning of a language model: rollout, reward, inference, actor workers."""

    name = "language_rl"
    config_type = LanguageConfig

    def check(self, config: LanguageConfig) -> None:
        """Everything that can be known before a worker starts, short of opening the data.

        Raises:
            UsageError: says what is wrong, and where.
        """
        check_sizes(config)
        check_backends(config)
        check_device(config.actor.device, actors=config.cluster.actors, path=("actor", "device"))
        check_sinks(config.training.metrics)
        checkpoint_folder(config.model)

    def run(self, config: LanguageConfig, out: Path | None, resume: bool) -> LanguageSummary:
        """Train, evaluate, and leave everything in the run folder."""
        folder_path = out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder = RunFolder.create(folder_path, config_text=to_toml(config), resume=resume)
        except ObserveError as error:
            raise UsageError(str(error)) from error
        config = _seeded(config)
        with folder:
            for note in folder.notes:
                print(note, file=sys.stderr)
            training = self._training(config, folder)
            summary = self._train(training)
            write_summary(folder.summary, summary)  # now: the pictures take seconds
            if _draw(config, folder, summary, training.left_out):
                write_summary(folder.summary, summary)
            print(last_line(folder, summary), flush=True)
        return summary

    def _training(self, config: LanguageConfig, folder: RunFolder) -> LanguageRun:
        model = make_model_folder(config.model, folder.path / "model")
        try:
            prompts = open_prompts(config, model)
            if config.warm_start.steps and not has_weights(model):
                _warm_start(config, model)
            return LanguageRun(config, prompts, folder, model)
        except DataError as error:
            raise ConfigError(str(error), path=("data",)) from error
        except ObserveError as error:  # what is to be resumed cannot be
            raise UsageError(str(error)) from error

    def _train(self, training: LanguageRun) -> LanguageSummary:
        try:
            return run(training.main())
        except BaseException as error:
            _leave_what_there_is(training, error)
            raise


def _warm_start(config: LanguageConfig, model: Path) -> None:
    began = time.monotonic()
    losses = run(warm_start(config, model))
    print(
        f"{config.name}: warm start of {len(losses)} steps in {time.monotonic() - began:.0f} s, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}",
        flush=True,
    )


def _seeded(config: LanguageConfig) -> LanguageConfig:
    """One seed, spread over all."""
    replace = msgspec.structs.replace
    return replace(config, data=replace(config.data, seed=config.data.seed + config.seed))


def _draw(
    config: LanguageConfig, folder: RunFolder, summary: Summary, left_out: Mapping[str, int]
) -> bool:
    """Draw the pictures; problems are printed and noted in the summary. Whether there were any."""

    def curve() -> None:
        draw_learning_curve(
            folder.metrics,
            folder.learning_curve,
            title=f"{config.name}: {config.data.name}",
            target=config.evaluation.target_accuracy,
            curves=LANGUAGE,
        )

    def busy() -> None:
        _draw_busy(config, folder, left_out)

    for name, draw in (("learning curve", curve), ("timeline", busy)):
        try:
            draw()
        except ObserveError as error:
            summary.extra[name] = f"not made: {error}"
            print(f"the {name} was not made: {error}", file=sys.stderr)
    return bool(summary.extra)


def _draw_busy(config: LanguageConfig, folder: RunFolder, left_out: Mapping[str, int]) -> None:
    """Draw who was busy when, from the trace; also of a run that failed."""
    title = f"{config.name}: {config.data.name}"
    draw_timeline(read_perfetto(folder.trace), folder.timeline, title=title, left_out=left_out)


def _leave_what_there_is(training: LanguageRun, cause: BaseException) -> None:
    """Write summary and timeline of a run that failed; on a full disk its own error is still what
    is raised."""
    config, folder = training.config, training.folder
    try:
        write_summary(folder.summary, failed_summary(config, training.reached, cause))
    except ObserveError as error:
        print(f"the summary was not written: {error}", file=sys.stderr)
    try:
        if folder.trace.exists():
            _draw_busy(config, folder, training.left_out)
    except ObserveError as error:
        print(f"the timeline was not made: {error}", file=sys.stderr)
