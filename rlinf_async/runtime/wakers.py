"""Whether this process stands still: could anything wake it, inside its tasks or outside of them?

A task is *blocked* if what it awaits can be ended by others only: a wait on a channel, another
task, of which the same is asked, or a computation that itself waits for a task. Anything else (a
timer, a socket, a thread, a future of which nothing is known) may end by itself, and then the task
does not count as blocked. So "stands still" is certain.

Where all tasks are blocked, a timer, a signal or a thread may still put an item, close an end or
cancel a task, and so may whatever is called when somebody connects or bytes come. What they will do
nobody can know: while there is one that is not the runtime's own, the process need not be
deadlocked. Streams and subprocesses of asyncio are none: what comes there wakes a task that awaits
it, and of that task the same is asked. Nor are idle threads of an executor, threads that wait for a
channel themselves, and those of libraries that are known to leave the loop alone.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import thread as executor_threads
from types import CoroutineType, FrameType
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet, WeakValueDictionary

from rlinf_async.channels.batching import driving
from rlinf_async.channels.statistics import WaitFuture, computations, until_done

HARMLESS: Final = frozenset(
    {
        "execnet",
        "logging",
        "multiprocessing.queues",
        "ray",
        "rich",
        "rlinf_async",
        "tensorboard",
        "torch",
        "tqdm",
    }
)
"""packages and modules whose own timers, readers, threads and handlers wake no task of a user"""
LOOPS: Final = frozenset({"asyncio", "uvloop"})
"""packages whose functions only call what they are given"""
RUN_A_LOOP: Final = frozenset({"run", "run_forever", "run_until_complete"})
"""names of functions in which a thread runs an event loop, where anything may happen"""
OF_AWAITED_FUTURES: Final = frozenset({"asyncio.futures", "asyncio.tasks"})
"""modules whose timers complete a future that a task awaits, as that of ``asyncio.sleep``"""

_internal: WeakSet[Any] = WeakSet()


def mark_internal(one: Any) -> None:
    """Note that this task or thread is the runtime's own, and never makes progress by itself."""
    _internal.add(one)


def is_internal(one: Any) -> bool:
    """Whether a task or thread was noted as the runtime's own."""
    return one in _internal


class Registered(NamedTuple):
    """Callbacks, sockets and signals that are registered with one event loop."""

    timers: list[tuple[Any, Any]]
    """callback and arguments"""
    readers: list[tuple[Any, Any]]
    signals: list[tuple[Any, Any]]
    transports: list[Any]
    servers: list[tuple[Any, Any]]
    """protocol factory and socket"""


def find_wakers() -> Iterator[str]:
    """Yield what could wake this process, the running loop above all: a few words for each."""
    loop = asyncio.get_running_loop()
    registered = _of_uvloop(loop) if type(loop).__module__ == "uvloop" else _of_asyncio(loop)
    if registered is None:
        yield f"an event loop of {type(loop).__module__} cannot be looked into"
        return
    for callback, args in registered.timers:
        if name := _foreign(callback, args):
            yield f"a timer will call {name}"
    for factory, listening in registered.servers:
        if _foreign(factory, ()) or isinstance(factory, type):
            yield f"it listens at {listening.getsockname()}"
    for transport in registered.transports:
        if name := _foreign_protocol(transport):
            yield f"a connection is read by {name}"
    for callback, args in registered.readers:
        if name := _foreign(callback, args):
            yield f"{name} is called when a file can be read or written"
    handlers = ((handler, ()) for handler in map(signal.getsignal, signal.valid_signals()))
    for callback, args in (*registered.signals, *handlers):
        if callable(callback) and (name := _foreign(callback, args)):
            yield f"{name} handles a signal"
    yield from _busy_threads()


# ---- event loops


def _of_asyncio(loop: Any) -> Registered | None:
    """What an event loop of asyncio keeps in its attributes."""
    try:
        timers = [_call(one) for one in loop._scheduled if not one.cancelled()]
        files = [one for key in loop._selector.get_map().values() for one in key.data]
        signals = [_call(one) for one in loop._signal_handlers.values()]
    except AttributeError:
        return None
    found = Registered(timers, [], signals, [], [])
    for callback, args in map(_call, filter(None, files)):
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.BaseTransport):
            found.transports.append(owner)
        elif owner is not loop:
            found.readers.append((callback, args))
        elif callback.__name__ == "_accept_connection":
            found.servers.append(args[:2])
    return found


def _call(handle: Any) -> tuple[Any, Any]:
    return handle._callback, handle._args


def _of_uvloop(loop: Any) -> Registered:
    """What a loop of uvloop refers to: it has no attributes to look at. A server at a Unix socket
    it does not even refer to; that refers to the loop."""
    found = Registered([], [], [], [], [])
    holds = [one for one in gc.get_referents(loop) if type(one) in (set, dict, WeakValueDictionary)]
    for held in holds:
        for one in list(held if isinstance(held, set) else held.values()):
            match type(one).__name__:
                case "TimerHandle":
                    found.timers.append(_uvloop_call(one))
                case "Handle":
                    found.signals.append(_uvloop_call(one))
                case "UVPoll":
                    handles = (some for some in gc.get_referents(one) if _named(some, "Handle"))
                    found.readers.extend(map(_uvloop_call, handles))
                case _ if hasattr(one, "get_protocol"):
                    found.transports.append(one)
    for one in gc.get_referrers(loop):
        if _named(one, "TCPServer", "UnixServer"):
            held = gc.get_referents(one)
            factory = next(filter(callable, held), None)
            sockets = [to for some in held if _named(some, "Server") for to in some.sockets]
            found.servers.extend((factory, to) for to in sockets)
    return found


def _named(one: Any, *names: str) -> bool:
    return type(one).__module__ == "uvloop.loop" and type(one).__name__ in names


def _uvloop_call(handle: Any) -> tuple[Any, Any]:
    """Callback and arguments; the callback is None where it is uvloop's own."""
    held = [one for one in gc.get_referents(handle) if type(one).__module__ != "uvloop"]
    args = next((one for one in held if isinstance(one, tuple)), ())
    return next(filter(callable, held), None), args


# ---- whose it is


def _foreign(callback: Any, args: Any) -> str:
    """The name of a function whose effect is not known; "" where it is, or there is none."""
    while isinstance(callback, functools.partial):
        callback, args = callback.func, (*callback.args, *args)
    owner = getattr(callback, "__self__", None)
    if callback is None or callback is signal.default_int_handler:
        return ""
    if isinstance(owner, asyncio.Timeout):
        task = vars(owner)["_task"]
        return "" if is_internal(task) else f"asyncio.timeout() in task {task.get_name()!r}"
    module = getattr(callback, "__module__", None) or type(owner).__module__
    name, package = getattr(callback, "__qualname__", repr(callback)), module.partition(".")[0]
    if package == "rlinf_async":  # what a user may give away is public: `Sender.close`
        inside = name.rpartition(".")[2].startswith("_") or "<locals>" in name
        return "" if inside else name
    if {package, module} & HARMLESS or (owner is None and module in OF_AWAITED_FUTURES):
        return ""
    if package in LOOPS and module != "asyncio.streams":
        return next(filter(None, map(_foreign_argument, _flat(args))), "")
    return f"{module}.{name}"


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for one in args:
        if isinstance(one, tuple):
            yield from _flat(one)
        else:
            yield one


def _foreign_argument(one: Any) -> str:
    """What a function of asyncio would call in turn."""
    if hasattr(one, "get_protocol"):
        return _foreign_protocol(one)
    return _foreign(one, ()) if callable(one) else ""


def _foreign_protocol(transport: Any) -> str:
    """The name of the protocol that a transport calls, if it is neither ours nor of streams."""
    protocol = transport.get_protocol()
    if type(protocol).__name__ == "SSLProtocol":  # asyncio's has attributes, uvloop's has none
        inner = getattr(protocol, "_app_protocol", None)
        held = [one for one in gc.get_referents(protocol) if isinstance(one, asyncio.BaseProtocol)]
        protocol = inner or next(iter(held), protocol)
    module = type(protocol).__module__
    known = module.partition(".")[0] in HARMLESS | LOOPS
    return "" if known else f"{module}.{type(protocol).__qualname__}"


# ---- threads


def _busy_threads() -> Iterator[str]:
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        if ident == threading.get_ident() or is_internal(thread) or _is_idle(frame):
            continue
        if thread is None:  # started below `threading`: by `_thread`, or by a library in C
            first = _outermost(frame)
            if str(first.f_globals.get("__name__")).partition(".")[0] not in HARMLESS:
                yield f"a thread runs {first.f_code.co_qualname}"
        elif not _is_harmless(thread):
            yield f"thread {thread.name!r} runs"


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_harmless(thread: threading.Thread) -> bool:
    """Whether a thread runs nothing of a user."""
    if isinstance(thread, threading.Timer):
        return not _foreign(thread.function, thread.args)
    target = getattr(thread, "_target", None)
    if getattr(target, "__name__", "") in RUN_A_LOOP:
        return False
    if target is not None:
        return not _foreign(target, getattr(thread, "_args", ()))
    package = type(thread).__module__.partition(".")[0]
    return package in HARMLESS


def _is_idle(frame: FrameType) -> bool:
    """Whether a thread waits for work that tasks give it, or for a channel."""
    if frame.f_code is executor_threads._worker.__code__:
        return True
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_globals.get("__name__") == driving.__name__:
            return True
        inner = inner.f_back
    return False


R = TypeVar("R")


class WorkFuture(asyncio.Future[Any]):
    """A future that only a worker can complete: what a task awaits while a worker runs its call."""


class WorkEvent:
    """An event like `asyncio.Event`, for what only workers, or other tasks of this process, can
    bring about.

    A task that waits for it is blocked; one that waits for an `asyncio.Event` is not, since a timer
    or a signal may set that.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[WorkFuture] = []

    def set(self) -> None:
        """Wake all that wait."""
        self._set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Let later waits wait for the next `set`."""
        self._set = False

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._set:
            return
        waiter = WorkFuture()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)


async def result_of(future: asyncio.Future[R]) -> R:
    """Await a future that others await too: cancelling this wait does not cancel the future."""
    await until_done(future)
    return future.result()


def internal(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Mark a task as the runtime's own: it serves others and never makes progress by itself."""
    mark_internal(task)
    return task


def current_is_internal() -> None:
    """Mark the running task as the runtime's own."""
    task = asyncio.current_task()
    if task is not None:
        internal(task)


def what_can_go_on() -> str:
    """Return what could let this process go on though nobody else does, in a few words; "" for
    nothing."""
    return free_task(asyncio.all_tasks()) or next(find_wakers(), "")


def free_task(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return the name of a task that is neither blocked nor the runtime's own; "" for none."""
    for task in tasks:
        if not (task.done() or is_internal(task) or is_blocked(task)):
            what = getattr(task.get_coro(), "__qualname__", "")
            return f"task {task.get_name()!r} ({what}) may go on by itself"
    return ""


def is_blocked(task: asyncio.Task[Any]) -> bool:
    """Whether only others can wake this task."""
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is None:
        return task is asyncio.current_task()  # runnable
    if awaited.done():
        return False  # woken, and about to run
    if isinstance(awaited, (WaitFuture, WorkFuture, asyncio.Task)):
        return True
    thread = computations.get(awaited) if isinstance(awaited, asyncio.Future) else None
    if thread is not None:
        return thread.waits > 0
    children = getattr(awaited, "_children", None)  # asyncio.gather
    if children is not None:
        return all(isinstance(one, (asyncio.Task, WaitFuture, WorkFuture)) for one in children)
    return _leaves_task_group(task)


def _leaves_task_group(task: asyncio.Task[Any]) -> bool:
    """Whether the task is at the end of an ``async with TaskGroup()``, waiting for its children."""
    inner: Any = task.get_coro()
    while isinstance(getattr(inner, "cr_await", None), CoroutineType):
        inner = inner.cr_await
    code = getattr(inner, "cr_code", None)
    exit_ = getattr(asyncio.TaskGroup, "_aexit", asyncio.TaskGroup.__aexit__)  # Python 3.13
    return code is exit_.__code__
