"""Several answers at a time, each judged in a process with a time limit.

Invariant: an answer gets exactly one outcome, whatever its verifier does to the process; a process
that was killed or has died judges nothing more, and the next answer finds another in its place.

::

    start --> idle --judge--> Begun --outcome--> idle
                |               |
                |               +--- time limit, cancelled, died ---> killed, with its children
                +--- died before Begun ---> `ScorerGone`: try another process

    owner    Start                     once, first
    owner    Load(verifiers)   ->  Loaded(error)
    owner    Judge(...)        ->  Begun, Judged(outcome)        or Judged alone: it cannot load it

The time limit counts from ``Begun``: not while Python starts and libraries are imported.

Not `concurrent.futures`, where one death breaks the pool, nor pebble 5.2, where the death of an
idle process does and exit code 0 passes for a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self, TypeVar

import msgspec
import psutil

from rlinf_async import deadlines
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import FOLDER, names_for_workers
from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.processes import HEADER, MAX_MESSAGE, frame, how_it_ended
from rlinf_async.rewards.judging import Answer


class Start(msgspec.Struct, frozen=True, tag=True):
    """Settings of the scoring process."""

    owner: int
    """process id of the owner; the scoring process ends with it"""
    memory_bytes: int
    """memory limit; 0: none"""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import these verifiers now."""

    verifiers: list[str]


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Judge one answer."""

    verifier: str
    answer: Answer


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The verifiers are loaded, or one cannot be."""

    error: str = ""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The verifier is loaded and runs from now on."""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The outcome."""

    outcome: Outcome


ToProcess = Start | Load | Judge
FromProcess = Loaded | Begun | Judged

START_SECONDS: Final = 120.0
"""time limit for the start of Python and the import of a verifier, on a busy machine too"""
CLOSED_SECONDS: Final = 2.0
"""time limit between the end of its pipe and that of the process"""

MINIMAL: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        FOLDER,  # where verifiers of a user's own are found
    }
)
MINIMAL_PREFIXES: Final = ("LC_", "PYTHON")
"""environment variables that every scoring process gets"""

M = TypeVar("M")

_decoder = msgspec.msgpack.Decoder(FromProcess)


def inherited(names: Iterable[str]) -> dict[str, str]:
    """The environment of a scoring process: a minimal set, and the variables of these names.

    The cluster's secret may be in a variable of this process, as may keys of the user's.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in MINIMAL or name.startswith(MINIMAL_PREFIXES) or name in set(names)
    }
    return {"OMP_NUM_THREADS": "1", **kept, **names_for_workers()}


class ScorerGone(Exception):
    """The process ended before it began to judge; the text says how."""


class Scorer:
    """A process that judges one answer at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._asks, self._answers = process.stdin, process.stdout

    @classmethod
    async def start(cls, memory_bytes: int, environment: Mapping[str, str]) -> Scorer:
        """Start a process with these environment variables and nothing else of this one: neither
        its memory nor its open files. It imports verifiers when they are first needed."""
        boot = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from rlinf_async.rewards.process import main; main()"
        )
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                boot,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(environment),
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await cls(await starting).kill()
            raise
        scorer = cls(process)
        with contextlib.suppress(ConnectionError):
            await scorer._say(Start(os.getpid(), memory_bytes))
        return scorer

    @property
    def pid(self) -> int:
        """Process id of the scorer."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as is known."""
        return self._process.returncode is None

    async def load(self, verifiers: list[str]) -> str:
        """Import these verifiers; returns the error of one of them, or an empty text.

        Raises:
            ScorerGone: the process ended meanwhile.
            TimeoutError: it took more than `START_SECONDS`.
        """
        async with deadlines.timeout(START_SECONDS):
            loaded = await self._ask(Load(verifiers), (Loaded,))
        return loaded.error

    async def judge(self, verifier: str, answer: Answer, time_limit: float) -> Outcome:
        """Judge one answer in at most ``time_limit`` seconds, after which the process is killed.

        Raises:
            ScorerGone: the process ended before the verifier was called.
        """
        asked = Judge(verifier, answer)
        try:
            try:
                async with deadlines.timeout(START_SECONDS):
                    begun = await self._ask(asked, (Begun, Judged))
            except TimeoutError:
                await self.kill()
                return Failed(
                    error=f"verifier {verifier!r} was not loaded within {START_SECONDS:g} s"
                )
            if isinstance(begun, Judged):
                return begun.outcome
            return await self._judged(verifier, time_limit)
        except asyncio.CancelledError:
            self._kill_now()
            raise

    async def kill(self) -> None:
        """Kill the process with its children, and wait for its end."""
        self._kill_now()
        await self._process.wait()
        self._asks.close()

    async def _judged(self, verifier: str, time_limit: float) -> Outcome:
        try:
            async with deadlines.timeout(time_limit):
                judged = await self._receive((Judged,))
        except TimeoutError:
            await self.kill()
            return Failed(
                error=f"verifier {verifier!r} took longer than the time limit of {time_limit:g} s, "
                "and its process was killed"
            )
        except ScorerGone as gone:
            return Failed(error=f"verifier {verifier!r} ended its process: {gone}")
        return judged.outcome

    async def _ask(self, message: ToProcess, expected: tuple[type[M], ...]) -> M:
        try:
            await self._say(message)
        except ConnectionError:
            raise ScorerGone(await self._how()) from None
        return await self._receive(expected)

    async def _say(self, message: ToProcess) -> None:
        self._asks.write(frame(message))
        await self._asks.drain()

    async def _receive(self, expected: tuple[type[M], ...]) -> M:
        try:
            header = await self._answers.readexactly(HEADER.size)
            (size,) = HEADER.unpack(header)
            body = await self._answers.readexactly(size) if size <= MAX_MESSAGE else b""
            heard = _decoder.decode(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ScorerGone(await self._how()) from None
        except msgspec.DecodeError:
            heard = None
        if not isinstance(heard, expected):
            await self.kill()
            raise ScorerGone("it wrote something other than an answer into the pipe to its owner")
        return heard

    async def _how(self) -> str:
        """How the process ended."""
        try:
            async with deadlines.timeout(CLOSED_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            await self.kill()
            return "it closed the pipe to its owner"
        return how_it_ended(code)

    def _kill_now(self) -> None:
        if not self.alive:
            return
        with contextlib.suppress(psutil.Error):
            for started in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    started.kill()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


ATTEMPTS: Final = 3
"""processes that are tried where one ends before it begins with an answer"""

MIB: Final = 1024 * 1024


class ScoringPool:
    """Judges answers in up to ``processes`` processes, which start when they are first needed."""

    def __init__(
        self,
        *,
        processes: int,
        time_limit: float,
        memory_limit_mib: int = 0,
        environment: Sequence[str] = (),
    ) -> None:
        """``time_limit`` is in seconds for each answer; a memory limit of 0 is none.
        ``environment`` names variables of this process that the others get, too."""
        self._environment = inherited(environment)
        self._time_limit = time_limit
        self._memory_bytes = memory_limit_mib * MIB
        self._free = asyncio.Semaphore(processes)
        self._size = processes
        self._idle: list[Scorer] = []
        self._all: set[Scorer] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def load(self, verifiers: Sequence[str]) -> None:
        """Start every process and import these verifiers in it.

        Raises:
            ConfigError: one of them cannot be loaded; the text says which and why.
        """
        async with asyncio.TaskGroup() as group:
            loading = [group.create_task(self._load(list(verifiers))) for _ in range(self._size)]
        for one in loading:
            if one.result():
                raise ConfigError(one.result(), path=("verifier",))

    async def judge(self, verifier: str, answer: Answer) -> Outcome:
        """Judge one answer, once a process is free. Cancelling it kills the process."""
        how = ""
        for _ in range(ATTEMPTS):
            try:
                async with self._scorer() as scorer:
                    return await scorer.judge(verifier, answer, self._time_limit)
            except ScorerGone as gone:
                how = str(gone)
        return Failed(
            error=f"verifier {verifier!r}: {ATTEMPTS} processes ended before it was called, the "
            f"last: {how}; what it imports may end them"
        )

    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return sorted(scorer.pid for scorer in self._all if scorer.alive)

    async def close(self) -> None:
        """Kill every process, also those that judge; nothing is judged afterwards."""
        self._closed = True
        for scorer in list(self._all):
            await scorer.kill()
        self._all.clear()
        self._idle.clear()

    async def _load(self, verifiers: list[str]) -> str:
        try:
            async with self._scorer() as scorer:
                return await scorer.load(verifiers)
        except ScorerGone as gone:
            return f"verifiers {verifiers}: the process that imported them ended: {gone}"
        except TimeoutError:
            return f"verifiers {verifiers}: importing them took too long"

    @asynccontextmanager
    async def _scorer(self) -> AsyncIterator[Scorer]:
        """A process for one answer; it is kept if it still runs afterwards."""
        async with self._free:
            scorer = await self._take()
            reusable = False
            try:
                yield scorer
                reusable = scorer.alive
            finally:
                if reusable and not self._closed:
                    self._idle.append(scorer)
                else:
                    await self._drop(scorer)

    async def _take(self) -> Scorer:
        while self._idle:
            scorer = self._idle.pop()
            if scorer.alive:
                return scorer
            await self._drop(scorer)
        if self._closed:
            raise RuntimeError("the pool of scoring processes was closed")
        scorer = await Scorer.start(self._memory_bytes, self._environment)
        self._all.add(scorer)
        return scorer

    async def _drop(self, scorer: Scorer) -> None:
        await scorer.kill()
        self._all.discard(scorer)
