"""The figures of an evaluation, each with the interval that prompts like these would leave it in.

``n`` answers to each of ``m`` prompts, ``c`` of the answers to a prompt right::

    accuracy   mean over prompts of c / n: mean@n, and pass@1
    pass@k     mean over prompts of 1 - C(n - c, k) / C(n, k): the unbiased estimate of the chance
               that one of k answers is right (Chen et al. 2021, "Evaluating Large Language Models
               Trained on Code", equation 1)
    reward     mean over the answers that were scored

What was not scored is not right. Intervals are of 95 %, over prompts: several answers to one prompt
say less than as many prompts. Of shares they are Wilson's (`wilson`), of rewards a bootstrap's
(`bootstrap`), with random numbers of its own, so the same answers have the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Self

import msgspec

HELD_OUT: Final = "held_out"
"""name of the set of held-out prompts, whose columns have no name"""
Z: Final = 1.959963984540054
"""0.975 quantile of the normal distribution"""
RESAMPLES: Final = 1000
MOST_DRAWN: Final = 2**18
"""prompts that are drawn at once"""

Rewards = Sequence[float | None]
"""rewards of the answers to a prompt; None: not scored"""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval; without one, where there is nothing to tell it from."""

    value: float
    low: float | None = None
    high: float | None = None

    def columns(self, name: str) -> dict[str, float]:
        """Return its columns in the metrics."""
        if self.low is None or self.high is None:
            return {name: self.value}
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from ``answers`` to a prompt.

    Raises:
        ValueError: ``k`` is not between 1 and the number of answers.
    """
    if not 1 <= k <= answers:
        raise ValueError(f"k is {k}, but there are {answers} answers: it must be from 1 to that")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def ks(answers: int) -> list[int]:
    """Return the k of pass@k for so many answers: powers of two from 2 on, and their number. One
    answer has none: its pass@1 is the accuracy."""
    powers = (2**power for power in range(1, answers.bit_length()))
    return sorted({*powers, *([answers] if answers > 1 else [])})


def wilson(shares: Sequence[float], answers: int = 1) -> Estimate:
    """Return the mean of shares from 0 to 1, one for each prompt, with Wilson's score interval.

    The number of trials is that of which the mean would have the variance that it has over prompts:
    ``p (1 - p) / (s**2 / m)``, at least ``m`` (prompts that are right or wrong: Wilson's interval
    as he wrote it) and at most ``m`` times ``answers``. Korn and Graubard 1998 do so for clusters.
    """
    import numpy as np  # the command line, which reads summaries, starts without it

    found = np.asarray(shares, np.float64)
    prompts, mean = len(found), float(found.mean())
    variance = float(found.var(ddof=1)) / prompts if prompts > 1 else 0.0
    trials = float(prompts)
    if variance > 0.0:
        trials = min(max(mean * (1.0 - mean) / variance, trials), trials * answers)
    square = Z * Z / trials
    middle = (mean + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(mean * (1 - mean) / trials + square / (4 * trials))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Estimate(mean, min(low, mean), max(high, mean))


def bootstrap(rewards: Sequence[Rewards]) -> Estimate | None:
    """Return the mean of all rewards, with the interval between the 2.5 and the 97.5 percentile of
    the means of `RESAMPLES` draws of as many prompts; None where nothing was scored. Of one
    prompt, which says nothing of others, there is no interval."""
    scored = [[one for one in each if one is not None] for each in rewards]
    scored = [each for each in scored if each]
    if not scored:
        return None
    if len(scored) == 1:
        return Estimate(math.fsum(scored[0]) / len(scored[0]))
    import numpy as np

    sums = np.array([math.fsum(each) for each in scored])
    counts = np.array([len(each) for each in scored], np.float64)
    random, size = np.random.default_rng(0), len(scored)
    at_once = max(1, MOST_DRAWN // size)
    means: list[float] = []
    while len(means) < RESAMPLES:
        drawn = random.integers(size, size=(min(at_once, RESAMPLES - len(means)), size))
        means += (sums[drawn].sum(1) / counts[drawn].sum(1)).tolist()
    mean = math.fsum(sums) / float(counts.sum())
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return Estimate(mean, min(low, mean), max(high, mean))


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the evaluation of one set."""

    name: str = HELD_OUT
    """name of the set"""
    version: int | None = None
    """version of the weights that drew every token of every answer; None: of a model's folder"""
    prompts: int
    samples: int
    """number of answers that were asked for"""
    unscored: int
    """number of answers that the verifier rejected or failed on"""
    why: str = ""
    """reason or error of the first of these; empty where all were scored"""
    reward: Estimate | None = None
    """mean over the answers that were scored; None where none was"""
    accuracy: Estimate | None = None
    """share of right answers among all that were asked for: what was not scored is not right. None
    where a reward is neither 0 (wrong) nor 1 (right), and where nothing was scored"""
    pass_at: dict[int, Estimate] = {}
    """pass@k, by k; none where there is no accuracy, or one answer to each prompt"""

    @classmethod
    def of(
        cls,
        rewards: Sequence[Rewards],
        *,
        name: str = HELD_OUT,
        version: int | None = None,
        why: str = "",
    ) -> Self:
        """Sum up the rewards of all answers, prompt by prompt: as many of each."""
        every = [one for each in rewards for one in each]
        scored = [one for one in every if one is not None]
        answers = len(rewards[0])
        right_or_wrong = bool(scored) and set(scored) <= {0.0, 1.0}
        right = [sum(one == 1.0 for one in each) for each in rewards] if right_or_wrong else []
        return cls(
            name=name,
            version=version,
            prompts=len(rewards),
            samples=len(every),
            unscored=len(every) - len(scored),
            why=why,
            reward=bootstrap(rewards),
            accuracy=wilson([one / answers for one in right], answers) if right else None,
            pass_at={
                k: wilson([pass_at_k(answers, one, k) for one in right], answers)
                for k in (ks(answers) if right else ())
            },
        )

    def columns(self) -> dict[str, float]:
        """Return the columns of the evaluation in the metrics: ``eval_accuracy`` of the held-out
        prompts, ``eval_NAME_accuracy`` of a set."""
        prefix = "eval_" if self.name == HELD_OUT else f"eval_{self.name}_"
        columns = {f"{prefix}unscored": float(self.unscored)}
        if self.version is not None:
            columns[f"{prefix}version"] = float(self.version)
        if self.accuracy is not None:
            columns |= self.accuracy.columns(f"{prefix}accuracy")
        if self.reward is not None:
            of_reward = self.reward.columns(f"{prefix}reward")
            columns |= (
                of_reward if self.accuracy is None else {f"{prefix}reward": self.reward.value}
            )
        for k, one in self.pass_at.items():
            columns |= one.columns(f"{prefix}pass_at_{k}")
        return columns
