"""A local backend whose workers can be killed, as a process can: for restarts in any order."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf_async.runtime.local import LocalBackend, LocalWorker
from rlinf_async.runtime.supervise import MethodRun, WorkerSpec
from rlinf_async.workers.base import Failure, WorkerDied
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method


def death_of(name: str) -> WorkerDied:
    return WorkerDied(
        Failure(
            worker=name,
            host="here",
            pid=1,
            method="its process",
            error_type="WorkerDied",
            message="killed by a test",
            traceback="",
        )
    )


class Mortal(LocalWorker):
    """A worker whose calls end with its death."""

    name = ""

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> MethodRun:
        def ended(value: Any, error: BaseException | None) -> None:
            self.died.remove_done_callback(dies)
            if self.died.done() and not self.died.cancelled():
                value, error = None, self.died.result()
            on_end(value, error)

        def dies(died: asyncio.Future[WorkerDied]) -> None:
            if not died.cancelled():
                run.cancel()

        run = super().begin(method, arguments, ended)
        self.died.add_done_callback(dies)
        return run

    def kill(self) -> None:
        """End it as SIGKILL would."""
        if not self.died.done():
            self.died.set_result(death_of(self.name))


class MortalBackend(LocalBackend):
    """Remembers the workers of each name, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[str, list[Mortal]] = {}
        self.stillborn = 0
        """so many of the next starts die at once"""

    async def start(self, spec: WorkerSpec) -> Mortal:
        if self.stillborn:
            self.stillborn -= 1
            raise death_of(spec.info.name)
        started = await super().start(spec)
        started.__class__ = Mortal
        assert isinstance(started, Mortal)
        started.name = spec.info.name
        self.lives.setdefault(started.name, []).append(started)
        return started

    def kill(self, name: str) -> None:
        self.lives[name][-1].kill()
