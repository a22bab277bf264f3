"""What a language run reports: rows of the metrics, the top line of the live view, evaluations,
warnings, the summary, the learning curve."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from rlinf_async.messages.language import (
    EngineUse,
    Failed,
    Sample,
    Scored,
    ScoredSample,
)
from rlinf_async.observe.evaluations import HELD_OUT, Evaluated
from rlinf_async.observe.pictures import LANGUAGE, draw_learning_curve
from rlinf_async.observe.progress import figure
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary, Staleness
from rlinf_async.observe.waits import Facts, Shape, shapes_of
from rlinf_async.runtime.jobs.checkpoints import Stopped
from rlinf_async.runtime.jobs.language.config import EvaluationConfig, LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import reaches, why_unscored
from rlinf_async.runtime.jobs.language.roles import Trained
from rlinf_async.runtime.jobs.language.samples import (
    LanguageProgress,
    Replaced,
    Source,
)
from rlinf_async.runtime.jobs.view import Headline

if TYPE_CHECKING:  # a run without a scheduler does not load it
    from rlinf_async.workers.scheduler import SchedulerSummary

OF_THE_CRITIC = ("loss", "value", "value_error", "grad_norm", "lr")
"""metrics of a critic that become columns, ``critic_loss`` and so on"""

ROUNDING = 1e-5
"""mean distance of off-policy weights from 1 that engine and trainer have with the same weights"""

Groups = Sequence[Sequence[ScoredSample]]


class TrainedOn(NamedTuple):
    """All samples on which one iteration was trained."""

    samples: int
    tokens: int
    """all that was given and drawn: prompts and responses, of all branches"""
    lag_mean: float
    """versions between the weights that drew a token and those it trained, over these tokens"""
    lag_max: int
    outcomes: Counter[str]
    metrics: dict[str, float]


def summed_up(iteration: int, groups: Groups) -> TrainedOn:
    """Measure the groups of an iteration. What cannot be measured stays out of the metrics."""
    every = [one for group in groups for one in group]
    samples = [one.sample for one in every]
    drawn = [one.generated.drawn_mask for one in samples]
    responses = [int(mask.sum()) for mask in drawn]
    prompts = [one.tokens - len(one.generated.token_ids) for one in samples]
    pairs = [(one.generated, mask) for one, mask in zip(samples, drawn, strict=True)]
    lags = [iteration - one.version[mask] for one, mask in pairs]
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
        "behaviour_log_prob": sum(float(one.log_prob[mask].sum()) for one, mask in pairs) / made,
        "unscored": float(len(every) - len(judged)),
    }
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
        metrics |= _parts([outcome.parts for outcome in judged])
    return TrainedOn(
        samples=len(every),
        tokens=sum(one.tokens for one in samples),
        lag_mean=sum(float(lag.sum()) for lag in lags) / made,
        lag_max=max((int(lag.max()) for lag in lags if lag.size), default=0),
        outcomes=Counter(type(one.outcome).__name__.lower() for one in every),
        metrics=metrics
        | _of_judges(every)
        | _of_caches(samples)
        | _of_teachers(samples)
        | _of_episodes(samples),
    )


def _of_judges(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Sums of the calls of verifiers and of what they cost; none of calls where each is one call of
    a function, and none of cost where nothing cost anything."""
    uses = [one.judge for one in samples if one.judge is not None]
    cost = sum(one.outcome.cost for one in samples if isinstance(one.outcome, Scored))
    columns = {"judge_cost": cost} if cost else {}
    if uses:
        columns["judge_calls"] = float(sum(one.calls for one in uses))
        columns["judge_retries"] = float(sum(one.retries for one in uses))
        columns["judge_cache_hits"] = float(sum(one.cache_hits for one in uses))
    return columns


def _of_caches(samples: Sequence[Sample]) -> dict[str, float]:
    """The column of prefix caches: none where engines do not tell."""
    answers = EngineUse()
    for one in samples:
        answers.add(one, before=-1)
    uses = [answers, *(one.episode.engines for one in samples if one.episode is not None)]
    read = sum(one.read_tokens for one in uses)
    return {"prefix_cache_hits": sum(one.cached_tokens for one in uses) / read} if read else {}


def _of_teachers(samples: Sequence[Sample]) -> dict[str, float]:
    """The column of the versions that are teachers: none where the teacher is another model."""
    found = [one.teacher.version for one in samples if one.teacher and one.teacher.version >= 0]
    return {"teacher_version": sum(found) / len(found)} if found else {}


def _of_episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """Columns of what happened in episodes; none where there are none.

    Means of an episode, but for ``tool_seconds_NAME``, the mean of a call, and for the agent's own
    numbers, which are means of the episodes that have them.
    """
    records = [one.episode for one in samples if one.episode is not None]
    if not records:
        return {}
    calls = _summed(one.tool_calls for one in records)
    failures = _summed(one.tool_failures for one in records)
    cut = Counter(one.cut for one in records if one.cut)
    having = Counter(name for one in records for name in one.metrics)
    totals = {
        "given_tokens": sum(int((~one.generated.drawn_mask).sum()) for one in samples),
        "turns": sum(one.turns for one in records),
        "branches": sum(1 + len(one.branches) for one in samples),
        "rendered_anew": sum(one.rendered_anew for one in records),
        "tool_calls": sum(calls.values()),
        "tool_failures": sum(failures.values()),
        "episodes_cut": cut.total(),
        **{f"tool_calls_{name}": count for name, count in sorted(calls.items())},
        **{f"tool_failures_{kind.replace('/', '_')}": n for kind, n in sorted(failures.items())},
        **{f"episodes_cut_{limit}": count for limit, count in sorted(cut.items())},
    }
    seconds = _summed(one.tool_seconds for one in records)
    own = _summed(one.metrics for one in records)
    return {
        **{name: total / len(records) for name, total in totals.items()},
        **_of_engines([one.engines for one in records]),
        **{f"tool_seconds_{name}": seconds.get(name, 0.0) / calls[name] for name in sorted(calls)},
        **{f"episode_{name}": total / having[name] for name, total in sorted(own.items())},
    }


def _of_engines(uses: Sequence[EngineUse]) -> dict[str, float]:
    """Columns of what engines did for episodes."""
    seconds = sum(one.seconds for one in uses)
    columns = {"turns_moved": sum(one.moved for one in uses) / len(uses)}
    if seconds:
        columns["idle_for_tools"] = sum(one.idle_seconds for one in uses) / seconds
    return columns


def _summed(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, number in (item for table in tables for item in table.items()):
        totals[name] = totals.get(name, 0.0) + number
    return totals


def _parts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each part of the reward over the scored samples; one that does not name a part
    has 0 of it, so that a verifier that names a part only where it is earned raises no mean."""
    names = sorted({name for one in parts for name in one})
    return {
        f"reward_{name}": sum(one.get(name, 0.0) for one in parts) / len(parts) for name in names
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


class LanguageFacts:
    """What a run says of the iterations of a record of its waits.

    Args:
        config: the run's configuration.
    """

    def __init__(self, config: LanguageConfig) -> None:
        training, actor = config.training, config.actor
        parts = 1
        if actor.pipelined:
            micro = (actor.micro_batch_size or 0) * config.data_ranks
            parts = max(actor.global_batches, config.iteration_samples // micro if micro else 1)
        self._plain = Facts(
            kind="language",
            samples=config.iteration_samples,
            group_size=training.group_size,
            max_staleness=training.max_staleness,
            units=parts,
            inferred=config.needs_inference,
        )
        self._source: Source | None = None
        self._held = self._apart = 0.0
        self._shapes: list[Shape] = []

    def begin(self, source: Source) -> None:
        """Iterations begin."""
        self._source, self._held = source, source.held_seconds

    def trained(self, groups: Sequence[Sequence[ScoredSample]]) -> None:
        """Note the samples of an iteration."""
        self._shapes = shapes_of(shape_of(one.sample) for group in groups for one in group)

    def apart(self, seconds: float) -> None:
        """Note seconds that belong to no iteration."""
        self._apart += seconds

    def take(self) -> Facts:
        """What was trained since the last time."""
        held = 0.0 if self._source is None else self._source.held_seconds
        found = msgspec.structs.replace(
            self._plain,
            shapes=self._shapes,
            held_seconds=round(held - self._held, 6),
            apart_seconds=round(self._apart, 6),
        )
        self._held, self._apart = held, 0.0
        return found


def shape_of(sample: Sample) -> Shape:
    """What a sample asked of the workers."""
    episode = sample.episode
    if episode is None:
        return Shape(sample.generated.drawn_tokens)
    seconds = sum(episode.tool_seconds.values())
    return Shape(sample.generated.drawn_tokens, max(1, episode.turns), round(seconds, 6))


def row(
    progress: LanguageProgress,
    iteration: int,
    seen: TrainedOn,
    trained: Trained,
    *,
    masks: bool = False,
) -> dict[str, float]:
    """One row of the metrics. What a trainer reports is of the whole batch, equal on all ranks.

    ``masks``: whether the loss leaves out samples.
    """
    reports = trained.actors
    groups = sum(report.groups for report in reports)
    learnt = dict(reports[0].metrics)
    if "tokens" in learnt:  # of this iteration; the column tokens counts those of the whole run
        learnt["trained_tokens"] = learnt.pop("tokens")
    if trained.critics:
        values = trained.critics[0].metrics
        learnt |= {f"critic_{name}": values[name] for name in OF_THE_CRITIC if name in values}
    if masks:
        samples = sum(report.samples for report in reports)
        learnt["off_policy_left_out"] = sum(one.left_out for one in reports) / samples
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


def drawn(groups: Groups, replaced: Replaced) -> dict[str, float]:
    """Columns about all groups of an iteration that were generated, those that were replaced
    included: the reward of the others alone is that of a choice."""
    outcomes = [one.outcome for group in groups for one in group]
    rewards = [one.reward for one in outcomes if isinstance(one, Scored)]
    scored = len(rewards) + replaced.scored
    columns = {"groups_refused": float(replaced.groups)}
    if scored:
        columns["reward_drawn"] = (sum(rewards) + replaced.reward) / scored
    return columns


def evaluation_row(progress: LanguageProgress, found: Sequence[Evaluated]) -> dict[str, float]:
    """The row of the metrics about an evaluation."""
    row = {"samples": float(progress.samples), "train_seconds": progress.train_seconds}
    for one in found:
        row |= one.columns()
    return row


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


class NothingScored(RuntimeError):
    """No sample of an iteration was scored, and some failed in their verifier, or none has ever
    been scored; the message has the first error."""


def warn_of_failures(
    run: str, iteration: int, groups: Groups, *, before: Mapping[str, int], agent: str = ""
) -> None:
    """Warn of the first samples that were not scored.

    Args:
        run: name of the run.
        iteration: iteration that was trained.
        groups: groups of that iteration.
        before: numbers of earlier samples of this run, by their outcome.
        agent: setting ``episode.run``; empty: samples are no episodes.

    Raises:
        NothingScored: none was, because of errors or in the whole run: going on would train on
            nothing.
    """
    outcomes = [one.outcome for group in groups for one in group]
    failed = [one for one in outcomes if isinstance(one, Failed)]
    unscored = [one for one in outcomes if not isinstance(one, Scored)]
    first = why_unscored((failed or unscored)[0]) if unscored else ""
    if len(unscored) == len(outcomes) and (failed or not before.get("scored")):
        suspects = "the verifier (or reward.time_limit) or the references"
        if agent:
            suspects = f"the agent (episode.run = {agent!r}) or what it needs, {suspects}"
        raise NothingScored(
            f"none of the {len(outcomes)} samples of iteration {iteration} was scored, the first "
            f"with: {first}. There is nothing to learn from: correct {suspects}, and go on with "
            "--resume"
        )
    if unscored and not any(count for what, count in before.items() if what != "scored"):
        print(
            f"{run}: {len(unscored)} of {len(outcomes)} samples of iteration {iteration} were not "
            f"scored and train nothing, the first with: {first} (said once; the summary counts "
            "them)",
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
        f"{run}: in each of the {groups} groups of iteration {iteration} all rewards are equal, or "
        "there are none: "
        "there was nothing to learn from. Are the tasks too hard or too easy, or does the verifier "
        "return the same for every answer? (said once; see the column groups_without_signal)",
        file=sys.stderr,
    )
    return True


def warn_of_no_correction(run: str, last: Mapping[str, float], *, warned: bool) -> bool:
    """Warn of the first iteration in which ``off_policy`` changed nothing for stale samples.

    Args:
        run: name of the run.
        last: row of the metrics of the iteration.
        warned: this run has been warned already.

    Returns whether the run has been warned, now or before.
    """
    change = last.get("off_policy_change")
    if warned or change is None or change > ROUNDING or not last["staleness_max"]:
        return warned
    print(
        f"{run}: iteration {last['iteration']:.0f} was trained on samples of up to "
        f"{last['staleness_max']:.0f} versions ago, but actor.loss.off_policy weighted each token "
        "by 1: these versions have the same log-probs. Was there nothing to learn from in between, "
        "or is the learning rate too small for the precision of the weights? (said once; see the "
        "column off_policy_change)",
        file=sys.stderr,
    )
    return True


Ending = Literal["succeeded", "fell short", "finished", "stopped", "terminated", "failed"]


def summary(
    config: LanguageConfig,
    progress: LanguageProgress,
    evaluated: Sequence[Evaluated],
    stopped: Stopped | None,
    scheduled: SchedulerSummary | None,
    left_out: dict[str, int],
) -> LanguageSummary:
    """Return the summary of a run.

    Args:
        config: the run's configuration.
        progress: how far it came.
        evaluated: results of the evaluation at the end.
        stopped: how it ended, where it did not come to its end.
        scheduled: what its scheduler did.
        left_out: numbers of prompts, by the reason.
    """
    held_out = next((one for one in evaluated if one.name == HELD_OUT), None)
    made = LanguageSummary(
        run=config.name,
        outcome=stopped.outcome if stopped else _outcome(config.evaluation, held_out),
        seed=config.seed,
        iterations=progress.version,
        train_seconds=progress.train_seconds,
        samples=progress.samples,
        eval_accuracy_before=progress.eval_accuracy_before,
        eval_accuracy=held_out.accuracy.value if held_out and held_out.accuracy else None,
        eval_reward_before=progress.eval_reward_before,
        eval_reward=held_out.reward.value if held_out and held_out.reward else None,
        evaluation_samples=held_out.samples if held_out else None,
        evaluation_unscored=held_out.unscored if held_out else None,
        evaluations={one.name: one for one in evaluated},
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
        made.dropped = {"second samples": progress.duplicates, **left_out}
    return made


def _outcome(targets: EvaluationConfig, found: Evaluated | None) -> Ending:
    if not targets.has_target:
        return "finished"
    return "succeeded" if found is not None and reaches(found, targets) else "fell short"


def draw_curve(config: LanguageConfig, folder: RunFolder, title: str) -> None:
    """Draw the learning curve."""
    draw_learning_curve(
        folder.metrics,
        folder.learning_curve,
        title=title,
        target=config.evaluation.target_accuracy,
        curves=LANGUAGE,
    )
