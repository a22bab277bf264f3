"""The result of a run: ``summary.json``, and the last line that a run prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from rlinf_async.observe.evaluations import HELD_OUT, Evaluated
from rlinf_async.observe.files import RunFolderError, atomic_write, explaining
from rlinf_async.observe.run_folder import RunFolder

Detail = str | int | float | bool | None


class Staleness(msgspec.Struct, kw_only=True, frozen=True):
    """Weight versions between the policy that made a trained sample and the one that it trained."""

    mean: float
    max: int
    allowed: int


class Summary(msgspec.Struct, kw_only=True, rename={"return_": "return"}):
    """The result of a run of any kind. A number that was not measured is None (``null``), never 0.

    Each job has a subclass with its own measures.
    """

    run: str
    outcome: Literal["succeeded", "fell short", "finished", "stopped", "terminated", "failed"]
    """``succeeded`` and ``fell short`` where the run had a target, ``finished`` where not;
    ``stopped`` by Ctrl-C, ``terminated`` by SIGTERM."""
    seed: int
    iterations: int
    train_seconds: float
    """Training alone: without start, evaluation and what is written at the end."""
    staleness: Staleness | None = None
    restarts: dict[str, int] = {}
    """Restarts by worker, over all starts of the run."""
    replaced: dict[str, int] = {}
    """Swaps by worker, in the last start of the run: see ``swaps.json``."""
    dropped: dict[str, int] = {}
    """Number of items left out, by kind: stale answers, second trajectories, spans."""
    bottleneck: str | None = None
    """Who limited the run, and what would help, in a sentence; None where it has no records."""
    error: str | None = None
    """The first cause, where the run failed."""
    reached: str | None = None
    """The target at which training has ended (``training.stop_at``), with its value; None where it
    was not reached, or there is none."""
    extra: dict[str, Detail] = {}

    def figures(self) -> list[str]:
        """The figures in the last line of the run."""
        early = [f"ended early ({self.reached})"] if self.reached else []
        return [*early, f"{self.train_seconds:.1f} s of training"]


class EmbodiedSummary(Summary, kw_only=True):
    """The result of a run in environments."""

    env_steps: int
    steps_per_second: float | None = None
    success_rate: float | None = None
    """Success rate of the evaluation at the end, 0 to 1."""
    success_unreported: int | None = None
    """Episodes of that evaluation of which the environment did not say whether they succeeded: they
    count as not. None where it never says."""
    success_rate_in_training: float | None = None
    """Success rate in the environment that the policy was trained in, where the evaluation was in
    another one (``evaluation.env``)."""
    return_in_training: float | None = None
    """Mean episode return in it."""
    success_rate_before: float | None = None
    """Success rate of the evaluation before the first iteration, where one is configured."""
    return_before: float | None = None
    """Mean episode return of that evaluation."""
    return_: float | None = None
    """Mean episode return of the evaluation at the end."""
    evaluation_episodes: int | None = None
    evaluation_failed: int = 0
    """Episodes of that evaluation that ended with the process of their environment: they have not
    succeeded, and are not in the mean return."""
    failed_episodes: int = 0
    """Episodes of the whole run that ended with the process of their environment."""

    def figures(self) -> list[str]:
        parts = []
        if self.success_rate is not None:
            parts.append(_with_before("success rate", self.success_rate, self.success_rate_before))
        if self.success_unreported:
            silent, of = self.success_unreported, self.evaluation_episodes
            parts.append(f"{silent} of {of} episodes did not say")
        if self.return_ is not None and math.isfinite(self.return_):
            before = self.return_before if self.success_rate is None else None
            parts.append(_with_before("return", self.return_, before))
        if self.return_in_training is not None and math.isfinite(self.return_in_training):
            rate = self.success_rate_in_training
            there = "" if rate is None else f"success rate {rate:.2f}, "
            said = f"{there}return {self.return_in_training:.2f}"
            parts.append(f"in the environment of the training {said}")
        parts += [*Summary.figures(self), f"{self.env_steps:,} steps"]
        if self.failed_episodes:
            parts.append(f"{self.failed_episodes:,} episodes failed")
        if self.steps_per_second is not None:
            parts.append(f"{self.steps_per_second:,.0f} steps/s")
        return parts


class LanguageSummary(Summary, kw_only=True):
    """The result of a run of a language model."""

    samples: int
    """number of trained samples"""
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    """prompt and response tokens of the trained samples per second"""
    eval_accuracy_before: float | None = None
    """Share of correct greedy answers to the held-out tasks before the first iteration; None where
    a reward is neither 0 (wrong) nor 1 (right). What was not scored is not right."""
    eval_accuracy: float | None = None
    """Share of correct greedy answers to the held-out tasks of the trained model."""
    eval_reward_before: float | None = None
    """Mean reward of the scored greedy answers before the first iteration."""
    eval_reward: float | None = None
    """Mean reward of the scored greedy answers of the trained model."""
    evaluation_samples: int | None = None
    """Held-out tasks that were answered in the evaluation at the end."""
    evaluation_unscored: int | None = None
    """Number of evaluated answers that the verifier rejected or failed on."""
    evaluations: dict[str, Evaluated] = {}
    """Results of the evaluation at the end, by name of the set, with their intervals."""
    outcomes: dict[str, int] = {}
    """number of trained samples that were scored, rejected, failed"""
    scheduler: dict[str, int | str] | None = None
    """What the scheduler did: boundaries at which it decided, strategies that came into force,
    ..., why its policy is not asked any more; None where there was none"""

    def figures(self) -> list[str]:
        parts = []
        if self.eval_accuracy is not None:
            parts.append(_with_before("accuracy", self.eval_accuracy, self.eval_accuracy_before))
        elif self.eval_reward is not None:
            parts.append(_with_before("mean reward", self.eval_reward, self.eval_reward_before))
        if self.evaluation_unscored:
            parts.append(f"{self.evaluation_unscored} of {self.evaluation_samples} not scored")
        for name, one in self.evaluations.items():
            if name != HELD_OUT and (found := one.accuracy or one.reward) is not None:
                parts.append(f"{name} {found.value:.2f}")
        parts += [*Summary.figures(self), f"{self.samples:,} samples"]
        if unscored := sum(self.outcomes.values()) - self.outcomes.get("scored", 0):
            parts.append(f"{unscored:,} of them not scored")
        if self.samples_per_second is not None:
            parts.append(f"{self.samples_per_second:,.0f} samples/s")
        return parts


class SupervisedSummary(Summary, kw_only=True):
    """The result of a run that learns from examples."""

    examples: int
    """number of records that were learnt from, over epochs"""
    tokens: int
    """number of tokens of prompts and answers"""
    tokens_per_second: float | None = None
    loss: float | None = None
    """loss of the last step"""
    eval_loss_before: float | None = None
    """Loss of the held-out records before the first step."""
    eval_loss: float | None = None
    """Loss of the held-out records after the last step."""
    eval_reward_accuracy: float | None = None
    """Share of the held-out pairs of which the chosen answer has the higher implicit reward."""
    evaluation_examples: int | None = None

    def figures(self) -> list[str]:
        parts = []
        if self.eval_loss is not None:
            parts.append(_with_before("held-out loss", self.eval_loss, self.eval_loss_before))
        elif self.loss is not None:
            parts.append(f"loss {self.loss:.2f}")
        if self.eval_reward_accuracy is not None:
            parts.append(f"accuracy of the reward {self.eval_reward_accuracy:.2f}")
        parts += [*Summary.figures(self), f"{self.examples:,} examples"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return parts


class WorldModelSummary(Summary, kw_only=True):
    """The result of a run that learns a model of an environment."""

    updates: int
    """number of optimizer steps"""
    loss: float | None = None
    """mean loss of the last iteration"""
    held_out: int | None = None
    """episodes in which model and reality were compared"""
    measured: dict[str, float] = {}
    """how far they are apart, by name: the columns ``eval_...`` of the metrics"""

    def figures(self) -> list[str]:
        parts = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        if self.measured:
            model, real = self.measured["return_model"], self.measured["return_real"]
            parts.append(f"return {model:.2f} in the model, {real:.2f} in reality")
        return [*parts, *Summary.figures(self), f"{self.updates:,} updates"]


def _with_before(name: str, now: float, before: float | None) -> str:
    return f"{name} {now:.2f}" + ("" if before is None else f" (before: {before:.2f})")


AnySummary = TypeVar("AnySummary", bound=Summary)


def write_summary(path: Path, summary: Summary) -> None:
    """Write ``summary.json``; what is not a finite number is written as null.

    Raises:
        RunFolderError: the file could not be written.
    """
    atomic_write(path, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def read_summary(path: Path, kind: type[AnySummary]) -> AnySummary:
    """Read the ``summary.json`` of a job whose summary is of this ``kind``.

    Raises:
        RunFolderError: the file cannot be read, or is not a summary.
    """
    with explaining("read", path):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise RunFolderError(f"{path} is not the summary of a run: {error}") from error


def last_line(folder: RunFolder, summary: Summary) -> str:
    """The result of the run and the files that it left, in one line."""
    left = (
        folder.summary,
        folder.metrics,
        folder.workers_log,
        folder.learning_curve,
        folder.video,
        folder.trace,
        folder.timeline,
        folder.checkpoints,
        folder.trained,
    )
    names = [path.name + "/" * path.is_dir() for path in left if _holds_something(path)]
    what = ", ".join(names) or "nothing was written"
    figures = ", ".join(summary.figures())
    return f"{summary.run} {summary.outcome}: {figures} -> {folder.path} ({what})"


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file()
