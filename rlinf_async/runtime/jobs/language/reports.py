"""What a language run reports: rows of the metrics, the top line of the live view, evaluations,
warnings, the summary, the learning curve."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from rlinf_async.channels import Sender
from rlinf_async.messages.language import (
    Failed,
    Prompt,
    Request,
    Sampling,
    Scored,
    ScoredSample,
)
from rlinf_async.observe.learning_curve import LANGUAGE, draw_learning_curve
from rlinf_async.observe.progress import figure
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary, Staleness
from rlinf_async.runtime.jobs.failures import Stopped
from rlinf_async.runtime.jobs.language.checkpoints import LanguageProgress
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.learners import Trained
from rlinf_async.runtime.jobs.language.samples import Collector
from rlinf_async.runtime.jobs.view import Headline
from rlinf_async.workers.scheduler import SchedulerSummary

OF_THE_CRITIC = ("loss", "value", "value_error", "grad_norm", "lr")
"""metrics of a critic that become columns, ``critic_loss`` and so on"""

Groups = Sequence[Sequence[ScoredSample]]


class TrainedOn(NamedTuple):
    """What one iteration was trained on: all of its samples."""

    samples: int
    tokens: int
    """prompts and responses"""
    lag_mean: float
    """versions between the weights that made a token and those it trained, over response tokens"""
    lag_max: int
    outcomes: Counter[str]
    metrics: dict[str, float]


def summed_up(iteration: int, groups: Groups) -> TrainedOn:
    """Measure the groups of an iteration. What cannot be measured stays out of the metrics."""
    every = [one for group in groups for one in group]
    responses = [len(one.sample.generated.token_ids) for one in every]
    prompts = [len(one.sample.request.prompt.token_ids) for one in every]
    lags = [iteration - one.sample.generated.version for one in every]
    made = max(1, sum(responses))
    judged = [one.outcome for one in every if isinstance(one.outcome, Scored)]
    rewards = [outcome.reward for outcome in judged]
    ended = Counter(one.sample.generated.finish for one in every)
    metrics = {
        "response_tokens": sum(responses) / len(every),
        "response_tokens_median": float(np.median(responses)),
        "response_tokens_p99": float(np.quantile(responses, 0.99)),
        "response_tokens_max": float(max(responses)),
        "prompt_tokens": sum(prompts) / len(every),
        "cut_off": ended["length"] / len(every),
        "behaviour_log_prob": sum(float(one.sample.generated.log_prob.sum()) for one in every)
        / made,
        "unscored": float(len(every) - len(judged)),
    }
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
        metrics |= _parts([outcome.parts for outcome in judged])
    return TrainedOn(
        samples=len(every),
        tokens=sum(responses) + sum(prompts),
        lag_mean=sum(float(lag.sum()) for lag in lags) / made,
        lag_max=max((int(lag.max()) for lag in lags if lag.size), default=0),
        outcomes=Counter(type(one.outcome).__name__.lower() for one in every),
        metrics=metrics,
    )


def _parts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each part of the reward, over the samples that have it."""
    names = sorted({name for one in parts for name in one})
    return {
        f"reward_{name}": sum(one[name] for one in parts if name in one)
        / sum(name in one for one in parts)
        for name in names
    }


def add(progress: LanguageProgress, seen: TrainedOn, version: int, seconds: float) -> None:
    """Add one iteration to the progress of the run."""
    progress.version = version
    progress.samples += seen.samples
    progress.tokens += seen.tokens
    progress.train_seconds = seconds
    progress.lag_sum += seen.lag_mean
    progress.lag_max = max(progress.lag_max, seen.lag_max)
    progress.outcomes = dict(Counter(progress.outcomes) + seen.outcomes)


def row(
    progress: LanguageProgress, iteration: int, seen: TrainedOn, trained: Trained
) -> dict[str, float]:
    """One row of the metrics. What a trainer reports is of the whole batch, equal on all ranks."""
    reports = trained.actors
    groups = sum(report.groups for report in reports)
    learnt = dict(reports[0].metrics)
    if "tokens" in learnt:  # of this iteration; the column tokens counts those of the whole run
        learnt["trained_tokens"] = learnt.pop("tokens")
    if trained.critics:
        values = trained.critics[0].metrics
        learnt |= {f"critic_{name}": values[name] for name in OF_THE_CRITIC if name in values}
    return {
        "iteration": float(iteration),
        "version": float(progress.version),
        "samples": float(progress.samples),
        "tokens": float(progress.tokens),
        "train_seconds": progress.train_seconds,
        "samples_per_second": progress.samples / max(progress.train_seconds, 1e-9),
        "staleness_mean": seen.lag_mean,
        "staleness_max": float(seen.lag_max),
        "groups_without_signal": sum(one.groups_without_signal for one in reports) / groups,
        "wait_seconds": max(report.wait_seconds for report in reports),
        "step_seconds": max(report.train_seconds for report in reports),
        **seen.metrics,
        **learnt,
    }


def evaluation_row(progress: LanguageProgress, accuracy: float) -> dict[str, float]:
    """The row of the metrics about an evaluation."""
    return {
        "samples": float(progress.samples),
        "train_seconds": progress.train_seconds,
        "eval_accuracy": accuracy,
    }


def headline(
    run: str, iterations: int, progress: LanguageProgress, last: dict[str, float] | None
) -> Headline:
    """The top line of the live view."""
    last = last or {}
    rate = progress.samples / max(progress.train_seconds, 1e-9) if progress.version else None
    figures = (
        ("samples", f"{progress.samples:,}"),
        ("samples/s", figure(rate, ",.0f")),
        ("seconds", f"{progress.train_seconds:.0f}"),
        ("reward", figure(last.get("reward"), ".2f")),
        ("tokens", figure(last.get("response_tokens"), ".1f")),
        ("staleness", figure(last.get("staleness_mean"), ".1f")),
    )
    return Headline(run, progress.version, iterations, figures)


class Evaluated(NamedTuple):
    """The result of one evaluation."""

    accuracy: float | None
    """mean reward of the samples that were scored; None where none was"""
    samples: int
    """number of samples that were scored"""
    unscored: int
    """number of samples that the verifier rejected or failed on"""


async def evaluate(
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    version: int,
    requests: Sender[Request],
    collector: Collector,
    on_answer: Callable[[int, int], None],
) -> Evaluated | None:
    """Have every prompt answered once, greedily, by weights of at least this version, and scored.

    None where there is no prompt. ``on_answer`` is called with the number of the answers that are
    there, and of all.
    """
    if not prompts:
        return None
    on_answer(0, len(prompts))
    greedy = Sampling(max_tokens=max_tokens, temperature=0.0)
    wanted = [
        Request(
            group=-1 - position,  # never that of a sample to train on
            index=version,
            group_size=1,
            iteration=version,
            min_version=version,
            prompt=prompt,
            sampling=greedy,
            seed=position,
            evaluation=True,
        )
        for position, prompt in enumerate(prompts)
    ]
    expected = collector.expect(wanted)
    count = itertools.count(1)
    for one in expected:
        one.add_done_callback(lambda _: on_answer(next(count), len(expected)))
    for request in wanted:
        await requests.put(request)
    return _accuracy_of(await asyncio.gather(*expected))


def _accuracy_of(answers: Sequence[ScoredSample]) -> Evaluated:
    rewards = [one.outcome.reward for one in answers if isinstance(one.outcome, Scored)]
    accuracy = sum(rewards) / len(rewards) if rewards else None
    return Evaluated(accuracy, len(rewards), len(answers) - len(rewards))


class NothingScored(RuntimeError):
    """Every sample of an iteration failed in its verifier; the message has the first error."""


def warn_of_failures(run: str, iteration: int, groups: Groups, *, warned: bool) -> None:
    """Warn of the first sample that could not be scored.

    Args:
        run: its name.
        iteration: that was trained.
        groups: of it.
        warned: this run has been warned of one already.

    Raises:
        NothingScored: none could: going on would train on nothing.
    """
    outcomes = [one.outcome for group in groups for one in group]
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, Failed)]
    if not errors:
        return
    if len(errors) == len(outcomes):
        raise NothingScored(
            f"all {len(errors)} samples of iteration {iteration} failed to be scored, the first "
            f"with: {errors[0]}. There is nothing to learn from: correct the verifier (or "
            "reward.time_limit), and go on with --resume"
        )
    if not warned:
        print(
            f"{run}: {len(errors)} of {len(outcomes)} samples of iteration {iteration} failed to "
            f"be scored and train nothing, the first with: {errors[0]} (said once; the summary "
            "counts them)",
            file=sys.stderr,
        )


def warn_of_no_signal(run: str, iteration: int, trained: Trained, *, warned: bool) -> bool:
    """Warn of the first iteration in which no group had anything to learn from.

    That may be chance, or the end of what these tasks can teach, so the run goes on.

    Returns whether the run has been warned, now or before.
    """
    groups = sum(one.groups for one in trained.actors)
    if warned or not groups or sum(one.groups_without_signal for one in trained.actors) < groups:
        return warned
    print(
        f"{run}: in each of the {groups} groups of iteration {iteration} all rewards are equal: "
        "there was nothing to learn from. Are the tasks too hard or too easy, or does the verifier "
        "return the same for every answer? (said once; see the column groups_without_signal)",
        file=sys.stderr,
    )
    return True


Outcome = Literal["succeeded", "fell short", "finished", "stopped", "terminated", "failed"]


def summary(
    config: LanguageConfig,
    progress: LanguageProgress,
    evaluated: Evaluated | None,
    stopped: Stopped | None,
    scheduled: SchedulerSummary | None = None,
) -> LanguageSummary:
    """What came of a run.

    Args:
        config: of the run.
        progress: how far it came.
        evaluated: by the evaluation at the end.
        stopped: how it ended, where it did not come to its end.
        scheduled: what its scheduler did.
    """
    accuracy = evaluated.accuracy if evaluated else None
    made = LanguageSummary(
        run=config.name,
        outcome=stopped.outcome if stopped else _outcome(config, accuracy),
        seed=config.seed,
        iterations=progress.version,
        train_seconds=progress.train_seconds,
        samples=progress.samples,
        eval_accuracy_before=progress.eval_accuracy_before,
        eval_accuracy=accuracy,
        evaluation_samples=evaluated.samples if evaluated else None,
        outcomes=progress.outcomes,
        scheduler=None if scheduled is None else msgspec.structs.asdict(scheduled),
        error=stopped.error if stopped else None,
    )
    if progress.version:
        seconds = max(progress.train_seconds, 1e-9)
        made.samples_per_second = progress.samples / seconds
        made.tokens_per_second = progress.tokens / seconds
        made.staleness = Staleness(
            mean=progress.lag_mean,
            max=progress.lag_max,
            allowed=config.training.max_staleness,
        )
        made.dropped = {"second samples": progress.duplicates}
    return made


def _outcome(config: LanguageConfig, accuracy: float | None) -> Outcome:
    target = config.evaluation.target_accuracy
    if target is None:
        return "finished"
    return "succeeded" if accuracy is not None and accuracy >= target else "fell short"


def draw_curve(config: LanguageConfig, folder: RunFolder, title: str) -> None:
    """Draw the learning curve."""
    draw_learning_curve(
        folder.metrics,
        folder.learning_curve,
        title=title,
        target=config.evaluation.target_accuracy,
        curves=LANGUAGE,
    )
