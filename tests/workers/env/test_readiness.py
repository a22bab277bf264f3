"""How long those that are ready wait: the bounds that `readiness` states, in virtual time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from rlinf_async.workers.env.evaluation import ANSWERS, Readiness

ANSWER = 0.001
"""seconds"""
Steps = list[list[float]]
"""of each environment, the seconds of its steps"""


class Told(NamedTuple):
    """What happened in one run of a rule."""

    batches: list[list[int]]
    waits: list[list[float]]
    """of each batch: how long its environments were ready before they were answered"""
    ends: list[float]
    """when each environment had taken its steps"""


def told(rule: Readiness, steps: Steps, answer: float = ANSWER) -> Told:
    """Run the rule: environments step, those that are ready are answered, until all are done."""
    for _ in range(ANSWERS):
        rule.answered(answer)
    left = [list(each) for each in steps]
    under_way = {env: each.pop(0) for env, each in enumerate(left)}
    now, ready, ends = 0.0, dict[int, float](), [0.0] * len(steps)
    batches: list[list[int]] = []
    waits: list[list[float]] = []
    while under_way or ready:
        until = rule.wait_until([*ready.values()], len(under_way))
        first = min(under_way.values(), default=math.inf)
        if first > max(until, now):  # those that are ready by now are taken in any case
            now = max(now, until)
            batches.append([*ready])
            waits.append([now - at for at in ready.values()])
            now += answer
            for env in ready:
                if left[env]:
                    under_way[env] = now + left[env].pop(0)
                else:
                    ends[env] = now
            ready = {}
            continue
        now = max(now, first)
        ready |= {env: at for env, at in under_way.items() if at <= now}
        under_way = {env: at for env, at in under_way.items() if at > now}
    return Told(batches, waits, ends)


def random_steps(seed: int) -> Steps:
    """Steps of random environments: equal ones, slow ones, and such that are slow now and then."""
    random = np.random.default_rng(seed)
    envs, length = int(random.integers(1, 12)), int(random.integers(1, 30))
    typical = ANSWER * random.choice([0.01, 0.3, 1.0, 10.0], envs if seed % 2 else 1)
    steps = typical * random.lognormal(0.0, random.choice([0.0, 0.1, 1.0]), (length, envs))
    steps[random.random(steps.shape) < 0.1] *= random.choice([1.0, 50.0])
    return [[float(each) for each in row] for row in steps.T]


@pytest.mark.parametrize("seed", range(100))
def test_adaptive_waits_on_average_no_longer_than_an_answer_takes(seed: int) -> None:
    steps = random_steps(seed)
    run = told(Readiness("adaptive"), steps)
    harmonic = sum(1.0 / count for count in range(1, len(steps) + 1))
    for waits in run.waits:
        assert np.mean(waits) <= ANSWER * (1 + 1e-6)
        assert max(waits) <= ANSWER * harmonic * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(100))
def test_no_rule_takes_less_than_half_of_the_time_of_adaptive(seed: int) -> None:
    steps = random_steps(seed)
    adaptive = sum(told(Readiness("adaptive"), steps).ends)
    for ready in range(1, len(steps) + 1):
        other = sum(told(Readiness(ready), steps).ends)
        assert adaptive <= 2 * other * (1 + 1e-6)


def test_where_steps_are_equal_adaptive_is_lock_step() -> None:
    steps = [[0.004] * 20 for _ in range(8)]
    assert told(Readiness("adaptive"), steps) == told(Readiness(8), steps)


def test_a_slow_environment_holds_up_no_other() -> None:
    fast: Steps = [[0.002] * 100 for _ in range(7)]
    adaptive = told(Readiness("adaptive"), [*fast, [0.5]])
    assert max(adaptive.ends[:7]) <= 100 * (0.002 + 2 * ANSWER) * (1 + 1e-6)
    lock_step = told(Readiness(8), [*fast, [0.5]])
    assert min(lock_step.ends) > 0.5


@pytest.mark.parametrize("ready", [1, 3, 5])
def test_a_count_is_waited_for_and_those_that_are_ready_then_are_taken(ready: int) -> None:
    steps = random_steps(1)
    run = told(Readiness(ready), steps)
    assert sorted(env for batch in run.batches for env in batch) == sorted(
        env for env, each in enumerate(steps) for _ in each
    )
    left = sum(len(each) for each in steps)
    for batch in run.batches:
        active = sum(end > 0.0 for end in run.ends)
        assert len(batch) >= min(ready, left, active) or left < len(steps) * ready
        left -= len(batch)


def test_an_answer_that_waited_for_weights_does_not_count() -> None:
    rule = Readiness("adaptive")
    for _ in range(ANSWERS):
        rule.answered(ANSWER)
    rule.answered(60.0)
    assert rule.wait_until([1.0, 2.0], 1) == pytest.approx(1.5 + ANSWER)
    assert rule.wait_until([], 1) == math.inf
    assert rule.wait_until([1.0], 0) == -math.inf
