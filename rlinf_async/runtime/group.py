"""`WorkerGroup`: the ranks of one worker class, and typed calls to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rlinf_async.runtime.calls import GroupCall, RankCall
from rlinf_async.runtime.supervise import Supervisor
from rlinf_async.workers.base import Worker
from rlinf_async.workers.errors import BuildError
from rlinf_async.workers.methods import method_of

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", bound=Worker, covariant=True)


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
        """whether its cluster has been left"""

    def __len__(self) -> int:
        return len(self.supervisors)

    def __getitem__(self, rank: int) -> WorkerRef[W_co]:
        """One rank, whose calls give the result itself. `IndexError` where there is none such."""
        if not 0 <= rank < len(self):
            raise IndexError(f"{self.name} has ranks 0 to {len(self) - 1}, not {rank}")
        return WorkerRef(self, rank)

    @property
    def restarts(self) -> int:
        """Number of restarts of all ranks."""
        return sum(supervisor.restarts for supervisor in self.supervisors)

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
        method = method_of(self.worker_class, function)
        arguments, has_ends = method.bind(args, kwargs)
        if self.ended:
            raise BuildError(f"{self.name}.{method.name}: the cluster of this group has been left")
        call: GroupCall[Any] = GroupCall(
            self.name, method, single, self._on_failure, self.calls.discard
        )
        rank_calls = [RankCall(call, self.supervisors[rank], method, arguments) for rank in ranks]
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
