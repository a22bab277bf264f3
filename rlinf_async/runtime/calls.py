"""`WorkerGroup`, the ranks of one worker class, and the typed calls to them.

No task runs for a call here. Each rank's call reports its end, and the last one settles the call::

    begin --> rank 0 --value----.
          --> rank 1 --failure--+--> reported to the cluster; the other ranks' calls are cancelled
          --> rank 2 --value----'
                                `--> all have ended: result, first cause, or cancelled --> awaiters

A rank's call outlives the worker that runs it: where that dies and is started again, the call
begins again in the next life, with the channel ends that it holds meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rlinf_async import deadlines
from rlinf_async.channels import LatestReceiver
from rlinf_async.channels.ends import End
from rlinf_async.channels.ends import Sender as SenderEnd
from rlinf_async.channels.local import LocalSender
from rlinf_async.runtime.replacing import FINISH, counterpart, renewed, replace
from rlinf_async.runtime.supervise import MethodRun, Supervisor, WorkerHandle
from rlinf_async.runtime.wakers import WorkFuture, internal
from rlinf_async.workers.base import BuildError, Worker, WorkerDied, is_secondary
from rlinf_async.workers.methods import Method, method_of

R = TypeVar("R")


class GroupCall(Generic[R]):
    """A call that runs on one or more ranks. Await it for its result; it runs whether or not you
    do. Several tasks may await it: cancelling one ends its own wait, cancelling the last one that
    waits cancels the call.

    If nobody awaits it when it fails, the failure ends the cluster: it is never lost.
    """

    __slots__ = (
        "_cancelled", "_done", "_end_waiters", "_error", "_group", "_method", "_on_end",
        "_on_failure", "_rank_calls", "_running", "_single", "_value", "_waiters", "failures",
        "raised",
    )  # fmt: skip

    def __init__(
        self,
        group: str,
        method: Method,
        single: bool,
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
        on_end: Callable[[GroupCall[Any]], None],
    ) -> None:
        self._group = group
        self._method = method
        self._single = single
        self._on_failure = on_failure
        self._on_end = on_end
        self._rank_calls: Sequence[RankCall] = ()
        self._running = 0
        self._waiters: tuple[asyncio.Future[Any], ...] = ()
        self._end_waiters: tuple[asyncio.Future[Any], ...] = ()
        self._done = False
        self._cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.failures: tuple[BaseException, ...] = ()
        """failures of its ranks, in the order in which they happened"""
        self.raised = False
        """whether its failure was raised where it was awaited"""

    @property
    def label(self) -> str:
        """Group and method: ``"Rollout.generate"``."""
        return f"{self._group}.{self._method.name}"

    def done(self) -> bool:
        """Whether the result, or the failure, is there."""
        return self._done

    def cancel(self) -> None:
        """Stop the methods on all ranks; awaiting raises `asyncio.CancelledError`."""
        if not self._done:
            self._cancelled = True
            self._cancel_ranks()

    def __await__(self) -> Generator[Any, None, R]:
        if not self._done:
            waiter = WorkFuture()  # one per awaiter: cancelling one does not end the others' wait
            self._waiters = (*self._waiters, waiter) if self._waiters else (waiter,)
            try:
                yield from waiter
            except asyncio.CancelledError:
                if self._waiters == (waiter,):
                    self.cancel()
                raise
            finally:
                if not self._done:
                    self._waiters = tuple(one for one in self._waiters if one is not waiter)
        return self._outcome()

    async def finished(self, within: float) -> None:
        """Wait until the method runs on no rank any more, however it ended; at most ``within``
        seconds."""
        if not self._done:
            waiter = WorkFuture()
            self._end_waiters = (*self._end_waiters, waiter)
            with suppress(TimeoutError):
                async with deadlines.timeout(within):
                    await waiter

    @property
    def awaited(self) -> bool:
        """Whether somebody awaits it, and so will see a failure."""
        return bool(self._waiters)

    def begin(self, rank_calls: list[RankCall]) -> None:
        """Start the call on each rank."""
        self._rank_calls = rank_calls
        self._running = len(rank_calls)
        if not rank_calls:
            self._settle()
        for rank_call in rank_calls:
            rank_call.start()

    # ---- for its ranks

    def failed(self, error: BaseException) -> bool:
        """Note the failure of a rank, and return whether it counts as one.

        Called before the rank's channels pass the failure on, so that the first noted is the cause.
        An error that a cancelled call got from a channel does not count.
        """
        if self._cancelled and is_secondary(error):
            return False
        self.failures = (*self.failures, error)
        self._on_failure(error, self)
        return True

    def ended(self, rank_call: RankCall) -> None:
        """Count a rank's call as ended. If it failed, the others are of no use."""
        self._running -= 1
        if rank_call.error is not None:
            self._cancel_ranks()
        if not self._running:
            self._settle()

    # ---- inside

    def _cancel_ranks(self) -> None:
        for rank_call in self._rank_calls:
            rank_call.cancel()

    def _settle(self) -> None:
        self._done = True
        ranks, self._rank_calls = self._rank_calls, ()
        if self.failures:
            primary = (error for error in self.failures if not is_secondary(error))
            self._error = next(primary, self.failures[0])  # it explains the others
        elif self._single:
            self._cancelled = self._cancelled or ranks[0].cancelled
            self._value = ranks[0].value
        else:
            self._cancelled = self._cancelled or any(rank.cancelled for rank in ranks)
            self._value = [rank.value for rank in ranks]
        self._on_end(self)
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for waiter in self._end_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _outcome(self) -> R:
        if self._error is not None:
            self.raised = True
            raise self._error
        if self._cancelled:
            raise asyncio.CancelledError
        value: R = self._value
        return value

    def __repr__(self) -> str:
        return f"<GroupCall {self.label} {'done' if self.done() else 'running'}>"


class RankCall:
    """A call on one rank: begun on its live worker, or as soon as there is one again."""

    __slots__ = (
        "_arguments", "_call", "_ended", "_ends", "_left", "_method", "_recorded", "_run",
        "_supervisor", "_wait", "_worker", "cancelled", "error", "value",
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
        self._run: MethodRun | None = None
        """the method, in ``_worker``"""
        self._left: Callable[[], None] | None = None
        """set while the method leaves ``_worker``; to be called once it has"""
        self._wait: asyncio.Task[None] | None = None
        self._ended = False
        self._recorded = 0
        """number of the call in the recording; 0: it is in none"""
        self.value: Any = None
        self.error: BaseException | None = None
        self.cancelled = False

    def clone_ends(self) -> None:
        """Replace every channel end among the arguments by this rank's own clone."""
        holder = f"{self._supervisor.name}.{self._method.name}"
        self._ends = ends = list[Any]()
        self._arguments = {
            name: _clone_ends(value, holder, ends) for name, value in self._arguments.items()
        }

    def discard_ends(self) -> None:
        """Close this rank's clones: the call will not start."""
        for end in self._ends:
            end.close()

    def start(self) -> None:
        """Begin on the live worker, or on the next one as soon as it has started."""
        self._supervisor.call_began(self)
        worker = self._supervisor.live
        if worker is None:
            self._wait_for_worker()
        else:
            self._begin(worker)

    def cancel(self) -> None:
        """Cancel the method; the call has ended, as cancelled, once the method has."""
        if self._ended or self.cancelled:
            return
        self.cancelled = True
        if self._left is not None and self._run is not None:
            self._run.cancel()  # it ends once it has left
        elif self._wait is not None:
            self._wait.cancel()
        elif self._run is not None:
            self._run.cancel()

    def __repr__(self) -> str:
        return f"{self._supervisor.name}.{self._method.name}"

    # ---- for the supervisor, where the worker is replaced

    def move(self, worker: WorkerHandle, within: float, left: Callable[[], None]) -> bool:
        if self._run is None or self._worker is not worker or self.cancelled:
            return False
        self._left = left
        self._wait_for_worker()
        self._run.leave(within)
        return True

    def let_go(self) -> None:
        self._worker = self._run = self._left = None
        if self.cancelled and self._wait is not None:
            self._wait.cancel()

    def check(self, cls: type[Worker]) -> None:
        counterpart(cls, self._method).bind((), self._arguments)

    def become(self, cls: type[Worker]) -> None:
        self._method = counterpart(cls, self._method)

    def become_own(self) -> None:
        """Be a call of the class that this rank has now: those of a group differ while it is being
        replaced."""
        self.become(self._supervisor.spec.cls)

    # ---- inside

    def _begin(self, worker: WorkerHandle) -> None:
        self._worker = worker
        on_end = partial(self._on_end, worker)
        if (recorder := self._supervisor.recorder) is not None:
            spec = self._supervisor.spec
            self._recorded = recorder.called(spec, self._method.name, self._arguments)
        try:
            self._run = worker.begin(self._method, self._arguments, on_end)
        except Exception as error:  # reported later: the caller must have the call first
            self._run = None
            asyncio.get_running_loop().call_soon(on_end, None, error)

    def _on_end(self, worker: WorkerHandle, value: Any, error: BaseException | None) -> None:
        if worker is not self._worker:
            return  # it was let go of
        if (recorder := self._supervisor.recorder) is not None and self._recorded:
            recorder.returned(self._supervisor.spec, self._recorded, value, error)
        if self._left is not None and self._has_left(error):
            return
        if error is None:
            self._ended = True
            self._run = self._worker = None  # they refer back here: no reference cycle
            self.value = value
            for end in self._ends:
                end.close()
            self._call.ended(self)
            self._supervisor.call_ended(self, None)
        elif not isinstance(error, WorkerDied) or self._supervisor.stopping:
            self._end(error)
        elif self.cancelled:
            self._end(asyncio.CancelledError())
        else:
            self._worker = self._run = None
            self._supervisor.lost(worker, error)
            self._wait_for_worker()

    def _has_left(self, error: BaseException | None) -> bool:
        """Whether a method that leaves its worker has not ended otherwise: then the call goes on in
        the next worker."""
        left, self._left = self._left, None
        wait, self._wait = self._wait, None
        if left is not None:
            left()
        ended = self.cancelled or self._supervisor.stopping
        if isinstance(error, (asyncio.CancelledError, WorkerDied)) and not ended:
            self._worker = self._run = None
            self._wait = wait
            return True
        if wait is not None:
            wait.cancel()
        return False

    def _wait_for_worker(self) -> None:
        name = f"{self._supervisor.name}.{self._method.name} waits for its worker"
        self._wait = internal(asyncio.create_task(self._begin_when_ready(), name=name))
        self._wait.add_done_callback(self._on_wait_done)

    async def _begin_when_ready(self) -> None:
        worker = await self._supervisor.worker()
        while worker is not self._supervisor.live:  # another has taken its place meanwhile
            worker = await self._supervisor.worker()
        self._wait = None
        self._begin(worker)

    def _on_wait_done(self, task: asyncio.Task[None]) -> None:
        if task is not self._wait:
            return  # the call has begun, or ended
        if task.cancelled():
            self._end(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._ended = True
        self._run = self._worker = None
        failure: BaseException | None = None
        if isinstance(error, asyncio.CancelledError):
            self.cancelled = True
        else:
            self.error = error
            failure = error if self._call.failed(error) else None
        for end in self._ends:
            _release(end, failure)
        self._call.ended(self)
        self._supervisor.call_ended(self, failure)


class FirstCause:
    """Finds the failure that a cluster raises: the first that explains the others.

    A failure spreads: whoever reads or writes a channel of a failed worker fails too, often before
    the first failure was noted. Such a *secondary* failure never hides a primary one.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._call: GroupCall[Any] | None = None

    def note(self, error: BaseException, call: GroupCall[Any] | None) -> None:
        """Note a failure, and the call that it happened in, if any."""
        known = self.error
        if known is None or (not is_secondary(error) and (self._raised or is_secondary(known))):
            self.error, self._call = error, call

    def outranks(self, body: BaseException | None, *, aborted: bool) -> bool:
        """Whether to raise the first failure rather than what the body ended with."""
        if self.error is None or self.error is body:
            return False
        if isinstance(body, asyncio.CancelledError):
            return aborted
        if body is None:
            return aborted or not (self._raised or is_secondary(self.error))
        primary = not is_secondary(self.error)
        return is_secondary(body) or (aborted and primary and isinstance(body, Exception))

    @property
    def _raised(self) -> bool:
        """Whether the body has seen it, by an ``await`` of its call."""
        return self._call is not None and self._call.raised


def _clone_ends(value: Any, holder: str, ends: list[Any]) -> Any:
    """Return an argument with every channel end replaced by a clone, which is added to ``ends``."""
    if isinstance(value, End):
        clone = value.clone(holder)
        ends.append(clone)
        return clone
    if isinstance(value, LatestReceiver):
        return value.clone()  # what one rank has seen is still new to the others
    if type(value) in (list, tuple):
        return type(value)(_clone_ends(one, holder, ends) for one in value)
    if type(value) is dict:
        return {key: _clone_ends(one, holder, ends) for key, one in value.items()}
    return value


def _release(end: Any, error: BaseException | None) -> None:
    """Close the end of a call; fail its channel where the call failed, so that consumers do not
    take the failure for the end of the data."""
    if error is not None and isinstance(end, LocalSender):
        end.queue.fail(error)  # also where the worker has closed its end
    elif error is not None and isinstance(end, SenderEnd):
        end.fail(error)
    end.close()


P = ParamSpec("P")

W_co = TypeVar("W_co", bound=Worker, covariant=True)


class WorkerGroup(Generic[W_co]):
    """The ranks of one worker class."""

    def __init__(
        self,
        cls: type[W_co],
        name: str,
        supervisors: Sequence[Supervisor],
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
        grace: float = 5.0,
    ) -> None:
        self.worker_class: type[Worker] = cls
        self.successor: type[Worker] | None = None
        """class of the workers that are taking, or have taken, the places of some of the ranks"""
        self.former: tuple[type[Worker], ...] = ()
        """classes that it had; a method of theirs stands for that of its name"""
        self.replacing = False
        """whether it is being replaced"""
        self.grace = grace
        """seconds that workers get to finish when they are stopped"""
        self.name = name
        self.supervisors = supervisors
        self._on_failure = on_failure
        self.calls: set[GroupCall[Any]] = set()
        self.ended = False
        """whether its cluster has been left"""

    def __len__(self) -> int:
        return len(self.supervisors)

    def __getitem__(self, rank: int) -> WorkerRef[W_co]:
        """One rank, whose calls give the result itself. `IndexError` where there is none such."""
        if not 0 <= rank < len(self):
            raise IndexError(f"{self.name} has ranks 0 to {len(self) - 1}, not {rank}")
        return WorkerRef(self, rank)

    def __iter__(self) -> Iterator[WorkerRef[W_co]]:
        """The ranks one by one: ``[single] = await cluster.launch(Policy)``."""
        return (self[rank] for rank in range(len(self)))

    @property
    def restarts(self) -> int:
        """Number of restarts of all ranks."""
        return sum(supervisor.restarts for supervisor in self.supervisors)

    @property
    def replaced(self) -> int:
        """Number of times that a rank was replaced, over all ranks: see `replace`."""
        return sum(supervisor.replaced for supervisor in self.supervisors)

    async def replace(
        self, worker: type[Worker], /, *args: Any, finish: float = FINISH, **kwargs: Any
    ) -> None:
        """Let workers of another class, or with other arguments, take the places of these ones
        while the graph runs.

        The new ones are started and set up beside the old ones. Then, rank by rank, the calls that
        run leave the old worker: what it has leased is finished, it takes nothing more; and they
        begin anew in the new one, with the same channel ends. A `Latest` gives its newest value
        there. Later restarts start the new class. Workers with accelerators of their own are
        stopped before the new ones are started: two may not fit.

        Args:
            worker: the class; it has the methods whose calls run, and takes their arguments.
            args, kwargs: for its ``__init__``.
            finish: seconds that a call has to finish what it has leased; then it is cancelled, and
                what it has leased goes back.

        Raises:
            BuildError: it cannot be done, and nothing has changed: wrong arguments, a method that
                is missing or takes others, ranks that compute together by torch.distributed, a
                worker with which a channel lives, another replacement that is under way.
            WorkerError: ``__init__`` or ``setup`` of a new worker raised: the old ones go on.
        """
        await replace(self, worker, args, kwargs, finish=finish)

    def call(
        self,
        method: Callable[Concatenate[W_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupCall[list[R]]:
        """Run a method on every rank. The result has one value per rank, in rank order.

        So a group of one rank gives ``[x]``; ``group[0].call`` gives ``x``. Channel ends among the
        arguments are cloned for each rank and closed when its call returns.

        Raises:
            BuildError: an argument does not fit the method; nothing was sent.
        """
        return self.issue(range(len(self)), method, args, kwargs)

    def call_on(
        self,
        ranks: Iterable[int],
        method: Callable[Concatenate[W_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> GroupCall[list[R]]:
        """Run a method on some ranks. The result is in the order of ``ranks``.

        Raises:
            BuildError: there is no such rank, or an argument does not fit; nothing was sent.
        """
        chosen = list(ranks)
        wrong = [rank for rank in chosen if not 0 <= rank < len(self)]
        if wrong:
            raise BuildError(f"{self.name} has ranks 0 to {len(self) - 1}, not {wrong}")
        return self.issue(chosen, method, args, kwargs)

    def issue(
        self,
        ranks: Iterable[int],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        single: bool = False,
    ) -> GroupCall[Any]:
        """Call a method on ranks; ``single``: on one, whose result is the value itself."""
        if self.former:
            function = renewed(self.worker_class, self.former, function)
        method = method_of(self.worker_class, function)
        arguments, has_ends = method.bind(args, kwargs)
        if self.successor is not None:
            counterpart(self.successor, method).bind(args, kwargs)
        if self.ended:
            raise BuildError(f"{self.name}.{method.name}: the cluster of this group has been left")
        call: GroupCall[Any] = GroupCall(
            self.name, method, single, self._on_failure, self.calls.discard
        )
        rank_calls = [RankCall(call, self.supervisors[rank], method, arguments) for rank in ranks]
        if self.successor is not None:
            for one in rank_calls:
                one.become_own()
        if has_ends:
            with ExitStack() as undo:  # every rank has its clones, or none has
                for rank_call in rank_calls:
                    undo.callback(rank_call.discard_ends)
                    rank_call.clone_ends()
                undo.pop_all()
        self.calls.add(call)
        call.begin(rank_calls)
        return call


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
        return self.group.issue((self.rank,), method, args, kwargs, True)
