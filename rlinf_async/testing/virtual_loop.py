"""An asyncio event loop in virtual time with a seeded wake-up order.

Nothing here waits for real: when no callback is ready the clock jumps to the next timer. When there
is no timer either, no task can ever go on, and the loop says so with `Deadlock`. Which of the ready
callbacks runs next is drawn from the seed among the legal ones, so that the same seed gives the
same run, byte for byte, and another seed another run that asyncio could have had.

What is legal: a *lane* keeps what asyncio promises. A task's own steps and the callbacks that it
scheduled run in the order in which they were scheduled. Between lanes nothing is promised, so
`SeededQueue` takes any of them; that is where races show::

    a step of a task                  lane of that task
    a callback, by call_soon          lane of whoever scheduled it
    a timer, an executor's function   a lane of its own

One promise holds across lanes: a task that awaits a future goes on after the callbacks that were
added to that future.

There are no sockets, processes or signals, and no thread but the loop's own: a function given to an
executor runs inline, as a callback of its own. Seconds that it lets pass (`let_pass`) go by before
its result is there; two functions of one executor do so side by side.

Errors of the test kit; all but the last are findings about the code under test, so a test runner
shows them as failures::

    AssertionError
    ├── Deadlock          every task waits and nothing is left that could wake one
    ├── Livelock          the step limit was reached: tasks run, but the work does not end
    ├── LoopBlocked       something kept a real event loop from answering
    ├── SequenceBroken    a step of a `Sequencer` was repeated or given up
    └── InvariantBroken   items lost, doubled or reordered, a bound passed, something left behind
    ExceptionGroup
    └── Unhandled         errors that reached only the loop's exception handler
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import linecache
import math
import os
import random
import threading
from asyncio import Future, Handle
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

from rlinf_async.deadlines import taking_time
from rlinf_async.workers.base import Deadlock as NobodyCanGoOn


class ScheduledCallback:
    """One scheduled callback, its lane, and the entries that must wait for it."""

    __slots__ = ("done", "followers", "future", "handle", "is_step", "label", "lane", "waits_for")

    def __init__(
        self,
        handle: Handle,
        *,
        label: str = "",
        lane: Hashable = "main",
        is_step: bool = False,
        future: Future[Any] | None = None,
    ) -> None:
        self.handle = handle
        self.label = label
        self.lane = lane
        self.is_step = is_step
        """whether the callback runs a task, and is not a plain one"""
        self.future = future
        """the future that it was called for, if any"""
        self.followers: list[ScheduledCallback] = []
        self.waits_for = 0
        self.done = False


class ReadyQueue(Protocol):
    """Takes entries that are ready and hands out one at a time, in a legal order."""

    def push(self, entry: ScheduledCallback) -> None:
        """Add an entry behind all others of its lane."""

    def pop(self) -> ScheduledCallback | None:
        """Take an entry that may run now; None if there is none."""

    def finished(self, entry: ScheduledCallback) -> None:
        """Say that an entry has run: those that waited for it may run now."""


class FifoQueue:
    """The order of a stock asyncio loop."""

    def __init__(self) -> None:
        self._entries: deque[ScheduledCallback] = deque()

    def push(self, entry: ScheduledCallback) -> None:
        """Add an entry behind all others."""
        self._entries.append(entry)

    def pop(self) -> ScheduledCallback | None:
        """Take the oldest entry."""
        return self._entries.popleft() if self._entries else None

    def finished(self, entry: ScheduledCallback) -> None:
        """Do nothing: the order is total, so no entry waits for another."""


class SeededQueue:
    """Any legal order; the same seed and the same pushes give the same one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random
        self._runnable: list[ScheduledCallback] = []
        self._last_in_lane: dict[Hashable, ScheduledCallback] = {}
        self._last_callback_of: dict[Future[Any], ScheduledCallback] = {}

    def push(self, entry: ScheduledCallback) -> None:
        """Add an entry behind the others of its lane and behind the callbacks of its future."""
        self._follow(entry, self._last_in_lane.get(entry.lane))
        self._last_in_lane[entry.lane] = entry
        if entry.future is not None:
            self._follow(entry, self._last_callback_of.get(entry.future))
            if not entry.is_step:
                self._last_callback_of[entry.future] = entry
        if not entry.waits_for:
            self._runnable.append(entry)

    def pop(self) -> ScheduledCallback | None:
        """Take any entry whose predecessors have run."""
        runnable = self._runnable
        if not runnable:
            return None
        index = int(self._random() * len(runnable))
        runnable[index], runnable[-1] = runnable[-1], runnable[index]
        return runnable.pop()

    def finished(self, entry: ScheduledCallback) -> None:
        """Release the entries that waited for this one."""
        entry.done = True
        if self._last_in_lane.get(entry.lane) is entry:
            del self._last_in_lane[entry.lane]
        future = entry.future
        if future is not None and self._last_callback_of.get(future) is entry:
            del self._last_callback_of[future]
        for follower in entry.followers:
            follower.waits_for -= 1
            if not follower.waits_for:
                self._runnable.append(follower)

    @staticmethod
    def _follow(entry: ScheduledCallback, before: ScheduledCallback | None) -> None:
        if before is not None and not before.done:
            before.followers.append(entry)
            entry.waits_for += 1


_LIBRARIES = (
    os.path.dirname(asyncio.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # rlinf_async itself
)


def is_waiting(task: asyncio.Task[Any]) -> bool:
    """Whether a task waits for a future that is not done: it cannot run now."""
    waiter = _waiter(task)
    return waiter is not None and not waiter.done()


def unfinished(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """The tasks of a loop that have not finished, by name."""
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """One line a task: its name, where it stands, and what it waits for."""
    return "\n".join(f"  {task.get_name()} {_where(task)}{_awaited(task)}" for task in tasks)


def describe_callback(callback: Callable[..., object]) -> str:
    """A callback's name, without addresses."""
    inner: Any = callback
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return short_name(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def short_name(qualname: str) -> str:
    """``test_it.<locals>.producer`` as ``producer``."""
    return qualname.rpartition("<locals>.")[2]


def _waiter(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    # Not public, but the same attribute in every CPython since 3.4, and uvloop runs the same tasks.
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    return waiter


def _where(task: asyncio.Task[Any]) -> str:
    stack = _await_stack(task.get_coro())
    if not stack:
        return "has not started"
    own = [place for place in stack if not place[0].co_filename.startswith(_LIBRARIES)]
    code, line = (own or stack)[-1]
    text = linecache.getline(code.co_filename, line).strip()
    inside = "" if code is stack[-1][0] else f" [in {short_name(stack[-1][0].co_qualname)}]"
    place = f"{_shown(code.co_filename)}:{line}"
    return f"stands in {short_name(code.co_qualname)} ({place}): {text}{inside}"


def _await_stack(awaitable: Any) -> list[tuple[CodeType, int]]:
    """Code and line of each suspended coroutine or generator, from the outermost in."""
    places: list[tuple[CodeType, int]] = []
    while awaitable is not None:
        frame: FrameType | None = _attribute(awaitable, "frame")
        if frame is not None and frame.f_lasti >= 0:
            places.append((frame.f_code, frame.f_lineno))
        awaitable = _attribute(awaitable, "await") or _attribute(awaitable, "yieldfrom")
    return places


def _attribute(awaitable: Any, name: str) -> Any:
    for prefix in ("cr_", "ag_", "gi_"):
        found = getattr(awaitable, prefix + name, None)
        if found is not None:
            return found
    return None


def _awaited(task: asyncio.Task[Any]) -> str:
    waiter = _waiter(task)
    if isinstance(waiter, asyncio.Task):
        return f" [waits for task {waiter.get_name()}]"
    return ""


def _shown(path: str) -> str:
    """A path as seen from the working directory, or its last two parts."""
    inside = os.path.relpath(path)
    return inside if not inside.startswith("..") else os.sep.join(path.split(os.sep)[-2:])


class Deadlock(NobodyCanGoOn, AssertionError):
    """Every task waits, no timer is set, and the main task has not finished.

    Also what a cluster raises on a real loop, so that one ``except`` serves both.
    """


class Livelock(AssertionError):
    """The step limit was reached before the main task finished."""


class LoopBlocked(AssertionError):
    """Something kept the event loop from answering for longer than the limit."""


class SequenceBroken(AssertionError):
    """A step of a sequence was repeated, or given up while it waited for its turn."""


class InvariantBroken(AssertionError):
    """An invariant that was watched does not hold; the message names the items."""


class Unhandled(ExceptionGroup[Exception]):
    """Errors in callbacks and in forgotten tasks, which asyncio only logs."""


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualFuture(asyncio.Future[T]):
    """A future whose hash is its number, so that sets of futures keep one order in every run."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its number: ``TaskGroup`` and ``asyncio.wait`` iterate over sets."""

    def __init__(
        self,
        number: int,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        **options: Any,
    ) -> None:
        self._number = number  # before asyncio hashes the task to register it
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time; ``seed=None`` keeps asyncio's plain first-in-first-out order.

    `describe` holds functions whose text is added to the report of a `Deadlock`. A loop that takes
    more than ``max_steps`` steps raises `Livelock`; None: no limit. `trace` keeps the last
    ``trace_lines`` steps; with 0 no step gets a label, which makes long simulations faster.
    """

    virtual: Final = True
    """Runtimes look at this to run compute inline instead of in a thread."""

    def __init__(
        self,
        seed: int | None = 0,
        *,
        max_steps: int | None = 1_000_000,
        trace_lines: int = 100_000,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.steps = 0
        self._passed: list[float] = []
        """seconds that the function which an executor runs now has let pass"""
        self.describe: list[Callable[[], str]] = []
        self._step_limit = self._max_steps = math.inf if max_steps is None else max_steps
        self._labels = trace_lines > 0
        self._bare = seed is None and not self._labels
        """whether nothing but the order of arrival decides: no lanes, no labels"""
        self._entries: ReadyQueue = FifoQueue() if seed is None else SeededQueue(seed)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._now = 0.0
        self._lane: Hashable = "main"
        self._in_executor = False
        self._numbers = itertools.count(1)
        self._task_names: Counter[str] = Counter()
        self._trace: deque[tuple[float, str]] = deque(maxlen=trace_lines)
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Seconds of virtual time since the loop was made; in an executor's function, with those
        that it has let pass."""
        return self._now + sum(self._passed) if self._passed else self._now

    @property
    def trace(self) -> bytes:
        """One line a step, ``time what``: equal for two runs only if they took the same steps."""
        lines = [f"{when:.6f} {what}\n" for when, what in self._trace]  # none without labels
        left_out = self.steps - len(lines)
        head = [f"({left_out} earlier steps left out)\n"] if left_out else []
        return "".join(head + lines).encode()

    def until_idle(self) -> asyncio.Future[None]:
        """A future that is done when every task waits, before the clock moves on."""
        waiter: asyncio.Future[None] = self.create_future()
        self._idle_waiters.append(waiter)
        return waiter

    # What asyncio asks of a loop.

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a reproducible hash."""
        return VirtualFuture(next(self._numbers), self)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback in the lane of whoever schedules it."""
        self._check_usable()
        handle = asyncio.Handle(callback, args, self, context)
        self._push(handle, callback, args, self._lane)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a callback like `call_soon`: there are no other threads.

        Raises RuntimeError in another thread, and in an executor's function that waits for a
        coroutine on this loop: it runs inline, so the loop could never answer.
        """
        origin = getattr(callback, "__qualname__", "")
        if self._in_executor and origin.startswith("run_coroutine_threadsafe."):
            raise RuntimeError(
                "a function given to an executor waits for a coroutine on a virtual loop, which "
                "runs the function inline and cannot answer: test this code on a real loop"
            )
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a virtual time; timers of the same time run in any order."""
        self._check_usable()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the function inline as a callback of its own; the executor is not used."""
        self._check_usable()
        future: asyncio.Future[T] = self.create_future()
        handle = asyncio.Handle(self._execute, (future, func, *args), self, contextvars.Context())
        self._push(handle, func, (), next(self._numbers))
        return future

    # The machinery.

    def _execute(self, future: asyncio.Future[T], func: Callable[[*Ts], T], *args: *Ts) -> None:
        if future.cancelled():  # as an executor does with work that it has not begun
            return
        # In a thread there would be no running loop either.
        asyncio._set_running_loop(None)
        self._in_executor = True
        passed = self._passed = list[float]()
        answer: Callable[[], None]
        try:
            with taking_time(passed.append):
                answer = partial(future.set_result, func(*args))
        except Exception as error:
            answer = partial(future.set_exception, error)
        finally:
            self._in_executor, self._passed = False, []
            asyncio._set_running_loop(self)
        if passed:
            self.call_later(sum(passed), _unless_done, future, answer)
        else:
            answer()

    def _push(
        self,
        handle: asyncio.Handle,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        lane: Hashable,
    ) -> None:
        if self._bare:
            self._entries.push(ScheduledCallback(handle))
            return
        task = getattr(callback, "__self__", None)
        future = args[0] if args and isinstance(args[0], asyncio.Future) else None
        is_step, label = isinstance(task, asyncio.Task), ""
        if isinstance(task, asyncio.Task):
            lane = task
            if self._labels:
                label = f"step {task.get_name()}"
        elif self._labels:
            label = f"call {describe_callback(callback)}"
            if isinstance(future, asyncio.Task):
                label += f" of {future.get_name()}"
        self._entries.push(
            ScheduledCallback(handle, label=label, lane=lane, is_step=is_step, future=future)
        )

    def _run_once(self) -> None:
        """Run one callback, or let the clock jump: `BaseEventLoop.run_forever` calls this."""
        if self.steps >= self._step_limit:
            self._step_limit += self._max_steps  # room for the tasks to be cancelled
            raise Livelock(self._report(f"no end in {self.steps} steps"))
        entry = self._entries.pop()
        if entry is None:
            self._nothing_ready()
            return
        if not entry.handle.cancelled():
            self._step(entry)
        self._entries.finished(entry)

    def _step(self, entry: ScheduledCallback) -> None:
        self.steps += 1
        if self._labels:
            self._trace.append((self._now, entry.label))
        self._lane = entry.lane
        try:
            entry.handle._run()
        finally:
            self._lane = "main"

    def _nothing_ready(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        stopping: bool = getattr(self, "_stopping", False)
        if not waiters and not self._advance() and not stopping:
            raise Deadlock(self._report("no task can go on"))

    def _advance(self) -> bool:
        """Jump to the next timer and make ready what is due then."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            return False
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            _, number, handle = heapq.heappop(timers)
            self._push(handle, *_call_of(handle), number)
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """`TimerHandle.cancel` calls this: forget cancelled timers once they are the most."""
        self._cancelled_timers += 1
        if self._cancelled_timers > 64 and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _check_usable(self) -> None:
        running_in: int | None = getattr(self, "_thread_id", None)
        if running_in == threading.get_ident():  # as nearly always; one that runs is not closed
            return
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if running_in is not None:
            raise RuntimeError(
                "a virtual loop was called from another thread, whose timing no seed can repeat: "
                "give the function to run_in_executor or asyncio.to_thread, which run it inline"
            )

    def tail(self, lines: int = 12) -> str:
        """The last steps of the trace."""
        last = list(self._trace)[-lines:]
        return "\n".join(f"  {when:.6f} {what}" for when, what in last)

    def _report(self, finding: str) -> str:
        tasks = unfinished(self)
        order = "first in, first out" if self.seed is None else f"seed {self.seed}"
        lines = [
            f"{finding} (virtual time {self._now:.3f} s, {self.steps} steps, {order})",
            f"{len(tasks)} unfinished tasks:",
            describe_tasks(tasks),
        ]
        return "\n".join(lines + [text for hook in self.describe if (text := hook())])


def _unless_done(future: asyncio.Future[Any], answer: Callable[[], None]) -> None:
    """Answer a future that nobody has cancelled meanwhile."""
    if not future.done():
        answer()


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
    **options: Any,
) -> asyncio.Task[T]:
    """Make a task with a reproducible hash and, unless it is given a name, a reproducible name."""
    if not isinstance(loop, VirtualLoop):
        raise TypeError(f"tasks of a virtual loop were asked for on {loop!r}")
    if options.get("name") is None:
        kind = short_name(getattr(coro, "__qualname__", type(coro).__qualname__))
        loop._task_names[kind] += 1
        options["name"] = f"{kind}-{loop._task_names[kind]}"
    return VirtualTask(next(loop._numbers), coro, loop=loop, **options)


def _call_of(handle: asyncio.Handle) -> tuple[Callable[..., object], tuple[Any, ...]]:
    callback: Callable[..., object] = getattr(handle, "_callback")  # noqa: B009
    args: tuple[Any, ...] = getattr(handle, "_args")  # noqa: B009
    return callback, args
