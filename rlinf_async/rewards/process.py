"""The main program of a scoring process: it judges one answer at a time.

Its messages go over its former standard input and output. What a verifier prints goes to standard
error instead, and standard input is empty for it. The process ends with its owner: on Linux the
kernel kills it then, so also where a verifier hangs.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from io import FileIO
from types import FrameType
from typing import Any

import msgspec

from rlinf_async.deadlines import signal_at_end_of_parent
from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.rewards.judging import Verifier, judge, load_verifier
from rlinf_async.rewards.pool import (
    HEADER,
    Begun,
    FromProcess,
    Judge,
    Judged,
    Load,
    Loaded,
    Start,
    ToProcess,
    frame,
)


def main() -> None:
    """Serve until the owner closes its end."""
    asks, answers = _take_pipes()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _nothing)  # for the driver: the owner closes its end when it leaves
    serving = Serving(asks, answers)
    try:
        while serving.answer_next():
            pass
    except BrokenPipeError:
        pass
    os._exit(0)  # without waiting for threads that a verifier has left


def _take_pipes() -> tuple[FileIO, FileIO]:
    asks, answers = FileIO(os.dup(0), "rb"), FileIO(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return asks, answers


def _nothing(number: int, where: FrameType | None) -> None:
    """A handler rather than SIG_IGN, which what a verifier starts would inherit."""


class Serving:
    """Answers the owner's messages."""

    def __init__(self, asks: FileIO, answers: FileIO) -> None:
        self._asks = asks
        self._answers = answers
        self._decoder = msgspec.msgpack.Decoder(ToProcess)
        self._verifiers: dict[str, Verifier] = {}
        self._runner: asyncio.Runner | None = None
        self._pid = os.getpid()

    def answer_next(self) -> bool:
        """Answer one message; False when there will be no more."""
        asked = self._read()
        match asked:
            case None:
                return False
            case Start():
                _configure(asked)
            case Load():
                self._say(Loaded(self._load_all(asked.verifiers)))
            case Judge():
                self._say(Judged(self._judge(asked)))
        return True

    def _judge(self, asked: Judge) -> Outcome:
        try:
            verifier = self._load(asked.verifier)
        except BaseException as error:  # a module may raise anything, SystemExit too
            return Failed(error=_why(asked.verifier, error))
        self._say(Begun())
        return judge(asked.verifier, verifier, asked.answer, self._finish)

    def _load_all(self, names: list[str]) -> str:
        for name in names:
            try:
                self._load(name)
            except BaseException as error:
                return _why(name, error)
        return ""

    def _load(self, name: str) -> Verifier:
        if name not in self._verifiers:
            self._verifiers[name] = load_verifier(name)
        return self._verifiers[name]

    def _finish(self, verdict: Any) -> Any:
        """One loop for all calls, so that a verifier can keep its connections."""
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def waited() -> Any:
            return await verdict

        return self._runner.run(waited())

    def _say(self, message: FromProcess) -> None:
        if os.getpid() != self._pid:  # a verifier forked, and its child came back from the call
            os._exit(0)
        rest = memoryview(frame(message))
        while rest:
            rest = rest[self._answers.write(rest) :]

    def _read(self) -> ToProcess | None:
        header = self._read_exactly(HEADER.size)
        if header is None:
            return None
        body = self._read_exactly(HEADER.unpack(header)[0])
        return None if body is None else self._decoder.decode(body)

    def _read_exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            part = self._asks.read(size - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)


def _configure(start: Start) -> None:
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != start.owner:  # the owner ended before this was set
        os._exit(0)
    if start.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = start.memory_bytes if hard < 0 else min(start.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _why(name: str, error: BaseException) -> str:
    return f"verifier {name!r} cannot be loaded: {type(error).__name__}: {error}"
