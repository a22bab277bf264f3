"""Runs a worker in its process: one host for each rank, with either backend.

============  ===============================  ==========================================
state         entered by                       left by
============  ===============================  ==========================================
``CREATED``   construction                     `start`
``STARTING``  `start`: ``__init__``, ``setup``  success -> ``READY``, failure -> ``FAILED``
``READY``     calls run, several at once        `stop`
``STOPPING``  `stop`: calls are cancelled       ``teardown`` is done
``STOPPED``   nothing of the worker is left
``FAILED``    ``__init__`` or ``setup`` raised
============  ===============================  ==========================================
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rlinf_async.channels import ChannelClosed, current_party
from rlinf_async.workers.base import Worker, make
from rlinf_async.workers.collective import leave
from rlinf_async.workers.context import OpenSpan, WorkerContext, WorkerInfo
from rlinf_async.workers.errors import WorkerError, is_secondary
from rlinf_async.workers.methods import Method, method_of

log = logging.getLogger(__name__)

PASSED_ON: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""What `start` and `stop` leave as it is. Everything else that a worker's code raises is its error:
also what derives from BaseException alone, as a panic of an extension in Rust does."""


class State(enum.Enum):
    """The state of a worker. See the module's table."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


OnEnd = Callable[[Any, BaseException | None], None]
"""Called once when a call ends: with its result, or with a `WorkerError` or `CancelledError`."""


class Invocation:
    """A call that runs."""

    __slots__ = (
        "_on_end", "arguments", "begun", "cancelled", "error", "method", "task", "value",
    )  # fmt: skip

    def __init__(self, method: str, arguments: dict[str, Any], on_end: OnEnd) -> None:
        self.method = method
        self.arguments = arguments
        self.value: Any = None
        """result of a method that returned while its task was being made; reported afterwards"""
        self.error: BaseException | None = None
        self.begun = False
        """whether its method has been entered"""
        self.cancelled = False
        """whether its caller cancelled it"""
        self._on_end = on_end
        self.task: asyncio.Task[None] | None = None
        """the task in which its method runs, once started"""

    def cancel(self) -> None:
        """Cancel the method. The call has ended, as cancelled, once the method has.

        The method is entered first, up to where it waits: a call begins on every rank of a group
        or on none, even if it fails on one before another rank has entered it.
        """
        self.cancelled = True
        if self.task is not None and self.begun:
            self.task.cancel()

    def returned(self, value: Any) -> None:
        """Report the result. Only the end of the task is left, which nobody waits for."""
        self._on_end(value, None)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Report the end of a call whose task is done, or never began, and did not report."""
        if self.cancelled or task.cancelled():
            self._on_end(None, asyncio.CancelledError())
        else:
            self._on_end(self.value, self.error)


class WorkerHost:
    """Builds the worker, runs its calls, and takes it down."""

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
        self._make = (cls, args, kwargs)
        self._worker: Worker | None = None
        self._labels: dict[str, str] = {}
        self._methods: dict[str, Method] = {}
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
        except PASSED_ON:
            raise
        except BaseException as error:
            raise self.wrap(error, step) from error
        finally:
            current_party.reset(token)
            if step != "done":
                self.state = State.FAILED
                self._release()
        self.state = State.READY

    def begin(self, method: str, arguments: dict[str, Any], on_end: OnEnd) -> Invocation:
        """Start a method and return at once; calls begin in the order in which they are made.

        Raises:
            WorkerError: the worker takes no calls now.
        """
        if self.state is not State.READY:
            closed = ChannelClosed(f"{self.info.name} takes no calls: it is {self.state.value}")
            raise self.wrap(closed, method)
        invocation = Invocation(method, arguments, on_end)
        label = self._labels.get(method)
        if label is None:
            label = self._labels[method] = f"{self.info.name}.{method}"
        task = asyncio.get_running_loop().create_task(self._run(invocation, label), name=label)
        invocation.task = task
        self.calls[task] = invocation
        task.add_done_callback(self._forget)
        return invocation

    async def stop(self) -> None:
        """Cancel the calls that run, run ``teardown``, and end the compute thread."""
        if self.state in (State.STOPPED, State.STOPPING):
            return
        ready = self.state is State.READY
        self.state = State.STOPPING
        try:
            await self._end_calls()
            if ready and self._worker is not None:
                await self._worker.teardown()
        except PASSED_ON:
            raise
        except BaseException as error:
            raise self.wrap(error, "teardown") from error
        finally:
            self._release()
            self.state = State.STOPPED

    def _release(self) -> None:
        leave(self.context)
        self.context.executor.shutdown(wait=False, cancel_futures=True)

    async def _end_calls(self) -> None:
        running = list(self.calls)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, invocation: Invocation, label: str) -> None:
        current_party.set(label)
        invocation.begun = True
        if invocation.cancelled and invocation.task is not None:
            invocation.task.cancel()
        try:
            value = await getattr(self._worker, invocation.method)(**invocation.arguments)
            self._method(invocation.method).check_result(value)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            inside = RuntimeError("a task or future that it awaited was cancelled, not the call")
            inside.__cause__ = error
            self._fail(invocation, inside)
        except BaseException as error:  # also what a panic in Rust raises; `sys.exit` ends no loop
            self._fail(invocation, error)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            self._returned(invocation, value)

    def _method(self, name: str) -> Method:
        found = self._methods.get(name)
        if found is None:
            assert self._worker is not None
            cls = type(self._worker)
            found = self._methods[name] = method_of(cls, getattr(cls, name))
        return found

    def _returned(self, invocation: Invocation, value: Any) -> None:
        task = invocation.task
        if task is None:  # an eager one: `begin` has not returned yet
            invocation.value = value
        elif not invocation.cancelled:
            del self.calls[task]
            task.remove_done_callback(self._forget)  # saves a turn of the loop that has no effect
            invocation.returned(value)

    def _fail(self, invocation: Invocation, error: BaseException) -> None:
        failure = self.wrap(error, invocation.method)
        if invocation.cancelled and not is_secondary(failure):
            log.error("after it was cancelled, %s", failure)
        invocation.error = failure

    def _forget(self, task: asyncio.Task[None]) -> None:
        invocation = self.calls.pop(task, None)
        if invocation is not None:
            invocation.ended(task)

    def wrap(self, error: BaseException, method: str) -> WorkerError:
        """The error as one of this worker's."""
        host = self.info.host or socket.gethostname()
        wrapped = WorkerError.of(
            error, worker=self.info.name, host=host, pid=os.getpid(), method=method
        )
        wrapped.__cause__ = error
        return wrapped
