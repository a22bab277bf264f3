"""Verifiers that runs of tests name by import path."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from rlinf_async.rewards import Answer, Reject, Scored, group_verifier


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


def places(texts: Sequence[str]) -> list[float]:
    """How many of the others each text comes after, in alphabetical order."""
    return [float(sum(other < one for other in texts)) for one in texts]


@group_verifier
async def rank(answers: Sequence[Answer]) -> list[Scored]:
    """The place of each answer among those to its prompt, for which a judge wants a cent in all."""
    assert len({one.prompt for one in answers}) == 1
    await asyncio.sleep(0)
    share = 1.0 / len(answers)
    return [
        Scored(reward=place, parts={"answers": len(answers)}, cost=share)
        for place in places([one.text for one in answers])
    ]


@group_verifier
def best(answers: Sequence[Answer]) -> list[float]:
    """Right is the last answer in alphabetical order, and every one that is equal to it."""
    last = max(one.text for one in answers)
    return [float(one.text == last) for one in answers]


@group_verifier
def too_few(answers: Sequence[Answer]) -> list[float]:
    """Forgets the last one, where there are several."""
    return [1.0] * max(1, len(answers) - 1)
