"""Evaluations of a language run: prompts that are answered and scored, and not trained on.

::

    held-out prompts, [evaluation.sets] --Request--> rollout, reward, as of any sample
    --ScoredSample--> `Collector.expect` --> `Evaluated`, one of each set

    actors    train iteration v         | publish v + 1  train ...
    rollout   samples, evaluation of v  | samples, ...           waits for the slower of the two

Invariant, **one version**: every token of every answer is of the version that the evaluation is of.
No other weights are published before it is complete; what the tokens themselves say is compared.

An evaluation in between goes on `Beside` the training of the next iteration, on the rollout
workers, which the samples of that iteration go before. Where actors need the devices of rollout
workers, they get them once both are done.

The random numbers of an answer follow from the seed, the set, the prompt's place in its data and
the number of the answer: the same in every evaluation, and whatever else is evaluated.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rlinf_async.channels import Sender
from rlinf_async.messages.language import (
    Failed,
    Outcome,
    Prompt,
    Rejected,
    Request,
    Sampling,
    Scored,
    ScoredSample,
)
from rlinf_async.observe.evaluations import HELD_OUT, Evaluated
from rlinf_async.runtime.jobs.language.config import EvaluationConfig
from rlinf_async.runtime.jobs.language.samples import Collector
from rlinf_async.runtime.signals import run_signals


class EvaluationSet(NamedTuple):
    """Prompts to evaluate on."""

    name: str
    prompts: Sequence[Prompt]
    sampling: Sampling
    answers: int = 1
    """answers to each prompt"""

    @property
    def samples(self) -> int:
        """Number of all answers."""
        return len(self.prompts) * self.answers


def verifiers_of(sets: Sequence[EvaluationSet]) -> tuple[str, ...]:
    """Return the names of the verifiers of sets that are not the run's own data."""
    named = (one for one in sets if one.name != HELD_OUT)
    return tuple(sorted({prompt.verifier for one in named for prompt in one.prompts}))


class Beside:
    """An evaluation that goes on beside the training; at most one at a time."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Sequence[Evaluated]] | None = None
        """the one that was begun; None: there is none"""
        self.waited = 0.0
        """seconds for which somebody has waited for it"""

    def begin(self, evaluation: Coroutine[Any, Any, Sequence[Evaluated]]) -> None:
        """Let an evaluation run."""
        self.task, self.waited = asyncio.create_task(evaluation, name="evaluation"), 0.0

    async def done(self) -> Sequence[Evaluated]:
        """Wait for the results; none where no evaluation runs, or a SIGTERM gives it up.

        Raises what the evaluation raises.
        """
        task = self.task
        if task is None:
            return ()
        if not task.done():
            clock = asyncio.get_running_loop().time
            since = clock()
            if await run_signals().unless_terminating(_ended(task)) is None:
                self.forget()
                return ()
            self.waited += clock() - since
        return task.result()

    def forget(self) -> None:
        """Give it up, if it is not complete."""
        task, self.task = self.task, None
        if task is not None and not task.cancel() and not task.cancelled():
            task.exception()  # whoever is left with it has an error of its own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


async def _ended(task: asyncio.Task[Sequence[Evaluated]]) -> bool:
    await task
    return True


class MixedVersions(RuntimeError):
    """Answers of an evaluation were drawn by other weights than those that it is of."""


def asked(sets: Sequence[EvaluationSet], version: int, seed: int) -> list[Request]:
    """Return the requests of an evaluation of this version, set by set, prompt by prompt."""
    numbered = ((one, prompt) for one in sets for prompt in one.prompts)
    return [
        Request(
            group=-1 - number,  # never that of a sample to train on
            index=version * one.answers + answer,
            group_size=one.answers,
            iteration=version,
            min_version=version,
            prompt=prompt,
            sampling=one.sampling,
            seed=_seed(seed, one.name, prompt.index, answer),
            priority=version,  # as samples of the iteration that is trained beside
            evaluation=True,
            evaluation_set="" if one.name == HELD_OUT else one.name,
        )
        for number, (one, prompt) in enumerate(numbered)
        for answer in range(one.answers)
    ]


def _seed(seed: int, name: str, place: int, answer: int) -> int:
    parts = (seed, zlib.crc32(name.encode()), place, answer)
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


async def evaluate(
    sets: Sequence[EvaluationSet],
    *,
    version: int,
    seed: int,
    requests: Sender[Request],
    collector: Collector,
    on_answer: Callable[[int, int], object],
    on_answers: Callable[[Sequence[ScoredSample]], None] = lambda _: None,
) -> list[Evaluated]:
    """Have every prompt answered by this version of the weights, and the answers scored.

    Nothing where there is no set. ``on_answer`` is called with the number of the answers that are
    there, and of all; ``on_answers`` with all of them.

    Raises:
        MixedVersions: an answer has tokens of other weights.
    """
    if not sets:
        return []
    wanted = asked(sets, version, seed)
    on_answer(0, len(wanted))
    expected = collector.expect(wanted)
    count = itertools.count(1)
    for one in expected:
        one.add_done_callback(lambda _: on_answer(next(count), len(expected)))
    for request in wanted:
        await requests.put(request)
    answers = await asyncio.gather(*expected)
    _check_versions(answers, version)
    on_answers(answers)
    left = iter(answers)
    return [_evaluated(one, list(itertools.islice(left, one.samples)), version) for one in sets]


def _check_versions(answers: Sequence[ScoredSample], version: int) -> None:
    for one in answers:
        generated = one.sample.generated
        drawn = set(generated.version[generated.drawn_mask].tolist())
        if drawn - {version}:
            raise MixedVersions(
                f"answer {one.sample.request.name} of the evaluation of version {version} has "
                f"tokens of the versions {sorted(drawn)}"
            )


def _evaluated(one: EvaluationSet, answers: Sequence[ScoredSample], version: int) -> Evaluated:
    outcomes = [answer.outcome for answer in answers]
    return summed_up(outcomes, one.answers, name=one.name, version=version)


def summed_up(
    outcomes: Sequence[Outcome],
    answers: int = 1,
    *,
    name: str = HELD_OUT,
    version: int | None = None,
) -> Evaluated:
    """Sum up the outcomes of all answers, so many to each prompt, prompt by prompt."""
    rewards = [one.reward if isinstance(one, Scored) else None for one in outcomes]
    return Evaluated.of(
        [rewards[at : at + answers] for at in range(0, len(rewards), answers)],
        name=name,
        version=version,
        why=next((why_unscored(one) for one in outcomes if not isinstance(one, Scored)), ""),
    )


def why_unscored(outcome: Rejected | Failed) -> str:
    """The reason or the error."""
    if isinstance(outcome, Rejected):
        return f"rejected: {outcome.reason}"
    return outcome.error


def reaches(found: Evaluated, targets: EvaluationConfig) -> bool:
    """Whether every target is reached. A mean reward that some answers are not in reaches none."""
    right, wanted = found.accuracy, targets.target_accuracy
    if wanted is not None and (right is None or right.value < wanted):
        return False
    mean, wanted = found.reward, targets.target_reward
    return wanted is None or (mean is not None and not found.unscored and mean.value >= wanted)


def warn_of_evaluation(
    run: str, found: Sequence[Evaluated], targets: EvaluationConfig, *, warned: bool
) -> bool:
    """Warn of the first evaluation whose figures cannot be taken for what they seem to be.

    Returns whether the run has been warned, now or before.
    """
    said = []
    for one in found:
        of = "" if one.name == HELD_OUT else f"{one.name}: "
        if one.unscored:
            said.append(
                f"{of}{one.unscored} of {one.samples} answers were not scored: they count as not "
                f"right, and are in no mean reward, the first with: {one.why}"
            )
        no_accuracy = one.reward is not None and one.accuracy is None
        if targets.target_accuracy is not None and one.name == HELD_OUT and no_accuracy:
            said.append(
                "rewards are not only 0 (wrong) and 1 (right): there is no accuracy, so that "
                "evaluation.target_accuracy cannot be reached; set evaluation.target_reward instead"
            )
    if said and not warned:
        print(
            f"{run}: evaluation of version {found[0].version}: {'; '.join(said)} (said once; see "
            "the columns eval_unscored, eval_reward, eval_accuracy)",
            file=sys.stderr,
        )
    return warned or bool(said)
