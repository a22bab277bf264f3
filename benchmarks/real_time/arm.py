"""A simulated arm on wall time, commanded at 50 Hz by a policy that takes 30 ms for 8 actions.

    python benchmarks/real_time/arm.py SECONDS [--delayed 0.05] [--thread] [--computes]

The policy has a process of its own, or with ``--thread`` a thread. It waits for 30 ms, as for an
accelerator, or ``--computes`` on a core of this host. The loop has a real-time priority where this
process may have one. With ``--delayed`` this share of the answers takes 200 ms more. Prints one
line of JSON. Misses and unsafe commands are counted a second time here: from what each step says of
itself, and from what has reached the arm.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import load_entry_point
from rlinf_async.realtime import RealTimeLoop, SafetyConfig, Stepped, prioritised

HZ, CHUNK, ANSWER, DELAY, PRIORITY = 50.0, 8, 0.03, 0.2, 50
FASTEST, SPEED = 1.5, 20.0
"""limits of a command (rad/s), and of its change in a second"""
SAFETY = SafetyConfig(low=[-FASTEST], high=[FASTEST], max_velocity=[SPEED], rest=[0.0])
ARM = Path(__file__).parents[2] / "examples" / "real_time_arm.py"


class Policy:
    """Takes 30 ms, and now and then longer, or asks for more than is safe."""

    def __init__(self, delayed: float, *, computes: bool) -> None:
        self._chance, self._delayed, self._computes = random.Random(0), delayed, computes
        self._towards: Any = load_entry_point(f"{ARM}:towards")
        self._table = np.random.default_rng(0).standard_normal((200, 200))

    def __call__(self, shown: Any) -> NDArray[np.float64]:
        until = time.monotonic() + ANSWER
        while self._computes and time.monotonic() < until:
            np.dot(self._table, self._table)
        time.sleep(max(until - time.monotonic(), 0.0))
        if self._chance.random() < self._delayed:
            time.sleep(DELAY)
        wanted: NDArray[np.float64] = self._towards(shown, CHUNK, HZ)
        return wanted * self._chance.choice([1.0, 1.0, 3.0])


@functools.cache
def _policy(delayed: float, computes: bool) -> Policy:
    return Policy(delayed, computes=computes)


def act(shown: Any, delayed: float, computes: bool) -> NDArray[np.float64]:
    """What the policy of this process answers."""
    return _policy(delayed, computes)(shown)


def may_have_priority() -> bool:
    """Whether this process may have a real-time priority."""
    try:
        with prioritised(PRIORITY):
            return True
    except ConfigError:
        return False


def missed(taken: list[Stepped]) -> int:
    """The steps that have missed their deadline: those between two that were taken, those that had
    no action of their own, and those whose command was sent too late."""
    numbers = [one.command.step for one in taken]
    late = [
        one.sent - one.due > 0.5 / HZ + 1e-9
        or one.command.shown + one.command.number != one.command.step
        for one in taken
    ]
    return sum(late) + numbers[-1] + 1 - len(numbers)


def unsafe(sent: list[NDArray[np.float64]]) -> int:
    """The commands that were beyond a limit when they reached the arm; it may stop at once."""
    beyond = sum(bool((np.abs(one) > FASTEST + 1e-6).any()) for one in sent)
    for before, after in pairwise(sent):
        jumps = bool((np.abs(after - before) > SPEED / HZ + 1e-6).any())
        beyond += jumps and bool(after.any())
    return beyond


def measured(seconds: float, delayed: float, *, thread: bool, computes: bool) -> dict[str, float]:
    """Play one episode, and return what was counted."""
    arm: Any = load_entry_point(f"{ARM}:Arm")(seconds)
    step, answer = arm.step, functools.partial(act, delayed=delayed, computes=computes)
    priority = PRIORITY * may_have_priority()
    executor = None if thread else ProcessPoolExecutor(1)
    if executor is not None:
        executor.submit(answer, arm.reset()[0]).result()  # it has started, and imported
    sent, taken = list[NDArray[np.float64]](), list[Stepped]()

    def noted(action: Any) -> Any:
        sent.append(np.array(action, np.float64))
        return step(action)

    arm.step = noted
    loop = RealTimeLoop.of(
        arm,
        answer,
        hz=HZ,
        chunk=CHUNK,
        safety=SAFETY,
        priority=priority,
        executor=executor,
        on_step=lambda one: taken.append(one._replace(observation=None, info={})),
    )
    with loop:
        counts = loop.run(seed=0)
    if executor is not None:
        executor.shutdown()
    late = np.sort([one.sent - one.due for one in taken])
    return {
        "steps": counts.steps,
        "missed": counts.missed,
        "missed_share": counts.missed / counts.steps,
        "uncounted": abs(missed(taken) - counts.missed),
        "unsafe": unsafe(sent),
        "starved": counts.starved,
        "late": counts.late,
        "skipped": counts.skipped,
        "clipped": counts.clipped,
        "answers": counts.answers,
        "priority": priority,
        "stale_answers": counts.stale_answers,
        "sent_p50_ms": 1e3 * float(late[len(late) // 2]),
        "sent_p99_ms": 1e3 * float(late[len(late) * 99 // 100]),
        "sent_max_ms": 1e3 * float(late[-1]),
        "answer_ms": 1e3 * counts.answer_sum / counts.answers,
        "answer_max_ms": 1e3 * counts.answer_max,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--delayed", type=float, default=0.0)
    parser.add_argument("--thread", action="store_true")
    parser.add_argument("--computes", action="store_true")
    print(json.dumps(measured(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
