"""What comes of a language run: its summary and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlinf_async.observe.learning_curve import LANGUAGE, draw_learning_curve
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary, Staleness
from rlinf_async.runtime.jobs.books import how_it_ended
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import Evaluated
from rlinf_async.runtime.jobs.language.reached import Reached

Outcome = Literal["succeeded", "fell short", "finished"]


def summary(
    config: LanguageConfig,
    reached: Reached,
    found: Evaluated | None,
    restarts: Mapping[str, int],
) -> LanguageSummary:
    """Of a run that came to its end.

    Args:
        config: of the run.
        reached: all that was trained.
        found: by the evaluation at the end.
        restarts: of each worker that had some.
    """
    seconds = max(reached.train_seconds, 1e-9)
    accuracy = found.accuracy if found else None
    return LanguageSummary(
        run=config.name,
        outcome=_outcome(config, accuracy),
        seed=config.seed,
        iterations=reached.version,
        train_seconds=reached.train_seconds,
        samples=reached.samples,
        samples_per_second=reached.samples / seconds,
        tokens_per_second=reached.tokens / seconds,
        eval_accuracy_before=reached.eval_accuracy_before,
        eval_accuracy=accuracy,
        evaluation_samples=found.samples if found else None,
        outcomes=reached.outcomes,
        staleness=Staleness(
            mean=reached.lag_mean,
            max=reached.lag_max,
            allowed=config.training.max_staleness,
        ),
        restarts=dict(restarts),
        dropped={"second samples": reached.duplicates},
    )


def failed_summary(
    config: LanguageConfig, reached: Reached, error: BaseException
) -> LanguageSummary:
    """What is left of a run that did not end by itself."""
    outcome, cause = how_it_ended(error)
    return LanguageSummary(
        run=config.name,
        outcome=outcome,
        seed=config.seed,
        iterations=reached.version,
        samples=reached.samples,
        train_seconds=reached.train_seconds,
        eval_accuracy_before=reached.eval_accuracy_before,
        outcomes=reached.outcomes,
        error=cause,
    )


def draw_curve(config: LanguageConfig, folder: RunFolder, title: str) -> None:
    """Draw what the run learnt."""
    draw_learning_curve(
        folder.metrics,
        folder.learning_curve,
        title=title,
        target=config.evaluation.target_accuracy,
        curves=LANGUAGE,
    )


def _outcome(config: LanguageConfig, accuracy: float | None) -> Outcome:
    target = config.evaluation.target_accuracy
    if target is None:
        return "finished"
    return "succeeded" if accuracy is not None and accuracy >= target else "fell short"
