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

`Pace` decides where blocking work runs, and `watch_loop` reports what blocks the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CoroutineType
from typing import Any, Final, ParamSpec, TypeVar

from rlinf_async.channels import ChannelClosed, LatestReceiver, Receiver, current_party
from rlinf_async.channels.ends import CallLeases, current_leases
from rlinf_async.deadlines import LoopWatch
from rlinf_async.observe.trace import Meter
from rlinf_async.workers.base import (
    OpenSpan,
    Worker,
    WorkerContext,
    WorkerError,
    WorkerInfo,
    is_secondary,
    leave,
    make,
)
from rlinf_async.workers.methods import Method, method_of

log = logging.getLogger(__name__)

PASSED_ON: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""What `start` and `stop` leave as it is. Everything else that a worker's code raises is its error:
also what derives from BaseException alone, as a panic of an extension in Rust does."""


class WorkerState(enum.Enum):
    """The state of a worker. See the module's table."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


OnEnd = Callable[[Any, BaseException | None], None]
"""Called once when a call ends: with its result, or with a `WorkerError` or `CancelledError`."""


LOOK_EVERY: Final = 0.005
"""seconds between two looks whether something is still under way in a call that leaves"""
PATIENCE: Final = 0.5
"""seconds for which a call that holds no lease any more may be busy with something else"""


class Invocation:
    """A call that runs."""

    __slots__ = (
        "_idle_since", "_leave_at", "_look_next", "_on_end", "arguments", "begun", "cancelled",
        "error", "leases", "method", "number", "task", "value",
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
        self.number = 0
        """number of the request that made it, where that came from another process"""
        self.leases = CallLeases()
        self._leave_at: asyncio.TimerHandle | None = None
        self._look_next: asyncio.Handle | None = None
        self._idle_since: float | None = None

    def leave(self, within: float) -> None:
        """Cancel the method in a moment in which nothing is under way in it, so that it can begin
        anew elsewhere: it takes no lease any more, those that it holds have ended, and all its
        tasks wait for items. After ``within`` seconds it is cancelled in any case.
        """
        if self.leases.leaving:
            return
        loop = asyncio.get_running_loop()
        self._leave_at = loop.call_later(within, self._leave_now)
        self.leases.leave(self._look_soon)
        self._look_soon()

    def _stop_leaving(self) -> None:
        for handle in (self._leave_at, self._look_next):
            if handle is not None:
                handle.cancel()

    def _leave_now(self) -> None:
        if self.task is None or not self.task.done():
            self.cancel()

    def _look_soon(self) -> None:
        if self._look_next is not None:
            self._look_next.cancel()
        self._look_next = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Cancel the method if nothing is under way in it."""
        self._look_next = None
        task, leases = self.task, self.leases
        if task is None or task.done() or self.cancelled or leases.held:
            self._idle_since = None  # the end of a lease is told
            return
        loop = asyncio.get_running_loop()
        since = self._idle_since = loop.time() if self._idle_since is None else self._idle_since
        if waits_for_items(task, leases) or (leases.used and loop.time() - since > PATIENCE):
            self.cancel()
        else:
            self._look_next = loop.call_later(LOOK_EVERY, self._look)

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
        self._stop_leaving()
        self._on_end(value, None)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Report the end of a call whose task is done, or never began, and did not report."""
        self._stop_leaving()
        if self.cancelled or task.cancelled():
            self._on_end(None, asyncio.CancelledError())
        else:
            self._on_end(self.value, self.error)


def waits_for_items(task: asyncio.Task[Any], leases: CallLeases) -> bool:
    """Whether a task of a call is parked, or waits for an item, or for tasks of which the same is
    true: cancelled now, it loses nothing."""
    if task in leases.parked or task.done():
        return True
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is None or awaited.done():
        return False
    if isinstance(awaited, asyncio.Task):
        return waits_for_items(awaited, leases)
    children = getattr(awaited, "_children", None)  # asyncio.gather
    for owner in _owners(task):
        if isinstance(owner, (Receiver, LatestReceiver)):
            return True
        if isinstance(owner, asyncio.TaskGroup):  # it is left, and waits for its tasks
            children = vars(owner)["_tasks"]
    tasks = children or ()
    return bool(tasks) and all(
        isinstance(one, asyncio.Task) and waits_for_items(one, leases) for one in tasks
    )


def _owners(task: asyncio.Task[Any]) -> Iterator[object]:
    """Whose methods a task is in, the outermost first."""
    inner: Any = task.get_coro()
    while isinstance(inner, CoroutineType):
        if inner.cr_frame is not None:
            yield inner.cr_frame.f_locals.get("self")
        inner = inner.cr_await


class WorkerHost:
    """Builds the worker, runs its calls, and takes it down."""

    def __init__(
        self,
        cls: type[Worker],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        info: WorkerInfo,
        span: OpenSpan | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.info = info
        self.state = WorkerState.CREATED
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"{info.name} compute")
        self.context = WorkerContext(info, executor, span, meter)
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
        self.state = WorkerState.STARTING
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
                self.state = WorkerState.FAILED
                self._release()
        self.state = WorkerState.READY

    def begin(self, method: str, arguments: dict[str, Any], on_end: OnEnd) -> Invocation:
        """Start a method and return at once; calls begin in the order in which they are made.

        Raises:
            WorkerError: the worker takes no calls now.
        """
        if self.state is not WorkerState.READY:
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

    def doing(self) -> tuple[str, ...]:
        """What the worker says that it does, beside its open spans."""
        return () if self._worker is None else self._worker.doing()

    async def stop(self) -> None:
        """Cancel the calls that run, run ``teardown``, and end the compute thread."""
        if self.state in (WorkerState.STOPPED, WorkerState.STOPPING):
            return
        ready = self.state is WorkerState.READY
        self.state = WorkerState.STOPPING
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
            self.state = WorkerState.STOPPED

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
        current_leases.set(invocation.leases)
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


P = ParamSpec("P")
R = TypeVar("R")
Clock = Callable[[], float]

SHORT: Final = 0.001
"""seconds; some ten times the cost of a switch, and far below a noticeable block of the loop"""

NEVER_TRIED: Final = 20
"""times ``SHORT``: work that took longer in the thread, waits included, gets no trial"""

LONGEST_INTERVAL: Final = 4096
"""largest number of runs in the thread between two trials"""


class Pace:
    """Runs a worker's blocking work on the event loop while it is short, else in a thread.

    A switch to the compute thread and back costs more than a step of a light environment, or the
    forward pass of a small network; and while a thread computes, it and the loop contend for the
    interpreter. But work that takes much longer than a switch must not block the event loop. How
    long it takes is only known when it runs, and may change. So each kind of work is measured, and
    runs::

        first, and while it is long  ->  in the compute thread
        once it computed little      ->  on the event loop, on trial
        too long there               ->  in the compute thread; each trial comes later than the last

    Invariant: no two pieces of one `Pace` run at the same time, however often callers are
    cancelled.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        short: float = SHORT,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """Work of less than ``short`` seconds runs on the loop; with 0 none ever does.

        ``executor`` has another thread than the worker's compute thread.
        """
        self._worker = worker
        self._executor = executor
        self._short = short
        self._kinds: dict[str, _Kind] = {}
        self._turn = threading.Lock()
        self._clocks: tuple[Clock, Clock] | None = None

    async def run(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``fn`` on the loop or in the thread, as a span named ``kind`` of the trace."""
        found = self._kinds.get(kind)
        # The thread holds the lock where a caller was cancelled and left its work running there.
        if found is None or not found.on_loop or not self._turn.acquire(blocking=False):
            work: Callable[[], R] = partial(self._in_thread, kind, fn, *args, **kwargs)
            self._clocks = self._clocks or _clocks()
            if self._executor is not None:
                return await self._worker.compute_in(self._executor, work)
            return await self._worker.compute(work)
        wall = (self._clocks or _REAL)[0]
        started = wall()
        try:
            with self._worker.span(kind):
                return fn(*args, **kwargs)
        finally:
            self._turn.release()
            found.ran_on_loop(wall() - started, self._short)

    def _in_thread(self, kind: str, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        wall, cpu = self._clocks or _REAL
        with self._turn:
            started, computed = wall(), cpu()
            try:
                with self._worker.span(kind):
                    return fn(*args, **kwargs)
            finally:
                found = self._kinds.setdefault(kind, _Kind())
                found.ran_in_thread(wall() - started, cpu() - computed, self._short)


class _Kind:
    """Measurements of one kind of work."""

    __slots__ = ("_interval", "_until_trial", "on_loop")

    def __init__(self) -> None:
        self.on_loop = False
        self._interval = 1
        self._until_trial = 1

    def ran_in_thread(self, seconds: float, computed: float, short: float) -> None:
        """Count a run towards the next trial if it computed for less than ``short`` seconds.

        Its wall time says less: the loop's thread may have held the interpreter meanwhile.
        """
        if computed < short and seconds < short * NEVER_TRIED:
            self._until_trial -= 1
            self.on_loop = self._until_trial <= 0

    def ran_on_loop(self, seconds: float, short: float) -> None:
        """Stay on the loop if it took less than ``short`` seconds."""
        if seconds < short:
            self._interval = max(1, self._interval - 1)
            return
        self.on_loop = False
        self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._until_trial = self._interval


_REAL: Final[tuple[Clock, Clock]] = (time.perf_counter, time.thread_time)


def _clocks() -> tuple[Clock, Clock]:
    """Return clocks for work in the thread: of wall time, and of CPU time.

    In virtual time work takes none, so that every run with a seed is the same.
    """
    loop = asyncio.get_running_loop()
    return (loop.time, loop.time) if getattr(loop, "virtual", False) else _REAL


watch_log = logging.getLogger("rlinf_async.watchdog")


def watch_loop(name: str, limit: float = 5.0) -> LoopWatch:
    """Log from now on what blocks the running loop for ``limit`` seconds. Blocking work belongs in
    `Worker.compute`."""

    def warn(stack: str) -> None:
        watch_log.warning(
            "the event loop of %s has not answered for %.1f s; run blocking work with "
            "'await self.compute(fn, ...)'. It is in:\n%s",
            name,
            limit,
            stack,
        )

    loop = asyncio.get_running_loop()
    watch = LoopWatch(loop, limit=limit, report=warn, name=f"{name} watchdog")
    watch.start()
    return watch
