"""The main program of a scoring process: it judges one answer at a time, or many that wait; of a
group verifier, all answers to a prompt take the place of one.

::

    outside of its loop    a message ---> import; a verifier that is not asynchronous
                              |   ^
         asynchronous verifier|   | no call is open any more
                              v   |
    in its loop            calls, each a task; more of them, and `Cancel`, as messages come

A verifier that is not asynchronous runs outside of the loop, so that it may run one of its own.

Its messages go over its former standard input and output. What a verifier prints goes to standard
error instead, and standard input is empty for it. The process ends with its owner: on Linux the
kernel kills it then, so also where a verifier hangs.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import deque
from functools import partial
from typing import Any, BinaryIO, Final

import msgspec

from rlinf_async.messages.language import Failed
from rlinf_async.processes import (
    Frames,
    end_with_parent,
    frame,
    leave_signals_to_driver,
)
from rlinf_async.rewards.judging import (
    Attempt,
    Verifier,
    attempt,
    attempt_beside,
    is_asynchronous,
    judges_groups,
    load_verifier,
)
from rlinf_async.rewards.scorer import (
    Begun,
    Cancel,
    FromProcess,
    Judge,
    Judged,
    Load,
    Loaded,
    Start,
    ToProcess,
)

READ: Final = 1 << 16
"""bytes that are read at a time"""


def main() -> None:
    """Serve until the owner closes its end."""
    asks, answers = _take_pipes()
    leave_signals_to_driver()
    Serving(asks, answers).serve()
    os._exit(0)  # without waiting for threads that a verifier has left


def _take_pipes() -> tuple[int, BinaryIO]:
    asks, answers = os.dup(0), open(os.dup(1), "wb")  # noqa: SIM115, until the end
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return asks, answers


class Serving:
    """Answers the owner's messages."""

    def __init__(self, asks: int, answers: BinaryIO) -> None:
        self._asks = asks
        self._answers = answers
        self._frames: Frames[ToProcess] = Frames(msgspec.msgpack.Decoder(ToProcess))
        self._later = deque[ToProcess]()
        """messages that came while calls were open, and have to wait for their end"""
        self._verifiers: dict[str, Verifier] = {}
        self._runner: asyncio.Runner | None = None
        self._calls: dict[int, asyncio.Task[Attempt]] = {}
        self._idle = asyncio.Event()
        self._pid = os.getpid()

    def serve(self) -> None:
        """Answer messages until there will be no more."""
        while (message := self._next()) is not None:
            self._answer(message)

    def _next(self) -> ToProcess | None:
        """Wait for a message; None where the owner has closed its end."""
        if self._later:
            return self._later.popleft()
        while (message := self._frames.take()) is None:
            data = os.read(self._asks, READ)
            if not data:
                return None
            self._frames.feed(data)
        return message

    def _answer(self, message: ToProcess) -> None:
        match message:
            case Start() as start:
                _configure(start)
            case Load(number=number, verifiers=names):
                error = self._load_all(names)
                names = [] if error else names
                waits = [one for one in names if self._waits(one)]
                of_groups = [one for one in names if judges_groups(self._verifiers[one])]
                self._say(Loaded(number, error, waits, of_groups))
            case Judge() as asked:
                self._judge(asked)
            case Cancel():  # its call has ended meanwhile
                pass

    def _judge(self, asked: Judge) -> None:
        try:
            verifier = self._load(asked.verifier)
        except BaseException as error:  # a module may raise anything, SystemExit too
            failed = Failed(error=_load_error(asked.verifier, error))
            self._say(Judged(asked.number, failed))
            return
        if self._waits(asked.verifier):
            self._run(self._judge_open(asked))
            return
        self._say(Begun(asked.number))
        judged = attempt(asked.verifier, verifier, asked.answers, self._finish)
        self._say(Judged(asked.number, *judged))

    def _load_all(self, names: list[str]) -> str:
        for name in names:
            try:
                self._load(name)
            except BaseException as error:
                return _load_error(name, error)
        return ""

    def _load(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = load_verifier(name)
        return self._verifiers[name]

    def _waits(self, name: str) -> bool:
        """Whether it is loaded, and many of its calls may be open at a time."""
        return name in self._verifiers and is_asynchronous(self._verifiers[name])

    def _finish(self, verdict: Any) -> Any:
        """Wait for what a verifier returned that is no coroutine function."""

        async def waited() -> Any:
            return await verdict

        return self._run(waited())

    def _run(self, work: Any) -> Any:
        """One loop for all calls, so that a verifier can keep its connections."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    # ---- many calls

    async def _judge_open(self, first: Judge) -> None:
        """Judge an answer, and those that come before this one and others are done."""
        loop = asyncio.get_running_loop()
        self._begin(first)
        self._take_all()
        loop.add_reader(self._asks, self._read)
        try:
            while self._calls:
                self._idle.clear()
                await self._idle.wait()
        finally:
            loop.remove_reader(self._asks)

    def _read(self) -> None:
        data = os.read(self._asks, READ)
        if not data:
            os._exit(0)
        self._frames.feed(data)
        self._take_all()

    def _take_all(self) -> None:
        while (message := self._frames.take()) is not None:
            match message:
                case Judge(verifier=name) if self._waits(name) and not self._later:
                    self._begin(message)
                case Cancel(number=number):
                    if number in self._calls:
                        self._calls[number].cancel()
                case _:
                    self._later.append(message)

    def _begin(self, asked: Judge) -> None:
        self._say(Begun(asked.number, asynchronous=True))
        verifier = self._verifiers[asked.verifier]
        judging = attempt_beside(asked.verifier, verifier, asked.answers)
        task = asyncio.get_running_loop().create_task(judging)
        self._calls[asked.number] = task
        task.add_done_callback(partial(self._end, asked.number))

    def _end(self, number: int, task: asyncio.Task[Attempt]) -> None:
        del self._calls[number]
        cancelled = Attempt(Failed(error="it was cancelled before it was called"))
        self._say(Judged(number, *(cancelled if task.cancelled() else task.result())))
        if not self._calls:
            self._idle.set()

    def _say(self, message: FromProcess) -> None:
        if os.getpid() != self._pid:  # a verifier forked, and its child came back from the call
            os._exit(0)
        try:
            self._answers.write(frame(message))
            self._answers.flush()
        except BrokenPipeError:
            os._exit(0)


def _configure(start: Start) -> None:
    end_with_parent(start.owner)
    if start.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = start.memory_bytes if hard < 0 else min(start.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _load_error(name: str, error: BaseException) -> str:
    return f"verifier {name!r} cannot be loaded: {type(error).__name__}: {error}"
