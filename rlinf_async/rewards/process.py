"""The main program of a scoring process: it judges one answer at a time.

Its messages go over its former standard input and output. What a verifier prints goes to standard
error instead, and standard input is empty for it. The process ends with its owner: on Linux the
kernel kills it then, so also where a verifier hangs.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any, BinaryIO

import msgspec

from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.processes import (
    end_with_parent,
    frame,
    leave_signals_to_driver,
    read_message,
)
from rlinf_async.rewards.judging import Verifier, judge, load_verifier
from rlinf_async.rewards.pool import (
    Begun,
    FromProcess,
    Judge,
    Judged,
    Load,
    Loaded,
    Start,
    ToProcess,
)


def main() -> None:
    """Serve until the owner closes its end."""
    asks, answers = _take_pipes()
    leave_signals_to_driver()
    serving = Serving(asks, answers)
    try:
        while serving.answer_next():
            pass
    except BrokenPipeError:
        pass
    os._exit(0)  # without waiting for threads that a verifier has left


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    asks, answers = open(os.dup(0), "rb"), open(os.dup(1), "wb")  # noqa: SIM115, until the end
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return asks, answers


class Serving:
    """Answers the owner's messages."""

    def __init__(self, asks: BinaryIO, answers: BinaryIO) -> None:
        self._asks = asks
        self._answers = answers
        self._decoder = msgspec.msgpack.Decoder(ToProcess)
        self._verifiers: dict[str, Verifier] = {}
        self._runner: asyncio.Runner | None = None
        self._pid = os.getpid()

    def answer_next(self) -> bool:
        """Answer one message; False when there will be no more."""
        match read_message(self._asks, self._decoder):
            case None:
                return False
            case Start() as start:
                _configure(start)
            case Load(verifiers=verifiers):
                self._say(Loaded(self._load_all(verifiers)))
            case Judge() as asked:
                self._say(Judged(self._judge(asked)))
        return True

    def _judge(self, asked: Judge) -> Outcome:
        try:
            verifier = self._load(asked.verifier)
        except BaseException as error:  # a module may raise anything, SystemExit too
            return Failed(error=_load_error(asked.verifier, error))
        self._say(Begun())
        return judge(asked.verifier, verifier, asked.answer, self._finish)

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
        self._answers.write(frame(message))
        self._answers.flush()


def _configure(start: Start) -> None:
    end_with_parent(start.owner)
    if start.memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = start.memory_bytes if hard < 0 else min(start.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _load_error(name: str, error: BaseException) -> str:
    return f"verifier {name!r} cannot be loaded: {type(error).__name__}: {error}"
