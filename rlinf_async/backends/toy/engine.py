"""`ToyEngine`: a `GenerationEngine` that only lets time pass, by the loop's clock.

::

    generate() --> waiting (by priority) --slot--> running --token by token--> Generated
                                                      ^
                  load(): between two steps; nothing runs meanwhile, then all go on

Under a virtual clock it is a cost model: seconds of a thousand engines pass in no time. On a real
loop it stands for a device, in benches of what overlaps with what.

Invariant: time advances in whole steps. However long nothing changes, that is one timer.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import numpy as np

from rlinf_async.backends.language import EngineDied, PromptTooLong
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Kept, Request, Tokens, Versions
from rlinf_async.messages.weights import WeightUpdate, refuse_older

END = 0
"""the token that ends a response"""


def response_length(config: ToyEngineConfig, seed: int) -> int:
    """Return how many tokens the response of this seed has, its end token included.

    Log-normal with mean ``mean_tokens``: ``exp(tail * z - tail ** 2 / 2)`` times it.
    """
    z = np.random.default_rng(seed).standard_normal()
    factor = math.exp(config.tail * z - config.tail**2 / 2)
    return max(1, round(config.mean_tokens * factor))


def response_tokens(config: ToyEngineConfig, request: Request, count: int) -> Tokens:
    """Return the first ``count`` tokens ``[count]`` of a request's response."""
    where = np.arange(count, dtype=np.int64)
    tokens = 1 + (request.seed * 31 + where * 7) % (config.vocabulary - 1)
    if count == response_length(config, request.seed):
        tokens[-1] = END
    return tokens.astype(np.int32)


def kept_tokens(config: ToyEngineConfig, request: Request, tokens: Tokens) -> Kept | None:
    """Return what a request that truncates keeps: each token and those after it, modulo the
    vocabulary, of which top-p keeps that share; of the tokens of a partial response what that says.
    None for a request that does not truncate, and where a partial response does not say."""
    sampling, size, partial = request.sampling, config.vocabulary, request.partial
    if not sampling.truncates:
        return None
    most = min(sampling.top_k or size, math.ceil(sampling.top_p * size)) % size
    begun = 0 if partial is None else len(partial.token_ids)
    drawn = tokens[begun:, None].astype(np.int64)
    kept = Kept.of(list(np.sort((drawn + np.arange(most)) % size)))
    if partial is None:
        return kept
    return None if partial.kept is None else partial.kept.followed_by(kept)


def token_log_probs(tokens: Tokens, version: Versions, kept: Kept | None = None) -> Floats:
    """Return the log-prob ``[R]`` of each token under the weights that made it; 0 of one that was
    kept alone."""
    found = -(1.0 + (tokens.astype(np.int64) + version) % 5) / 4.0
    if kept is not None:
        found[kept.counts == 1] = 0.0
    return found.astype(np.float32)


def text(tokens: Tokens) -> str:
    """Return a letter for each token, none for the end token."""
    return "".join(chr(ord("a") + int(token) % 26) for token in tokens if token != END)


Finish = Literal["stop", "length", "abort"]


class _Row:
    """One request inside the engine."""

    def __init__(self, request: Request, length: int) -> None:
        self.request = request
        self.end = min(length, request.sampling.max_tokens)
        self.stops = length <= request.sampling.max_tokens
        partial = request.partial
        self.made = 0 if partial is None else len(partial.token_ids)
        self.versions: list[int] = [] if partial is None else partial.version.tolist()
        self.answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self.ending = False
        """whether it was aborted or its call cancelled"""


class ToyEngine:
    """Lets time pass for every token.

    Its responses are formulas of the request's seed, the position and the version, so a response is
    the same wherever, and in however many pieces, it was made; only the versions of its tokens, and
    with them their log-probs, depend on the weights.

    Args:
        config: configuration of the cost model.
        seed: not used: a response depends on its request alone.
        device: not used.
    """

    def __init__(self, config: ToyEngineConfig, seed: int = 0, device: str = "cpu") -> None:
        self._config = config
        self.max_concurrent = config.slots
        self.version = -1
        """version of the weights; -1 before the first load"""
        self._waiting: list[tuple[int, int, _Row]] = []
        self._running: list[_Row] = []
        self._arrived = 0
        self._dead = False
        self._changed = asyncio.Event()
        self._asking = 0
        """calls that wait for the end of a step"""
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None

    def decode(self, token_ids: Tokens) -> str:
        """Return a letter for each token."""
        return text(token_ids)

    async def start(self) -> None:
        """Do nothing: there is nothing to build."""

    async def close(self) -> None:
        """End all requests."""
        self.die("was closed")
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)

    def die(self, how: str = "was killed") -> None:
        """Fail every request, now and later, with `EngineDied`: for tests of what happens then."""
        self._dead = True
        for row in [*self._running, *(row for _, _, row in self._waiting)]:
            if not row.answer.done():
                row.answer.set_exception(EngineDied(f"the toy engine {how}"))
        self._running, self._waiting = [], []
        self._changed.set()

    async def generate(self, request: Request) -> Generated:
        """Make the response of a request, token by token. See `GenerationEngine.generate`."""
        self._check_alive()
        needed = len(request.prompt.token_ids) + request.sampling.max_tokens
        if needed > self._config.context:
            raise PromptTooLong(
                f"prompt {request.prompt.index} has {len(request.prompt.token_ids)} tokens; with "
                f"max_tokens {request.sampling.max_tokens} that is {needed}, over the context of "
                f"{self._config.context}"
            )
        row = _Row(request, response_length(self._config, request.seed))
        self._arrived += 1
        heapq.heappush(self._waiting, (request.priority, self._arrived, row))
        self._changed.set()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run(), name="toy engine")
        try:
            return await row.answer
        finally:
            row.ending = True
            self._changed.set()

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests, or all, with what they have at the end of this step."""
        everyone = [*self._running, *(row for _, _, row in self._waiting)]
        ending = [row for row in everyone if names is None or row.request.name in names]
        for row in ending:
            row.ending = True
        self._changed.set()
        await asyncio.gather(*(row.answer for row in ending), return_exceptions=True)

    async def so_far(self) -> dict[str, Generated]:
        """Return what each request has at the end of this step."""
        self._check_alive()
        async with self._between_steps():
            rows = [*self._running, *(row for _, _, row in self._waiting)]
            return {one.request.name: self._made(one, "abort") for one in rows}

    async def load(self, update: WeightUpdate) -> int:
        """Take the version of the update; its tensors, if any, are ignored."""
        self._check_alive()
        async with self._between_steps():
            refuse_older(update.version, self.version)
            await asyncio.sleep(self._config.load_seconds)
            self._check_alive()
            self.version = update.version
        return update.checksum

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs ``[R]`` under the present version for each response."""
        self._check_alive()
        return [
            token_log_probs(response, np.full(len(response), self.version, np.int32))
            for _, response in sequences
        ]

    async def offload(self) -> None:
        """Do nothing: there is no memory."""

    async def onload(self) -> None:
        """Do nothing: there is no memory."""

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDied("the toy engine is dead")

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """The context in which no step runs, after the present one."""
        self._asking += 1
        self._changed.set()
        try:
            async with self._turn:
                yield
        finally:
            self._asking -= 1

    async def _run(self) -> None:
        while self._running or self._waiting:
            async with self._turn:
                if not self._asking:  # somebody who came just before has its turn after one step
                    self._changed.clear()
                self._answer_ended()
                self._admit()
                if self._running:
                    await self._advance()
                    self._answer_ended()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.slots:
            self._running.append(heapq.heappop(self._waiting)[2])

    def _answer_ended(self) -> None:
        """Answer the requests that are done or have to end."""
        for row in self._running:
            if row.made >= row.end:
                self._answer(row, "stop" if row.stops else "length")
            elif row.ending:
                self._answer(row, "abort")
        for _, _, row in self._waiting:
            if row.ending:
                self._answer(row, "abort")
        self._running = [row for row in self._running if not row.answer.done()]
        self._waiting = [entry for entry in self._waiting if not entry[2].answer.done()]
        heapq.heapify(self._waiting)

    def _answer(self, row: _Row, finish: Finish) -> None:
        if not row.answer.done():
            row.answer.set_result(self._made(row, finish))

    def _made(self, row: _Row, finish: Finish) -> Generated:
        tokens = response_tokens(self._config, row.request, row.made)
        version = np.array(row.versions, np.int32)
        kept = kept_tokens(self._config, row.request, tokens)
        return Generated(
            token_ids=tokens,
            log_prob=token_log_probs(tokens, version, kept),
            version=version,
            finish=finish,
            kept=kept,
        )

    async def _advance(self) -> None:
        """Run until the first is done or something changes, and then to the end of that step."""
        config = self._config
        step = config.seconds_per_step + len(self._running) * config.seconds_per_sequence
        most = max(0, min(row.end - row.made for row in self._running))
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(began + most * step):
                await self._changed.wait()
        except TimeoutError:
            made = most
        else:
            passed = loop.time() - began
            made = most if step == 0.0 else min(most, math.ceil(passed / step - 1e-9))
            await asyncio.sleep(max(0.0, began + made * step - loop.time()))
        for row in self._running:
            row.made += made
            row.versions += [self.version] * made
