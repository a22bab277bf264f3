"""`CostEngine`: a `GenerationEngine` whose events are samples, not tokens.

All running sequences advance together, one token a step, so one number says how far each is::

    position   tokens made by a sequence that has run since the engine began
    end        position at which a sequence is done: where it joined, plus what it has to make

The next to finish is the smallest end. Until the batch changes, a step takes equally long, so the
time at which it finishes is known, and is the only timer. What stops the whole engine for a while
(prefill, loading weights) moves the time from which it goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlinf_async.backends.cost.config import CostEngineConfig
from rlinf_async.backends.language import EngineDied
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens
from rlinf_async.messages.weights import WeightUpdate, refuse_older

TOKEN = np.ones(1, np.int32)
LOG_PROB = np.full(1, -1.0, np.float32)
ROUNDING = 1e-6
"""tolerance, in tokens: positions are sums of floating-point numbers"""


class CostRow:
    """One request inside the engine."""

    __slots__ = ("answer", "began", "brought", "end", "length", "request", "version")

    def __init__(self, request: Request, length: int) -> None:
        self.request = request
        partial = request.partial
        self.brought = 0 if partial is None else len(partial.token_ids)
        self.length = min(length, request.sampling.max_tokens)
        self.began = -1.0
        """position at which it joined; -1 while it waits"""
        self.end = math.inf
        self.version = -1
        """version of the weights; -1 before the first load"""
        """version of the weights when the request joined"""
        self.answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()

    def made(self, position: float) -> int:
        """Return the tokens of its response at this position of the engine."""
        if self.began < 0.0:
            return self.brought
        passed = math.floor(position - self.began + ROUNDING)
        return min(self.length, self.brought + max(passed, 0))


class CostEngine:
    """Lets the time of generating pass. See the module.

    Args:
        config: configuration of the cost model.
        seed: not used: the length of a response depends on its request alone.
        device: not used.
    """

    def __init__(self, config: CostEngineConfig, seed: int = 0, device: str = "cpu") -> None:
        self.config = config
        self.max_concurrent = config.slots
        self.width = 1.0
        """devices over those at home"""
        self.slowness = 1.0
        """factor of every time: of a slow node"""
        self.devices = 1
        """devices that it holds now"""
        self.home = 1
        """devices that it was made for"""
        self._offloaded = False
        self._spent: dict[str, float] = {}
        self._stalled = ""
        """reason of the last stall"""
        self.version = -1
        # What responses are slices of: to broadcast for each takes ten times as long.
        longest = config.lengths.longest
        self._tokens = np.broadcast_to(TOKEN, longest)
        self._log_probs = np.broadcast_to(LOG_PROB, longest)
        self._newest = np.broadcast_to(np.int32(-1), longest)
        self._loop: asyncio.AbstractEventLoop
        self._position = 0.0
        self._at = 0.0
        """time up to which the position is known; in the future while the engine is stopped"""
        self._waiting: list[tuple[int, int, CostRow]] = []
        self._running: dict[CostRow, None] = {}  # by row: two may have one name, after a death
        self._ends: list[tuple[float, int, CostRow]] = []
        self._arrived = 0
        self._timer: asyncio.TimerHandle | None = None
        self._dead = False
        self._read: dict[tuple[int, int], int] = {}
        """tokens in the prefix cache, by sample: of episodes, whose turns begin with them"""
        self._versions: list[tuple[float, int]] = []
        """position from which each version made the tokens"""

    # -- GenerationEngine ---------------------------------------------------------------------

    def decode(self, token_ids: Tokens) -> str:
        """Return nothing: tokens have no meaning here."""
        return ""

    async def start(self) -> None:
        """Begin at the loop's present time."""
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()

    async def close(self) -> None:
        """End all requests."""
        self.die("was closed")

    def die(self, how: str = "crashed") -> None:
        """Fail every request, now and later, with `EngineDied`."""
        self._dead = True
        for row in self._rows():
            if not row.answer.done():
                row.answer.set_exception(EngineDied(f"the engine {how}"))
                row.answer.exception()  # somebody may have been cancelled meanwhile
        self._running, self._waiting, self._ends = {}, [], []
        self._plan()

    async def generate(self, request: Request) -> Generated:
        """Make the rest of the response. See `GenerationEngine.generate`."""
        self._check_alive()
        row = CostRow(request, self.config.lengths.length(request.seed))
        self._arrived += 1
        heapq.heappush(self._waiting, (request.priority, self._arrived, row))
        self._advance()
        self._admit()
        self._plan()
        try:
            return await row.answer
        except asyncio.CancelledError:
            self._end([row])
            raise

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests, or all, with what they have."""
        wanted = None if names is None else set(names)
        self._advance()
        self._end([row for row in self._rows() if wanted is None or row.request.name in wanted])

    async def so_far(self) -> dict[str, Generated]:
        """Return what each request has."""
        self._check_alive()
        self._advance()
        return {row.request.name: self._generated(row, "abort") for row in self._rows()}

    async def made(self) -> dict[str, int]:
        """Return the tokens of each response so far."""
        self._check_alive()
        self._advance()
        position = self._position
        return {row.request.name: row.made(position) for row in self._rows()}

    async def load(self, update: WeightUpdate) -> int:
        """Take the version of the update; nothing runs meanwhile."""
        self._check_alive()
        refuse_older(update.version, self.version)
        self._advance()
        self.stall(self.config.load_seconds, "loading")
        await asyncio.sleep(self.config.load_seconds * self.slowness)
        self._check_alive()
        self._read.clear()
        self.version = update.version
        self._newest = np.broadcast_to(np.int32(update.version), self.config.lengths.longest)
        self._versions.append((self._position, update.version))
        return update.checksum

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return constants."""
        self._check_alive()
        return [np.broadcast_to(LOG_PROB, len(response)) for _, response in sequences]

    async def resize(self, devices: int) -> None:
        """Go on with other devices; where it serves, requests stop for as long as that takes."""
        width = devices / self.home
        if width == self.width:
            return
        self.change(width=width)
        if not self._offloaded:
            self.stall(2 * self.config.move_seconds, "moving")

    async def offload(self) -> None:
        """Take the time of it."""
        self._read.clear()
        self._offloaded = True
        self._spend("moving", self.config.move_seconds)
        await asyncio.sleep(self.config.move_seconds * self.slowness)

    async def onload(self) -> None:
        """Take the time of it."""
        self._offloaded = False
        self._spend("moving", self.config.move_seconds)
        await asyncio.sleep(self.config.move_seconds * self.slowness)

    # -- what the simulation changes and asks --------------------------------------------------

    def change(self, *, width: float | None = None, slowness: float | None = None) -> None:
        """Go on with other devices, or slower."""
        self._advance()
        self.width = self.width if width is None else width
        self.slowness = self.slowness if slowness is None else slowness
        self._plan()

    def forget(self) -> None:
        """Lose all tokens that were made here: those that requests brought are theirs."""
        self._advance()
        self._read.clear()
        for row in self._running:
            row.began = self._position

    def hold(self, devices: int) -> None:
        """Account for ``devices`` from now on."""
        if devices != self.devices:
            self._advance()
            self.devices = devices

    def stall(self, seconds: float, cause: str) -> None:
        """Make nothing for some more seconds, for a cause that `take_spent` names."""
        self._spend(cause, seconds)
        self._stalled = cause
        now = self._loop.time()
        self._at = max(self._at, now) + seconds * self.slowness
        self._plan()

    def progress(self) -> list[tuple[str, int, int]]:
        """Return name, tokens so far and tokens in the end of each request, nothing interrupted."""
        self._advance()
        position = self._position
        return [(row.request.name, row.made(position), row.length) for row in self._rows()]

    def take_spent(self) -> dict[str, float]:
        """Return the device-seconds since the last call by cause: ``decoding``, ``prefill``,
        ``loading``, ``moving``."""
        self._advance()
        found, self._spent = self._spent, {}
        ahead = max(0.0, self._at - self._loop.time()) * self.devices
        if ahead:  # it stands still for some more time, which is not spent yet
            found[self._stalled] = found.get(self._stalled, 0.0) - ahead
            self._spent[self._stalled] = ahead
        return found

    @property
    def running(self) -> int:
        """Sequences that are decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    # -- the machinery ------------------------------------------------------------------------

    def _spend(self, cause: str, seconds: float) -> None:
        spent = seconds * self.slowness * self.devices
        self._spent[cause] = self._spent.get(cause, 0.0) + spent

    def _rows(self) -> list[CostRow]:
        return [*self._running, *(row for _, _, row in self._waiting)]

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDied("the engine is dead")

    def _step_seconds(self) -> float:
        config = self.config
        step = config.decode_seconds + len(self._running) * config.sequence_seconds
        seconds: float = step * self.slowness / self.width**config.wider
        return seconds

    def _prefill_seconds(self, tokens: int) -> float:
        """Return the seconds of a prompt; a wider instance is as much faster as at decoding."""
        seconds: float = tokens * self.config.prefill_seconds / self.width**self.config.wider
        return seconds

    def _advance(self) -> None:
        """Bring the position to the present."""
        now = self._loop.time()
        passed = now - self._at
        if passed <= 0.0:
            return
        self._at = now
        if self._running:
            steps = passed / self._step_seconds()
            self._position += steps
            self._spent["decoding"] = self._spent.get("decoding", 0.0) + passed * self.devices

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.slots:
            row = heapq.heappop(self._waiting)[2]
            if row.answer.done():
                continue
            row.began, row.version = self._position, self.version
            row.end = self._position + (row.length - row.brought)
            self._running[row] = None
            heapq.heappush(self._ends, (row.end, self._arrived, row))
            self._arrived += 1
            self.stall(self._prefill_seconds(self._unread(row)), "prefill")

    def _unread(self, row: CostRow) -> int:
        """Return the tokens of a prompt, partial response included, without those that an earlier
        turn of its episode has left in the prefix cache."""
        request = row.request
        prompt = len(request.prompt.token_ids) + row.brought
        return max(0, prompt - self._read.get((request.group, request.index), 0))

    def _plan(self) -> None:
        """Set the timer to the end of the next sequence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].answer.done():
            heapq.heappop(self._ends)
        if self._ends:
            left = max(self._ends[0][0] - self._position, 0.0)
            began = max(self._at, self._loop.time())
            self._timer = self._loop.call_at(began + left * self._step_seconds(), self._finish)

    def _finish(self) -> None:
        """Answer every sequence that is done by now."""
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._position + ROUNDING:
            row = heapq.heappop(self._ends)[2]
            if row.answer.done():
                continue
            stopped = row.length < row.request.sampling.max_tokens
            self._answer(row, "stop" if stopped else "length")
        self._admit()
        self._plan()

    def _end(self, rows: Sequence[CostRow]) -> None:
        for row in rows:
            self._answer(row, "abort")
        self._waiting = [entry for entry in self._waiting if not entry[2].answer.done()]
        heapq.heapify(self._waiting)
        self._admit()
        self._plan()

    def _answer(self, row: CostRow, finish: Literal["stop", "length", "abort"]) -> None:
        self._running.pop(row, None)
        if row.answer.done():
            return
        generated = self._generated(row, finish)
        request = row.request
        if request.turn and row.began >= 0.0:
            read = len(request.prompt.token_ids) + len(generated.token_ids)
            self._read[request.group, request.index] = read
        row.answer.set_result(generated)

    def _generated(self, row: CostRow, finish: Literal["stop", "length", "abort"]) -> Generated:
        made = row.length if finish != "abort" else row.made(self._position)
        return Generated(
            token_ids=self._tokens[:made],
            log_prob=self._log_probs[:made],
            version=self._token_versions(row, made),
            finish=finish,
        )

    def _token_versions(
        self, row: CostRow, made: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return the version ``[made]`` that made each token."""
        partial = row.request.partial
        if partial is None and row.version == self.version:
            return self._newest[:made]
        versions = np.empty(made, np.int32)
        brought = min(row.brought, made)
        if partial is not None:
            versions[:brought] = partial.version[:brought]
        versions[brought:] = row.version
        for position, version in self._versions:
            if position > row.began >= 0.0:
                versions[brought + max(0, math.ceil(position - row.began - ROUNDING)) :] = version
        return versions
