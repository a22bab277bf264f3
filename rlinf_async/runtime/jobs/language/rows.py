"""What a language run shows of itself: rows of the metrics, the headline of the live view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlinf_async.messages.language import Scored, ScoredSample
from rlinf_async.observe.progress import figure
from rlinf_async.runtime.jobs.language.learners import Trained
from rlinf_async.runtime.jobs.language.reached import Reached
from rlinf_async.runtime.jobs.live import Headline

OF_THE_CRITIC = ("loss", "value", "value_error", "grad_norm", "lr")
"""what a critic reports that becomes a column, ``critic_loss`` and so on"""

Groups = Sequence[Sequence[ScoredSample]]


class Iteration(NamedTuple):
    """What one iteration was trained on, seen over all of its samples."""

    samples: int
    tokens: int
    """prompts and responses"""
    lag_mean: float
    """versions between the weights that made a token and those it trained, over response tokens"""
    lag_max: int
    outcomes: Counter[str]
    metrics: dict[str, float]


def look(iteration: int, groups: Groups) -> Iteration:
    """Look at the groups of an iteration. What cannot be measured stays out of the metrics."""
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
        "prompt_tokens": sum(prompts) / len(every),
        "cut_off": ended["length"] / len(every),
        "behaviour_log_prob": sum(float(one.sample.generated.log_prob.sum()) for one in every)
        / made,
        "unscored": float(len(every) - len(judged)),
    }
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
        metrics |= _parts([outcome.parts for outcome in judged])
    return Iteration(
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


def book(reached: Reached, iteration: Iteration, version: int, seconds: float) -> None:
    """Add one iteration to what was reached."""
    reached.version = version
    reached.samples += iteration.samples
    reached.tokens += iteration.tokens
    reached.train_seconds = seconds
    reached.lag_sum += iteration.lag_mean
    reached.lag_max = max(reached.lag_max, iteration.lag_max)
    reached.outcomes = dict(Counter(reached.outcomes) + iteration.outcomes)


def row(reached: Reached, iteration: int, seen: Iteration, trained: Trained) -> dict[str, float]:
    """One row of the metrics. What a trainer reports is of the whole batch, equal on all ranks."""
    reports = trained.actors
    groups = sum(report.groups for report in reports)
    learnt = dict(reports[0].metrics)
    if "tokens" in learnt:  # of this iteration; the column of that name counts all, over the run
        learnt["trained_tokens"] = learnt.pop("tokens")
    if trained.critics:
        values = trained.critics[0].metrics
        learnt |= {f"critic_{name}": values[name] for name in OF_THE_CRITIC if name in values}
    return {
        "iteration": float(iteration),
        "version": float(reached.version),
        "samples": float(reached.samples),
        "tokens": float(reached.tokens),
        "train_seconds": reached.train_seconds,
        "samples_per_second": reached.samples / max(reached.train_seconds, 1e-9),
        "staleness_mean": seen.lag_mean,
        "staleness_max": float(seen.lag_max),
        "groups_without_signal": sum(one.groups_without_signal for one in reports) / groups,
        "wait_seconds": max(report.wait_seconds for report in reports),
        "step_seconds": max(report.train_seconds for report in reports),
        **seen.metrics,
        **learnt,
    }


def evaluation_row(reached: Reached, accuracy: float) -> dict[str, float]:
    """A row of the metrics that tells of an evaluation."""
    return {
        "samples": float(reached.samples),
        "train_seconds": reached.train_seconds,
        "eval_accuracy": accuracy,
    }


def headline(
    run: str, iterations: int, reached: Reached, last: dict[str, float] | None
) -> Headline:
    """What stands on top of the live view."""
    last = last or {}
    rate = reached.samples / max(reached.train_seconds, 1e-9) if reached.version else None
    figures = (
        ("samples", f"{reached.samples:,}"),
        ("samples/s", figure(rate, ",.0f")),
        ("seconds", f"{reached.train_seconds:.0f}"),
        ("reward", figure(last.get("reward"), ".2f")),
        ("tokens", figure(last.get("response_tokens"), ".1f")),
        ("staleness", figure(last.get("staleness_mean"), ".1f")),
    )
    return Headline(run, reached.version, iterations, figures)
