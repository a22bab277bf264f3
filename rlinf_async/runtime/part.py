"""A call on one rank: it begins on the worker that is there, and is told how the method ended.

A worker that dies is waited for: the part begins again in the next life, with the channel ends that
it holds meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_async.channels import LatestReceiver
from rlinf_async.channels.ends import End
from rlinf_async.channels.ends import Sender as SenderEnd
from rlinf_async.runtime.backend import Stop, WorkerHandle
from rlinf_async.runtime.stall import internal
from rlinf_async.runtime.supervise import Supervisor
from rlinf_async.workers.errors import WorkerDied
from rlinf_async.workers.methods import Method

if TYPE_CHECKING:
    from rlinf_async.runtime.calls import GroupCall


class Part:
    """The call on one rank."""

    __slots__ = (
        "_again", "_arguments", "_call", "_ends", "_method", "_over", "_stop", "_supervisor",
        "_worker", "cancelled", "error", "value",
    )  # fmt: skip

    def __init__(
        self,
        call: GroupCall[Any],
        supervisor: Supervisor,
        method: Method,
        arguments: dict[str, Any],
    ) -> None:
        self._call = call
        self._supervisor = supervisor
        self._method = method
        self._arguments = arguments
        self._ends: Sequence[Any] = ()
        self._worker: WorkerHandle | None = None
        self._stop: Stop | None = None
        self._again: asyncio.Task[None] | None = None
        self._over = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False

    def own_ends(self) -> None:
        """Have every channel end among the arguments replaced by this part's own clone."""
        holder = f"{self._supervisor.name}.{self._method.name}"
        self._ends = ends = list[Any]()
        self._arguments = {
            name: _clone_ends(value, holder, ends) for name, value in self._arguments.items()
        }

    def close_ends(self) -> None:
        """It will not start: somebody else's clone could not be made."""
        for end in self._ends:
            end.close()

    def start(self) -> None:
        """Begin on the worker that is there, or on the next one as soon as it is."""
        self._supervisor.call_begun()
        worker = self._supervisor.handle_nowait()
        if worker is None:
            self._wait()
        else:
            self._begin(worker)

    def cancel(self) -> None:
        """End it as cancelled, once the method has ended."""
        if self._over or self.cancelled:
            return
        self.cancelled = True
        if self._again is not None:
            self._again.cancel()
        elif self._stop is not None:
            self._stop()

    def _begin(self, worker: WorkerHandle) -> None:
        self._worker = worker
        try:
            self._stop = worker.begin(self._method, self._arguments, self._ended)
        except Exception as error:  # not here: whoever calls must get the call first
            self._stop = None
            asyncio.get_running_loop().call_soon(self._ended, None, error)

    def _ended(self, value: Any, error: BaseException | None) -> None:
        if error is None:
            self._over = True
            self._stop = self._worker = None  # it leads back here: the garbage collector's work
            self.value = value
            for end in self._ends:
                end.close()
            self._call.ended(self)
            self._supervisor.call_ended(None)
        elif not isinstance(error, WorkerDied) or self._supervisor.stopping:
            self._end(error)
        elif self.cancelled:
            self._end(asyncio.CancelledError())
        else:
            if self._worker is not None:
                self._supervisor.lost(self._worker, error)
            self._wait()

    def _wait(self) -> None:
        name = f"{self._supervisor.name}.{self._method.name} waits for its worker"
        self._again = internal(asyncio.create_task(self._when_ready(), name=name))
        self._again.add_done_callback(self._waited)

    async def _when_ready(self) -> None:
        worker = await self._supervisor.handle()
        self._again = None
        self._begin(worker)

    def _waited(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._end(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._over = True
        self._stop = self._worker = None
        blamed: BaseException | None = None
        if isinstance(error, asyncio.CancelledError):
            self.cancelled = True
        else:
            self.error = error
            blamed = error if self._call.failed(error) else None
        for end in self._ends:
            _release(end, blamed)
        self._call.ended(self)
        self._supervisor.call_ended(blamed)


def _clone_ends(value: Any, holder: str, ends: list[Any]) -> Any:
    """The same argument with every channel end replaced by this call's own clone."""
    if isinstance(value, End):
        clone = value.clone(holder)
        ends.append(clone)
        return clone
    if isinstance(value, LatestReceiver):
        return value.clone()  # what one rank has seen is still news to the others
    if type(value) in (list, tuple):
        return type(value)(_clone_ends(one, holder, ends) for one in value)
    if type(value) is dict:
        return {key: _clone_ends(one, holder, ends) for key, one in value.items()}
    return value


def _release(end: Any, error: BaseException | None) -> None:
    """A call that failed must not look like a producer that finished."""
    if error is not None and isinstance(end, SenderEnd):
        end.fail(error)
    else:
        end.close()
