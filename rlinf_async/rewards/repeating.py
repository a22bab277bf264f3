"""Answers that are judged again after an error that may pass, or not at all as they are known.

::

    answer --known?--> outcome, at no cost
       |
       +--the same is being judged?--> wait for it, and look again
       |
       +--> `ScoringPool` --outcome--> remembered, unless it failed
                  ^  |
                  |  +--an error that may pass, and retries are left
                  +---- a pause: twice as long each time, between half and all of it by chance
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from rlinf_async.messages.language import Failed, JudgeUse, Outcome, Scored
from rlinf_async.rewards.judging import Answer
from rlinf_async.rewards.pool import ScoringPool

FIRST_PAUSE: Final = 1.0
"""seconds until the first retry, at most, beside what the verifier asks for"""
LONGEST_PAUSE: Final = 60.0
"""seconds until a retry, at most, whatever the verifier asks for"""

_encoder = msgspec.msgpack.Encoder()


def longest_pauses(retries: int) -> float:
    """Seconds that so many retries may wait in all."""
    return retries * LONGEST_PAUSE


class Judges:
    """Judges answers in a pool, again where that may help, and each but once.

    Args:
        pool: judges.
        retries: most further calls for one answer.
        cache: outcomes to remember, of the answers that were asked for last; 0: none.
    """

    def __init__(self, pool: ScoringPool, *, retries: int, cache: int) -> None:
        self._pool = pool
        self._retries = retries
        self._size = cache
        self._known = OrderedDict[bytes, list[Outcome]]()
        self._judging: dict[bytes, asyncio.Future[None]] = {}

    async def judge(self, verifier: str, answer: Answer, use: JudgeUse) -> Outcome:
        """Judge one answer; ``use`` counts what it took."""
        [outcome] = await self.judge_group(verifier, [answer], use)
        return outcome

    async def judge_group(
        self, verifier: str, answers: Sequence[Answer], use: JudgeUse
    ) -> list[Outcome]:
        """Judge all answers to a prompt in one call; ``use`` counts what it took."""
        if not self._size:
            return await self._judge(verifier, answers, use)
        key = blake2b(_encoder.encode((verifier, answers)), digest_size=16).digest()
        while (judging := self._judging.get(key)) is not None:
            await asyncio.shield(judging)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            use.cache_hits += len(answers)
            return [free(one) for one in known]
        self._judging[key] = asyncio.get_running_loop().create_future()
        try:
            outcomes = await self._judge(verifier, answers, use)
        finally:
            self._judging.pop(key).set_result(None)
        if not any(isinstance(one, Failed) for one in outcomes):
            self._known[key] = outcomes
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return outcomes

    async def _judge(
        self, verifier: str, answers: Sequence[Answer], use: JudgeUse
    ) -> list[Outcome]:
        while True:
            use.calls += 1
            attempt = await self._pool.attempt(verifier, answers)
            if attempt.retry_after is None or not self._retries:
                return attempt.of_each(len(answers))
            if use.retries == self._retries:
                break
            await asyncio.sleep(pause(use.retries, attempt.retry_after))
            use.retries += 1
        assert isinstance(attempt.outcome, Failed)
        error = f"{attempt.outcome.error}, and so did the last of {use.calls} calls"
        return [Failed(error=error)] * len(answers)


def pause(retry: int, after: float) -> float:
    """Seconds until the retry of this number, from 0 on, of a verifier that asks for ``after``.

    By chance, so that hundreds of calls that failed together do not come again together.
    """
    backoff = min(FIRST_PAUSE * 2.0**retry, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
    return min(after + backoff, LONGEST_PAUSE)


def free(outcome: Outcome) -> Outcome:
    """The same outcome, at no cost."""
    return msgspec.structs.replace(outcome, cost=0.0) if isinstance(outcome, Scored) else outcome
