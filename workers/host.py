"""What runs a worker where it lives: one for each rank, in whichever process.

============  ===============================  ==========================================
state         entered by                       left by
============  ===============================  ==========================================
``CREATED``   construction                     `start`
``STARTING``  `start`: ``__init__``, ``setup``  success -> ``READY``, failure -> ``FAILED``
``READY``     calls are taken from the mailbox  `stop`
``STOPPING``  `stop`: calls are cancelled       ``teardown`` is done
``STOPPED``   nothing of the worker is left
``FAILED``    ``__init__`` or ``setup`` raised
============  ===============================  ==========================================
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from rlinf_async.channels import Channel, ChannelClosed, current_party
from rlinf_async.channels.waitfor import WaitFuture
from rlinf_async.workers.base import Worker, make
from rlinf_async.workers.collective import leave
from rlinf_async.workers.context import OpenSpan, WorkerContext, WorkerInfo
from rlinf_async.workers.errors import WorkerError, is_secondary

log = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a worker is in its life. See the module's table."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Invocation(msgspec.Struct, eq=False):
    """A call in the worker's mailbox."""

    method: str
    arguments: dict[str, Any]
    result: asyncio.Future[Any]


class WorkerHost:
    """Builds the worker, serves its mailbox, and takes it down."""

    def __init__(
        self,
        cls: type[Worker],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        info: WorkerInfo,
        span: OpenSpan | None = None,
    ) -> None:
        self.info = info
        self.state = State.CREATED
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"{info.name} compute")
        self.context = WorkerContext(info, executor, span)
        self.mailbox = Channel(Invocation, name=f"{info.name} mailbox", capacity=1024)
        self._make = (cls, args, kwargs)
        self._worker: Worker | None = None
        self._server: asyncio.Task[None] | None = None
        self.calls: dict[asyncio.Task[None], Invocation] = {}

    async def start(self) -> None:
        """Build the worker and run its ``setup``.

        Raises:
            WorkerError: either of them raised.
        """
        self.state = State.STARTING
        cls, args, kwargs = self._make
        token = current_party.set(f"{self.info.name}.setup")
        step = "__init__"
        try:
            self._worker = make(cls, self.context, args, kwargs)
            step = "setup"
            await self._worker.setup()
            step = "done"
        except Exception as error:
            raise self.wrap(error, step) from error
        finally:
            current_party.reset(token)
            if step != "done":
                self.state = State.FAILED
                self._let_go()
        self.state = State.READY
        self._server = asyncio.create_task(self._serve(), name=f"{self.info.name} mailbox")

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run a method and return its result. Cancelling this cancels the method.

        Raises:
            WorkerError: the method raised, or the worker is not ready.
        """
        result: asyncio.Future[Any] = WaitFuture()
        try:
            await self.mailbox.sender.put(Invocation(method, arguments, result))
        except ChannelClosed as error:
            raise self.wrap(error, method) from error
        try:
            return await result
        except asyncio.CancelledError:
            await self._cancel(result)
            raise

    async def stop(self) -> None:
        """Cancel what runs, run ``teardown``, and give the compute thread back."""
        if self.state in (State.STOPPED, State.STOPPING):
            return
        ready = self.state is State.READY
        self.state = State.STOPPING
        self.mailbox.close()
        try:
            await self._end_calls()
            if ready and self._worker is not None:
                await self._worker.teardown()
        except Exception as error:
            raise self.wrap(error, "teardown") from error
        finally:
            self._let_go()
            self.state = State.STOPPED

    def _let_go(self) -> None:
        leave(self.context)
        self.context.executor.shutdown(wait=False, cancel_futures=True)

    async def _end_calls(self) -> None:
        if self._server is not None:  # first: it starts no more calls then
            await asyncio.gather(self._server, return_exceptions=True)
        for task in self.calls:
            task.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)

    async def _serve(self) -> None:
        async for invocation in self.mailbox.receiver:
            if invocation.result.done():  # cancelled before it began
                continue
            if self.state is not State.READY:  # put before the mailbox was closed
                invocation.result.cancel()
                continue
            label = f"{self.info.name}.{invocation.method}"
            task = asyncio.create_task(self._run(invocation), name=label)
            self.calls[task] = invocation
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        invocation = self.calls.pop(task)
        if not invocation.result.done():
            invocation.result.cancel()

    async def _run(self, invocation: Invocation) -> None:
        current_party.set(f"{self.info.name}.{invocation.method}")
        try:
            method = getattr(self._worker, invocation.method)
            value = await method(**invocation.arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            inside = RuntimeError("it awaited what was cancelled; nobody had cancelled the call")
            inside.__cause__ = error
            self._fail(invocation, inside)
        except Exception as error:
            self._fail(invocation, error)
        else:
            if not invocation.result.done():
                invocation.result.set_result(value)

    def _fail(self, invocation: Invocation, error: Exception) -> None:
        failure = self.wrap(error, invocation.method)
        if not invocation.result.done():
            invocation.result.set_exception(failure)
            invocation.result.exception()  # retrieved: the caller may be gone
        elif not is_secondary(failure):
            log.error("after it was cancelled, %s", failure)

    async def _cancel(self, result: asyncio.Future[Any]) -> None:
        for task, invocation in list(self.calls.items()):
            if invocation.result is result:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])

    def wrap(self, error: BaseException, method: str) -> WorkerError:
        """The error as one of this worker's."""
        wrapped = WorkerError.of(
            error, worker=self.info.name, host=socket.gethostname(), pid=os.getpid(), method=method
        )
        wrapped.__cause__ = error
        return wrapped
