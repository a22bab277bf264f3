"""`WorkerGroup`: the ranks of one worker class, and typed calls to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rlinf_async.channels import LatestReceiver, LatestSender
from rlinf_async.channels.ends import End
from rlinf_async.channels.ends import Sender as SenderEnd
from rlinf_async.runtime.stall import WorkFuture, internal, result_of
from rlinf_async.runtime.supervise import Supervisor
from rlinf_async.workers.base import Worker
from rlinf_async.workers.errors import BuildError, WorkerDied, is_secondary
from rlinf_async.workers.methods import Method, method_of

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", bound=Worker, covariant=True)


class GroupCall(Generic[R]):
    """A call that runs on one or more ranks. Await it for its result; it runs whether or not you
    do.

    If nobody awaits it when it fails, the failure ends the cluster: it is never lost.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._result: asyncio.Future[R] = WorkFuture()
        self._parts: list[asyncio.Task[Any]] = []
        self._runner: asyncio.Task[None] | None = None
        self._awaited = 0
        self._cancelled = False
        self.failures: list[BaseException] = []
        """of its ranks, in the order in which they happened"""
        self.seen = False
        """its failure was raised to whoever awaited it"""

    def done(self) -> bool:
        """Whether the result, or the failure, is there."""
        return self._result.done()

    def cancel(self) -> None:
        """Stop the methods on all ranks; awaiting raises `asyncio.CancelledError`."""
        if not self.done():
            self._cancelled = True
            for part in self._parts:
                part.cancel()

    def __await__(self) -> Generator[Any, None, R]:
        return self._wait().__await__()

    async def _wait(self) -> R:
        self._awaited += 1
        try:
            return await result_of(self._result)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception:
            self.seen = True
            raise
        finally:
            self._awaited -= 1

    async def finished(self, within: float) -> None:
        """Wait until nothing of it runs any more, however it ended, but no longer than this."""
        if self._runner is not None:
            await asyncio.wait([self._runner], timeout=within)

    @property
    def awaited(self) -> bool:
        """Whether somebody will see a failure."""
        return self._awaited > 0

    def __repr__(self) -> str:
        return f"<GroupCall {self.label} {'done' if self.done() else 'running'}>"


class WorkerGroup(Generic[W_co]):
    """The ranks of one worker class."""

    def __init__(
        self,
        cls: type[W_co],
        name: str,
        supervisors: Sequence[Supervisor],
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
    ) -> None:
        self.worker_class: type[Worker] = cls
        self.name = name
        self.supervisors = supervisors
        self._on_failure = on_failure
        self.calls: set[GroupCall[Any]] = set()
        self.ended = False
        """its cluster has been left"""

    def __len__(self) -> int:
        return len(self.supervisors)

    def __getitem__(self, rank: int) -> WorkerRef[W_co]:
        if not 0 <= rank < len(self):
            raise IndexError(f"{self.name} has ranks 0 to {len(self) - 1}, not {rank}")
        return WorkerRef(self, rank)

    @property
    def restarts(self) -> int:
        """How often ranks were restarted, in total."""
        return sum(supervisor.restarts for supervisor in self.supervisors)

    def call(
        self,
        method: Callable[Concatenate[W_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupCall[list[R]]:
        """Run a method on every rank. The result has one value per rank, in rank order.

        Channel ends among the arguments are cloned for each rank and closed when its call returns.

        Raises:
            BuildError: an argument does not fit the method; nothing was sent.
        """
        return self._issue(range(len(self)), method, args, kwargs)

    def call_on(
        self,
        ranks: Iterable[int],
        method: Callable[Concatenate[W_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupCall[list[R]]:
        """Run a method on some ranks. The result is in the order of ``ranks``."""
        chosen = list(ranks)
        wrong = [rank for rank in chosen if not 0 <= rank < len(self)]
        if wrong:
            raise BuildError(f"{self.name} has ranks 0 to {len(self) - 1}, not {wrong}")
        return self._issue(chosen, method, args, kwargs)

    def issue_one(
        self, rank: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GroupCall[Any]:
        """A call on one rank whose result is the value itself."""
        return self._issue([rank], function, args, kwargs, single=True)

    def _issue(
        self,
        ranks: Iterable[int],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        single: bool = False,
    ) -> GroupCall[Any]:
        method = method_of(self.worker_class, function)
        arguments = method.bind(args, kwargs)
        if self.ended:
            raise BuildError(f"{self.name}.{method.name}: the cluster of this group has been left")
        call: GroupCall[Any] = GroupCall(f"{self.name}.{method.name}")
        own = self._own_arguments(ranks, method, arguments)
        call._parts = [self._part(call, method, *one) for one in own]
        if not call._parts:
            call._result.set_result([])
            return call
        runner = asyncio.create_task(self._run(call, single), name=call.label)
        call._runner = internal(runner)
        self.calls.add(call)
        return call

    def _own_arguments(
        self, ranks: Iterable[int], method: Method, arguments: dict[str, Any]
    ) -> list[tuple[Supervisor, dict[str, Any], list[Any]]]:
        """Each rank's arguments, and the ends cloned for it; all of them or none."""
        found = []
        with ExitStack() as undo:
            for rank in ranks:
                supervisor, ends = self.supervisors[rank], list[Any]()
                undo.callback(_close_all, ends)
                holder = f"{supervisor.name}.{method.name}"
                own = {name: _clone_ends(value, holder, ends) for name, value in arguments.items()}
                found.append((supervisor, own, ends))
            undo.pop_all()
        return found

    def _part(
        self,
        call: GroupCall[Any],
        method: Method,
        supervisor: Supervisor,
        arguments: dict[str, Any],
        ends: list[Any],
    ) -> asyncio.Task[Any]:
        supervisor.calls += 1
        holder = f"{supervisor.name}.{method.name}"
        task = asyncio.create_task(self._call_rank(supervisor, method, arguments), name=holder)

        def after(done: asyncio.Task[Any]) -> None:
            supervisor.calls -= 1
            error = None if done.cancelled() else done.exception()
            if error is not None and call._cancelled and is_secondary(error):
                error = None  # it learned of its end by a channel, before it was cancelled itself
            if error is not None:  # told before the channels pass it on: the first is the cause
                call.failures.append(error)
                self._on_failure(error, call)
            for end in ends:
                _release(end, error)

        task.add_done_callback(after)
        return internal(task)

    async def _call_rank(
        self, supervisor: Supervisor, method: Method, arguments: dict[str, Any]
    ) -> Any:
        while True:
            worker = await supervisor.handle()
            try:
                return await worker.call(method, arguments)
            except WorkerDied as death:
                if supervisor.stopping:
                    raise
                supervisor.lost(worker, death)

    async def _run(self, call: GroupCall[Any], single: bool) -> None:
        try:
            _, pending = await asyncio.wait(call._parts, return_when=asyncio.FIRST_EXCEPTION)
            await _cancel_all(pending)
            _settle(call, single)
        finally:
            call._result.cancel()  # the loop itself ends: whoever waits must not wait for ever
            self.calls.discard(call)


class WorkerRef(Generic[W_co]):
    """One rank of a group."""

    def __init__(self, group: WorkerGroup[W_co], rank: int) -> None:
        self.group = group
        self.rank = rank

    @property
    def name(self) -> str:
        """Group and rank: ``"Doubler[1]"``."""
        return self.group.supervisors[self.rank].name

    def call(
        self,
        method: Callable[Concatenate[W_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupCall[R]:
        """Run a method on this rank; the result is its value."""
        return self.group.issue_one(self.rank, method, args, kwargs)


def _clone_ends(value: Any, holder: str, ends: list[Any]) -> Any:
    """The same argument with every channel end replaced by this call's own clone."""
    if isinstance(value, End):
        clone = value.clone(holder)
        ends.append(clone)
        return clone
    if isinstance(value, LatestReceiver):
        return value.clone()  # what one rank has seen is still news to the others
    if isinstance(value, LatestSender):
        return value
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


def _first_error(failures: Sequence[BaseException]) -> BaseException | None:
    """The failure that explains the others: one that is not just a channel's news of it."""
    primary = [error for error in failures if not is_secondary(error)]
    return next(iter(primary or failures), None)


def _close_all(ends: Iterable[Any]) -> None:
    for end in ends:
        end.close()


def _settle(call: GroupCall[Any], single: bool) -> None:
    result, parts = call._result, call._parts
    error = _first_error(call.failures)
    if error is not None:
        result.set_exception(error)
        result.exception()  # retrieved: the cluster may have been told instead
    elif call._cancelled or any(part.cancelled() for part in parts):
        result.cancel()
    else:
        values = [part.result() for part in parts]
        result.set_result(values[0] if single else values)


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    every = list(tasks)
    for task in every:
        task.cancel()
    await asyncio.gather(*every, return_exceptions=True)
