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
        self._known = OrderedDict[bytes, Outcome]()
        self._judging: dict[bytes, asyncio.Future[None]] = {}

    async def judge(self, verifier: str, answer: Answer, use: JudgeUse) -> Outcome:
        """Judge one answer; ``use`` counts what it took."""
        if not self._size:
            return await self._judge(verifier, answer, use)
        key = blake2b(_encoder.encode((verifier, answer)), digest_size=16).digest()
        while (judging := self._judging.get(key)) is not None:
            await asyncio.shield(judging)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            use.cache_hits += 1
            return free(known)
        self._judging[key] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self._judge(verifier, answer, use)
        finally:
            self._judging.pop(key).set_result(None)
        if not isinstance(outcome, Failed):
            self._known[key] = outcome
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return outcome

    async def _judge(self, verifier: str, answer: Answer, use: JudgeUse) -> Outcome:
        while True:
            use.calls += 1
            outcome, after = await self._pool.attempt(verifier, answer)
            if after is None or not self._retries:
                return outcome
            if use.retries == self._retries:
                break
            await asyncio.sleep(pause(use.retries, after))
            use.retries += 1
        assert isinstance(outcome, Failed)
        return Failed(error=f"{outcome.error}, and so did the last of {use.calls} calls")


def pause(retry: int, after: float) -> float:
    """Seconds until the retry of this number, from 0 on, of a verifier that asks for ``after``.

    By chance, so that hundreds of calls that failed together do not come again together.
    """
    backoff = min(FIRST_PAUSE * 2.0**retry, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
    return min(after + backoff, LONGEST_PAUSE)


def free(outcome: Outcome) -> Outcome:
    """The same outcome, at no cost."""
    return msgspec.structs.replace(outcome, cost=0.0) if isinstance(outcome, Scored) else outcome
