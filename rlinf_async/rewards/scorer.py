"""One scoring process, as its owner sees it: it judges one answer at a time, or many at once.

Calls have numbers, by which what the process says is handed out. Many calls are open at once only
of asynchronous verifiers, which wait for others. A call ends in one of these ways::

    the owner waits   the process says          what becomes of the call, and of the others in there
    Begun, Judged     -                         its outcome
    time limit        asynchronous: Judged,     failed; the others go on
                      told to end it (`Cancel`)
                      nothing for               its process is killed, as somebody blocks its event
                      `CANCEL_SECONDS`          loop: `ScorerGone` for all, to be judged elsewhere
                      not asynchronous          failed, its process is killed
    cancelled         as at its time limit, and nobody waits
    -                 the end of its pipe       failed if begun and not asynchronous; else
                                                `ScorerGone`

The time limit counts from ``Begun``: not while Python starts and libraries are imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeVar

import msgspec
import psutil

from rlinf_async import deadlines
from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.processes import HEADER, MAX_MESSAGE, frame, how_it_ended
from rlinf_async.rewards.judging import Answer, Attempt


class Start(msgspec.Struct, frozen=True, tag=True):
    """Settings of the scoring process."""

    owner: int
    """process id of the owner; the scoring process ends with it"""
    memory_bytes: int
    """memory limit; 0: none"""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import these verifiers now."""

    number: int
    verifiers: list[str]


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Judge one answer, or all answers to a prompt at once."""

    number: int
    verifier: str
    answers: tuple[Answer, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a call of an asynchronous verifier, and say ``Judged`` once it has ended."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The verifiers are loaded, or one cannot be."""

    number: int
    error: str = ""
    asynchronous: list[str] = []
    """verifiers of which many calls may be open at a time"""
    of_groups: list[str] = []
    """verifiers that judge all answers to a prompt at once"""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The verifier is loaded and runs from now on."""

    number: int
    asynchronous: bool = False
    """many calls of this verifier may be open at a time"""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The outcome."""

    number: int
    outcome: Outcome
    retry_after: float | None = None
    """seconds to wait before another call, which may do better; None: it would not"""
    others: tuple[Outcome, ...] = ()
    """of the other answers to a prompt; see `Attempt`"""

    @property
    def attempt(self) -> Attempt:
        """The same without the number of the call."""
        return Attempt(self.outcome, self.retry_after, self.others)


ToProcess = Start | Load | Judge | Cancel
FromProcess = Loaded | Begun | Judged

START_SECONDS: Final = 120.0
"""time limit for the start of Python and the import of a verifier, on a busy machine too"""
CLOSED_SECONDS: Final = 2.0
"""time limit between the end of its pipe and that of the process"""
CANCEL_SECONDS: Final = 2.0
"""time limit for the end of a call that was told to end"""

M = TypeVar("M")

_decoder: Final[msgspec.msgpack.Decoder[FromProcess]] = msgspec.msgpack.Decoder(FromProcess)


class ScorerGone(Exception):
    """The process ended, or was killed, and another one may judge; the text says how."""


Heard = Loaded | Begun | Judged | ScorerGone
"""What a call may hear next. That the process has gone is no exception here: nobody need listen."""


class OpenCall:
    """A call that its process has not answered yet."""

    def __init__(self, number: int, verifier: str, company: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.verifier = verifier
        self.company = company
        """most calls that may be open in its process, with this one"""
        self.begun: asyncio.Future[Heard] = loop.create_future()
        self.ended: asyncio.Future[Heard] = loop.create_future()
        self.ending: deadlines.Timer | None = None
        """time left to end, once it was told to"""

    def hand(self, heard: Heard) -> None:
        """Hand it what it hears next. After its end nobody may listen any more."""
        if isinstance(heard, Judged | Loaded | ScorerGone):
            if self.ending is not None:
                self.ending.cancel()
            if not self.ended.done():
                self.ended.set_result(heard)
        if not self.begun.done():
            self.begun.set_result(heard)


class Scorer:
    """A scoring process.

    Args:
        process: the process.
        changed: called when a call has ended, or it is known that the process has.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, changed: Callable[[], None] | None = None
    ) -> None:
        self._process = process
        self._changed = changed
        assert process.stdin is not None
        assert process.stdout is not None
        self._asks, self._answers = process.stdin, process.stdout
        self._open: dict[int, OpenCall] = {}
        self._last = 0
        self._killed = False
        self._why = ""
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.asynchronous = set[str]()
        """verifiers that are loaded and of which many calls may be open"""
        self.of_groups = set[str]()
        """verifiers that are loaded and judge all answers to a prompt at once"""

    @classmethod
    async def start(
        cls,
        memory_bytes: int,
        environment: Mapping[str, str],
        changed: Callable[[], None] | None = None,
    ) -> Scorer:
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
        scorer = cls(process, changed)
        with contextlib.suppress(ConnectionError):
            scorer._say(Start(os.getpid(), memory_bytes))
        return scorer

    @property
    def pid(self) -> int:
        """Process id of the scorer."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended, as far as is known, and was not killed."""
        return self._process.returncode is None and not self._killed

    @property
    def calls(self) -> int:
        """The number of open calls."""
        return len(self._open)

    def takes(self, verifier: str, company: int) -> bool:
        """Whether a call of this verifier can be opened now, with no more than ``company`` calls
        open with it: in an idle process, or beside others that wait as it does."""
        if not self._open:
            return self.alive
        if not self.alive or verifier not in self.asynchronous:
            return False
        others = self._open.values()
        return all(
            one.verifier in self.asynchronous and len(others) < min(company, one.company)
            for one in others
        )

    def open(self, verifier: str, company: int) -> OpenCall:
        """Open a call, for `judge` or `load`."""
        self._last += 1
        call = self._open[self._last] = OpenCall(self._last, verifier, company)
        return call

    async def load(self, call: OpenCall, verifiers: list[str]) -> str:
        """Import these verifiers; returns the error of one of them, or an empty text.

        Raises:
            ScorerGone: the process ended meanwhile.
            TimeoutError: it took more than `START_SECONDS`, and was killed.
        """
        try:
            async with deadlines.timeout(START_SECONDS):
                loaded = await self._ask(call, Load(call.number, verifiers), (Loaded,))
        except BaseException:
            self._kill_now()
            raise
        self.asynchronous |= set(loaded.asynchronous)
        self.of_groups |= set(loaded.of_groups)
        return loaded.error

    async def judge(self, call: OpenCall, answers: Sequence[Answer], time_limit: float) -> Attempt:
        """Judge one answer, or all answers to a prompt, in at most ``time_limit`` seconds.

        Raises:
            ScorerGone: another process may judge it.
        """
        asked = Judge(call.number, call.verifier, tuple(answers))
        try:
            try:
                async with deadlines.timeout(START_SECONDS):
                    begun: Begun | Judged = await self._ask(call, asked, (Begun, Judged))
            except TimeoutError:
                await self.kill()
                if call.verifier in self.asynchronous:  # it is loaded: another call is in its way
                    raise ScorerGone("it was killed, as it began with nothing any more") from None
                return _failure(call.verifier, f"was not loaded within {START_SECONDS:g} s")
            if isinstance(begun, Judged):
                return begun.attempt
            if begun.asynchronous:
                self.asynchronous.add(call.verifier)
                self._tell()
            return await self._end_of(call, time_limit)
        except asyncio.CancelledError:
            if call.number in self._open:
                self._tell_to_end(call)
            raise

    async def kill(self) -> None:
        """Kill the process with its children, and wait for its end."""
        self._kill_now()
        code = await self._process.wait()
        self._gone(ScorerGone(self._why or how_it_ended(code)))
        if self._listening is not None:  # who else holds its pipe, has nothing to say
            self._listening.cancel()
        self._asks.close()

    async def _end_of(self, call: OpenCall, time_limit: float) -> Attempt:
        """The outcome of a call that has begun."""
        waits = call.verifier in self.asynchronous
        try:
            async with deadlines.timeout(time_limit):
                heard = await asyncio.shield(call.ended)
        except TimeoutError:
            if waits:
                return await self._cut(call, time_limit)
            await self.kill()
            return _failure(call.verifier, _too_long(time_limit, "its process was killed"))
        if isinstance(heard, Judged):
            return heard.attempt
        if waits:
            raise _as_gone(heard)
        return _failure(call.verifier, f"ended its process: {heard}")

    async def _cut(self, call: OpenCall, time_limit: float) -> Attempt:
        """End a call of an asynchronous verifier that has reached its time limit."""
        alone = self.calls == 1
        self._tell_to_end(call)
        heard = await asyncio.shield(call.ended)
        if isinstance(heard, Judged):
            return _failure(call.verifier, _too_long(time_limit, "was cancelled"))
        if alone:
            return _failure(call.verifier, _too_long(time_limit, "its process was killed"))
        raise _as_gone(heard)

    def _tell_to_end(self, call: OpenCall) -> None:
        """End a call: its process does, if it can and is in time, and else goes with it."""
        if call.verifier not in self.asynchronous:
            self._kill_now()
        elif call.ending is None:
            with contextlib.suppress(ConnectionError):
                self._say(Cancel(call.number))
            call.ending = deadlines.Timer(CANCEL_SECONDS, self._kill_blocked)

    def _kill_blocked(self) -> None:
        self._why = (
            f"it was killed, as a call in it did not end within {CANCEL_SECONDS:g} s of being told "
            "to: something blocks its event loop"
        )
        self._kill_now()
        self._ending = self._ending or asyncio.get_running_loop().create_task(self.kill())

    # ---- messages

    async def _ask(self, call: OpenCall, message: ToProcess, expected: tuple[type[M], ...]) -> M:
        """Say something, and return what its call hears first."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen())
        try:
            self._say(message)
            await self._asks.drain()
        except ConnectionError:
            raise ScorerGone(await self._how()) from None
        heard = await asyncio.shield(call.begun)
        if isinstance(heard, ScorerGone):
            raise heard
        if not isinstance(heard, expected):
            await self._refuse()
        return heard

    def _say(self, message: ToProcess) -> None:
        self._asks.write(frame(message))

    async def _listen(self) -> None:
        """Hand out what the process says, while a call is open in it."""
        try:
            while self._open:
                heard = await self._receive()
                call = self._open.get(heard.number)
                if call is None:
                    await self._refuse()
                elif not isinstance(heard, Begun):
                    del self._open[call.number]
                call.hand(heard)
                if not isinstance(heard, Begun):
                    self._tell()
        except ScorerGone as gone:
            self._gone(gone)
        finally:
            self._listening = None

    async def _receive(self) -> FromProcess:
        try:
            header = await self._answers.readexactly(HEADER.size)
            (size,) = HEADER.unpack(header)
            body = await self._answers.readexactly(size) if size <= MAX_MESSAGE else b""
            return _decoder.decode(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ScorerGone(await self._how()) from None
        except msgspec.DecodeError:
            pass
        await self._refuse()

    async def _refuse(self) -> NoReturn:
        self._kill_now()
        await self._process.wait()
        raise ScorerGone("it wrote something other than an answer into the pipe to its owner")

    async def _how(self) -> str:
        """How the process ended."""
        try:
            async with deadlines.timeout(CLOSED_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self._kill_now()
            await self._process.wait()
            return "it closed the pipe to its owner"
        return self._why or how_it_ended(code)

    def _gone(self, gone: ScorerGone) -> None:
        """End every open call: nothing will be heard any more."""
        self._killed = True
        calls = list(self._open.values())
        self._open.clear()
        for call in calls:
            call.hand(gone)
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()

    def _kill_now(self) -> None:
        if not self.alive:
            return
        self._killed = True
        with contextlib.suppress(psutil.Error):
            for started in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    started.kill()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _failure(verifier: str, what: str) -> Attempt:
    return Attempt(Failed(error=f"verifier {verifier!r} {what}"))


def _too_long(time_limit: float, then: str) -> str:
    return f"took longer than the time limit of {time_limit:g} s, and {then}"


def _as_gone(heard: Heard) -> ScorerGone:
    return heard if isinstance(heard, ScorerGone) else ScorerGone("it answered something else")
