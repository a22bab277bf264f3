"""`Worker`: a class with async methods, and a thread for blocking work; errors of workers.

::

    class Doubler(Worker):
        async def run(self, numbers: Receiver[Number], doubled: Sender[Number]) -> None:
            async for number in numbers:
                await doubled.put(Number(number.value * 2))

What a rank goes through::

    created -> __init__ -> setup() -> ready: calls run, several at once -> teardown() -> gone

Channel ends given as arguments of a call belong to that call: every rank gets its own clone, and it
is closed when the call returns. So "the last sender has closed" means "every producer has
returned".

Errors, by what the caller can do about them::

    BuildError              the worker graph is wrong: nothing was started (also a ValueError)
    WorkerError             a call failed inside a worker: worker, rank, host, method, traceback
     +-- WorkerDied         the worker's process ended by itself: exit code or signal
          +-- WorkerUnresponsive   it, or an environment in it, stopped answering, and it was killed
    Deadlock                every worker waits for another: who, on which channel, how long
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Final, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from rlinf_async.channels.errors import fit_bytes, text_of
from rlinf_async.channels.statistics import ComputeThread, computations, current_thread
from rlinf_async.observe.trace import Meter
from rlinf_async.workers.foreign_calls import FailedEpisode

MAX_MESSAGE_BYTES: Final = 20_000
MAX_TRACEBACK_BYTES: Final = 60_000
"""Together they fit in the reply to a call, however long the exception's text is."""


class BuildError(ValueError):
    """The worker graph is wrong. Raised before anything is started; names both sides."""


class Deadlock(RuntimeError):
    """Every worker waits for another: none can go on."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception in a worker, as plain data that can cross to another process."""

    worker: str
    host: str
    pid: int
    method: str
    error_type: str
    message: str
    traceback: str
    channel_error: bool = False
    """whether it only passes on, through a channel, what happened elsewhere: see `is_secondary`"""
    explained: bool = False
    """whether the message says all (a full disk, a file that this host does not have), and the
    traceback adds nothing"""
    waited: float = 0.0
    """seconds for which it was waited until the process was found to hang, where it was killed"""
    failed: FailedEpisode | None = None
    """the episode of an environment that ended with the process, if one did"""


def is_secondary(error: BaseException) -> bool:
    """Whether an error only passes on, through a channel, what happened elsewhere.

    The refusal of an item (wrong type, too large) is an error of its own.
    """
    from rlinf_async.channels import ChannelError, ItemTooLarge, MalformedFrame, WrongItemType

    if isinstance(error, BaseExceptionGroup):
        return all(is_secondary(one) for one in error.exceptions)
    if isinstance(error, WorkerError):
        return error.failure.channel_error
    return isinstance(error, ChannelError) and not isinstance(
        error, (WrongItemType, ItemTooLarge, MalformedFrame)
    )


class WorkerError(RuntimeError):
    """A call failed inside a worker.

    In one process the original exception is the ``__cause__``; from another process its type,
    message and traceback are in ``failure``.
    """

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(
            f"{failure.worker} failed in {failure.method} "
            f"(process {failure.pid} on {failure.host}): {failure.error_type}: {failure.message}"
            + (f"\n\n{failure.traceback.rstrip()}" if failure.traceback else "")
        )

    @property
    def worker(self) -> str:
        """Group and rank: ``"Rollout[1]"``."""
        return self.failure.worker

    @property
    def summary(self) -> str:
        """The first line: worker, method, process, error."""
        return str(self).split("\n", 1)[0]

    @classmethod
    def of(cls, error: BaseException, *, worker: str, host: str, pid: int, method: str) -> Self:
        """Wrap an exception. Of a very long text the beginning and the end are kept."""
        from rlinf_async.config import UsageError
        from rlinf_async.observe.files import RunFolderError

        return cls(
            Failure(
                worker=worker,
                host=host,
                pid=pid,
                method=method,
                error_type=type(error).__name__,
                message=fit_bytes(text_of(error), MAX_MESSAGE_BYTES),
                traceback=fit_bytes(
                    "".join(traceback.format_exception(error)), MAX_TRACEBACK_BYTES
                ),
                channel_error=is_secondary(error),
                explained=isinstance(error, (RunFolderError, UsageError)),
            )
        )


class WorkerDied(WorkerError):
    """The worker's process ended by itself."""


class WorkerUnresponsive(WorkerDied):
    """The worker was killed: its event loop, or an environment, did not answer within the limit."""


OpenSpan = Callable[..., AbstractContextManager[Any]]


class Device(msgspec.Struct, frozen=True):
    """One accelerator, or one CPU core where there is none."""

    kind: str
    """``"cuda"`` or ``"cpu"``"""
    index: int
    """number of the device on its host"""
    host: str = ""
    """name of the device's host, where a cluster has several; empty: the driver's"""

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's identity: plain data, sent to its process."""

    group: str
    rank: int
    world_size: int
    devices: tuple[Device, ...] = ()
    sees_own_devices: bool = False
    """whether its process sees these accelerators alone, as ``cuda:0`` and on"""
    host: str = ""
    """name of the worker's host, where a cluster has several; empty: the hostname says it"""
    incarnation: int = 0
    """how often this rank was restarted"""
    fatal_seeds: tuple[int, ...] = ()
    """seeds of the episodes in which environments have ended earlier lives of this rank"""
    collective: str | None = None
    """torch.distributed backend of the group (``"gloo"``, ``"nccl"``), where it has one"""
    rendezvous: str = ""
    """rendezvous of the group's ranks, as torch's ``init_method``"""

    @property
    def name(self) -> str:
        """Group and rank: ``"Rollout[1]"``."""
        return f"{self.group}[{self.rank}]"


class WorkerContext:
    """A worker's identity, its compute thread and its recorder of spans."""

    def __init__(
        self,
        info: WorkerInfo,
        executor: ThreadPoolExecutor,
        span: OpenSpan | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.info = info
        self.executor = executor
        self.span: OpenSpan = span or _no_span
        self.meter = meter or Meter()
        self.joined = False
        """whether the worker has joined its group's torch.distributed"""
        self.computing = 0
        """number of calls in the compute thread"""
        self.thread = ComputeThread()

    @property
    def what_works(self) -> str:
        """The compute thread, if it can go on by itself: it has a call, and waits for no task."""
        return "its compute thread works" if self.computing and not self.thread.waits else ""


def _no_span(name: str, **args: Any) -> AbstractContextManager[None]:
    return nullcontext()


P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound="Worker")


class Worker:
    """Base class of all workers. Its attributes are available before ``__init__`` runs."""

    _context: WorkerContext

    stateless: ClassVar[bool] = False
    """whether what it does depends on nothing but what it is given, and the newest weights: not on
    what it did before. A replay may then begin anywhere."""

    @property
    def name(self) -> str:
        """Group and rank: ``"Doubler[1]"``."""
        return self._context.info.name

    @property
    def rank(self) -> int:
        """Number of this worker in its group, from 0."""
        return self._context.info.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._context.info.world_size

    @property
    def incarnation(self) -> int:
        """Number of restarts of this rank after a death; 0 at first."""
        return self._context.info.incarnation

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the placement gave to this rank; empty without a placement."""
        return self._context.info.devices

    @property
    def device(self) -> str:
        """The first device as torch names it in this process: ``"cuda:0"``, else ``"cpu"``.

        A worker with a process of its own sees no accelerators but its own.
        """
        found = self.devices
        if not found or found[0].kind != "cuda":
            return "cpu"
        return "cuda:0" if self._context.info.sees_own_devices else str(found[0])

    @cached_property
    def log(self) -> logging.Logger:
        """A logger under this worker's name."""
        return logging.getLogger(f"rlinf_async.{self.name}")

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Modules that take long to import, and that a worker with these arguments of ``__init__``
        needs.

        Where ranks are processes of the driver's host, these are imported once, and the processes
        of all ranks, also of those that are started again, are forked from the one that did. So a
        module is no such one if its import starts a thread, or opens a device.
        """
        return ()

    @classmethod
    def resumes_exactly(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether a worker with these arguments of ``__init__``, begun with ``resume=`` the folder
        that ``begin_checkpoint`` wrote, does to the last bit what it would have done. A replay may
        then begin there."""
        return False

    async def setup(self) -> None:
        """Runs once after ``__init__``, before the first call. Override it for slow preparation:
        load a model, start a simulator."""

    async def teardown(self) -> None:
        """Runs once after the last call. Override it to release what ``setup`` took."""

    async def compute(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in this worker's compute thread and wait for its result.

        The event loop goes on meanwhile: it answers calls, cancellation and heartbeats, and fetches
        the next batch. There is one such thread, so blocking work runs in the order of the calls.
        Cancelling the wait does not stop work that has begun.
        """
        return await self.compute_in(self._context.executor, fn, *args, **kwargs)

    async def compute_in(
        self, executor: ThreadPoolExecutor, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run blocking work in a thread of your own, beside the compute thread, as `compute` does.

        Shut the executor down in `teardown`.
        """
        if inspect.iscoroutinefunction(fn):
            raise TypeError(f"{_name_of(fn)} is async: await it, compute runs blocking functions")
        context = contextvars.copy_context()
        context.run(current_thread.set, self._context.thread)

        def call() -> R:
            try:
                return context.run(fn, *args, **kwargs)
            except (
                StopIteration
            ) as end:  # a future refuses it, and whoever waits would wait for ever
                raise RuntimeError(
                    f"{_name_of(fn)} raised StopIteration, which leaves no coroutine: catch it "
                    "inside, or give next() a default that says that there is no more"
                ) from end

        self._context.computing += 1
        try:
            done = asyncio.get_running_loop().run_in_executor(executor, call)
            computations[done] = self._context.thread
            return await done
        finally:
            self._context.computing -= 1

    def span(self, name: str, **args: Any) -> AbstractContextManager[Any]:
        """Record the block as a named span of the run's trace."""
        return self._context.span(name, **args)

    @property
    def meter(self) -> Meter:
        """Sums of what this worker works on, from which a run names its bottleneck."""
        return self._context.meter

    def doing(self) -> tuple[str, ...]:
        """Say what it does, beside its open spans, for reports and the live view. Override it where
        these do not say enough."""
        return ()

    async def join_collective(self) -> None:
        """Set up torch.distributed with the other ranks of this group.

        Needs ``launch(..., collective="gloo")``, or another backend. Call it in `setup`; it waits
        for all ranks.
        """

        await self.compute(join, self._context)

    def __repr__(self) -> str:
        return f"<{self.name}>" if hasattr(self, "_context") else f"<{type(self).__name__}>"


def _name_of(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def make(
    cls: type[W], context: WorkerContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> W:
    """Build a worker that knows its name, rank and devices inside ``__init__``."""
    worker = cls.__new__(cls)
    worker._context = context
    worker.__init__(*args, **kwargs)  # type: ignore[misc]
    return worker


JOIN_LIMIT = timedelta(minutes=5)

_listening: socket.socket | None = None
"""where rank 0 of a group on several hosts waits for the others; until `join` takes it over"""


def listen_for_ranks(host: str) -> str:
    """Listen in this process, which is to be rank 0, for the other ranks of its group.

    Nobody else can take the port between now and `join`.

    Args:
        host: the address of this host's interface.

    Returns:
        The group's rendezvous, ``tcp://host:port``.
    """
    global _listening
    if _listening is not None:
        _listening.close()
    _listening = socket.create_server((host, 0), family=_family(host), backlog=1024)
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{_listening.getsockname()[1]}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join(context: WorkerContext) -> None:
    """Join this worker's process group; blocks until every rank has joined.

    Raises:
        BuildError: the group was launched without ``collective=...``.
    """
    info = context.info
    if info.collective is None:
        raise BuildError(
            f"{info.name} asks for torch.distributed, but its group was launched without it: "
            'pass collective="gloo" (CPU) or collective="nccl" (GPU) to launch()'
        )
    from torch import distributed

    where: dict[str, Any] = {"init_method": info.rendezvous}
    if info.rendezvous.startswith("tcp:"):
        where = {"store": _tcp_store(info)}
    distributed.init_process_group(
        info.collective,
        rank=info.rank,
        world_size=info.world_size,
        timeout=JOIN_LIMIT,
        **where,
    )
    context.joined = True


def _tcp_store(info: WorkerInfo) -> Any:
    """The store of the group: in rank 0, at the port where it listens already."""
    global _listening
    from torch import distributed

    of_torch: Any = distributed  # its names are exported, but not to type checkers
    address = urlsplit(info.rendezvous)
    listening, _listening = _listening, None
    return of_torch.TCPStore(
        str(address.hostname),
        int(address.port or 0),
        info.world_size,
        is_master=info.rank == 0,
        timeout=JOIN_LIMIT,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )


class GroupStore:
    """Bytes by key that all ranks of a group share: the store of their process group.

    Args:
        prefix: prefix of all keys.
        apart: whether to use an own connection, which does not wait where torch waits in the store.
    """

    def __init__(self, prefix: str, *, apart: bool = False) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store: Any = _get_default_store()
        self._store = PrefixStore(prefix, store.clone() if apart else store)

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        content: Any = value  # a str by its signature; bytes will do
        self._store.set(key, content)

    def set_first(self, key: str, value: bytes) -> bytes:
        """Set the value of a key that has none; return the one that it has."""
        content: Any = value
        found: bytes = self._store.compare_set(key, "", content)
        return found

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None while it has none."""
        return self._store.get(key) if self._store.check([key]) else None


def leave(context: WorkerContext) -> None:
    """Leave the process group, if this worker joined it. Others in the process are left alone."""
    if not context.joined:
        return
    from torch import distributed

    context.joined = False
    if distributed.is_initialized():
        distributed.destroy_process_group()


class MergedSpan:
    """Concurrent pieces of work as one span, from the begin of the first to the end of the last.

    A cut ends the span, and work after it is another one: a wait inside a span would count as work,
    and a span that never ends is never recorded. ::

        training = MergedSpan(self.span, "train")
        with training.piece():
            ...
            with training.cut(), self.span("wait samples"):
                ...
    """

    def __init__(self, span: OpenSpan, name: str, **args: Any) -> None:
        self._span = span
        self._name, self._args = name, args
        self._pieces = self._cuts = 0
        self._open: AbstractContextManager[Any] | None = None

    def piece(self) -> AbstractContextManager[None]:
        """Return the context of one piece of the work."""
        return self._counting(pieces=1)

    def cut(self) -> AbstractContextManager[None]:
        """Return a context in which no work is done."""
        return self._counting(cuts=1)

    @contextmanager
    def _counting(self, pieces: int = 0, cuts: int = 0) -> Iterator[None]:
        self._count(pieces, cuts)
        try:
            yield
        finally:
            self._count(-pieces, -cuts)

    def _count(self, pieces: int, cuts: int) -> None:
        self._pieces += pieces
        self._cuts += cuts
        wanted = self._pieces > 0 and not self._cuts
        if wanted and self._open is None:
            self._open = self._span(self._name, **self._args)
            self._open.__enter__()
        elif not wanted and self._open is not None:
            done, self._open = self._open, None
            done.__exit__(None, None, None)


class task_group:
    """An `asyncio.TaskGroup` that raises the first failure as it is, not in an `ExceptionGroup`.

    A class and not an async generator: the deadlock watch follows coroutines only, to see that a
    task waits for its children here.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> asyncio.TaskGroup:
        return await self._group.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
        except ExceptionGroup as failures:
            first = _first(failures)
            raise first from first.__cause__


def _first(error: BaseException) -> BaseException:
    """The first failure inside nested groups."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
