"""Verifiers that runs of tests name by import path."""

from __future__ import annotations

import asyncio
import os
import time

from rlinf_async.rewards import Answer, Reject, Scored


def letters(answer: Answer) -> float:
    """The share of letters: a random model gets something, and learns."""
    return sum(one.isalpha() for one in answer.text) / 8


def early(answer: Answer) -> float:
    """Right where the first letter is in the first half of the alphabet."""
    return float(answer.text[:1].lower() < "n")


def text(answer: Answer) -> str:
    """Not a number."""
    return f"good: {answer.text}"


def cores(answer: Answer) -> float:
    """How many cores this process may use."""
    return float(len(os.sched_getaffinity(0)))


def equal(answer: Answer) -> float:
    """The same for everybody."""
    return 0.5


def hangs(answer: Answer) -> float:
    """Never says anything."""
    while True:
        pass


def slow(answer: Answer) -> float:
    """So slow that samples wait for it."""
    time.sleep(0.02)
    return 1.0


def sometimes(answer: Answer) -> float:
    """Breaks on the answers to every prompt that begins with an even number."""
    if int(answer.prompt.removeprefix("<user>").partition("+")[0]) % 2 == 0:
        raise RuntimeError("no server")
    return 1.0


def rejects(answer: Answer) -> float:
    """Judges no answer to a prompt that begins with an even number."""
    if int(answer.prompt.removeprefix("<user>").partition("+")[0]) % 2 == 0:
        raise Reject("no server")
    return 1.0


def refuses(answer: Answer) -> float:
    """Judges no answer at all."""
    raise Reject("no reference")


async def judge(answer: Answer) -> Scored:
    """Letters, as somebody else counts them, who wants half a cent for it."""
    await asyncio.sleep(0)
    return Scored(reward=letters(answer), cost=0.5)
