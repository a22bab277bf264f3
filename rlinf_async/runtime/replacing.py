"""Replacement of the workers of a group while the graph runs: `WorkerGroup.replace`.

A restart of another class that is asked for::

    check      class, arguments, calls that run           wrong: nothing was started
    start      a successor for each rank, beside it       one fails: all are stopped, the old go on
    exchange   rank by rank: calls leave the old worker,  it dies meanwhile: as if they had left
               and begin again in its successor

    a call          waits for                       unblocked by
    leaving         what it has leased              the worker; `finish`, then its cancellation
    moving          the other calls of its rank     the same
    begun again     its channels, as ever

Invariant: a call runs in one worker at a time. It leaves in a moment in which it holds no lease
and is in no put, so what it has put stays put, once, and what it had leased is consumed, once; if
it has to be cancelled, or dies, what it had leased goes back.

Workers that have accelerators of their own are stopped first, since two may not fit in the memory
of one; if a successor then cannot be started, the old class is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from rlinf_async.channels.statistics import until_done
from rlinf_async.runtime.launching import check_arguments, check_class
from rlinf_async.runtime.supervise import Life, Supervisor, all_or_none, log_failed_stops
from rlinf_async.runtime.wakers import internal
from rlinf_async.workers.base import BuildError, Worker, WorkerError
from rlinf_async.workers.methods import Method, describe, is_subtype, method_of

FINISH: Final = 30.0
"""seconds that a call has to finish what it has leased before it leaves a worker"""


class Replaceable(Protocol):
    """What is replaced: a `WorkerGroup`."""

    name: str
    supervisors: Sequence[Supervisor]
    worker_class: type[Worker]
    successor: type[Worker] | None
    former: tuple[type[Worker], ...]
    replacing: bool
    grace: float
    ended: bool


def counterpart(cls: type[Worker], method: Method) -> Method:
    """The method of this name of another class.

    Raises:
        BuildError: it has none, or that returns something else.
    """
    found = getattr(cls, method.name, None)
    if found is None:
        raise BuildError(
            f"{cls.__name__} has no method {method.name!r}, which {method.label} is called as: "
            "give it one with the same parameters"
        )
    other = method_of(cls, found)
    if other.returns != method.returns and not is_subtype(other.returns, method.returns):
        raise BuildError(
            f"{other.label} returns {describe(other.returns)}, but {method.label}, in whose place "
            f"it is called, {describe(method.returns)}"
        )
    return other


def renewed(
    cls: type[Worker], former: Sequence[type[Worker]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function of this class in the place of one of a class that it has replaced."""
    name = getattr(function, "__name__", "")
    for one in former:
        if any(vars(base).get(name) is function for base in one.__mro__):
            found: Callable[..., Any] = getattr(cls, name, function)
            return found
    return function


async def replace(
    group: Replaceable,
    worker: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    finish: float,
) -> None:
    """See `WorkerGroup.replace`."""
    _check(group, worker, args, kwargs, finish)
    group.replacing, group.successor = True, worker
    apart = any(device.kind == "cuda" for one in group.supervisors for device in one.devices)
    try:
        if apart:
            await _one_after_the_other(group, worker, args, kwargs, finish)
        else:
            await _beside(group, worker, args, kwargs, finish)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if group.ended and (task is None or not task.cancelling()):
            raise BuildError(f"{group.name}: its cluster was left while it was replaced") from None
        raise
    finally:
        group.replacing = False
        _note_classes(group, worker)


def _note_classes(group: Replaceable, worker: type[Worker]) -> None:
    """Note which class the ranks have now; where only some were replaced, both are known."""
    new = [one.spec.cls is worker for one in group.supervisors]
    if all(new) and group.worker_class is not worker:
        group.former = (*group.former, group.worker_class)
        group.worker_class = worker
    if all(new) or not any(new):
        group.successor = None


async def _beside(
    group: Replaceable,
    worker: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: float,
) -> None:
    """Start all successors, or none; then exchange rank by rank."""
    ranks = group.supervisors
    starts = [
        internal(asyncio.create_task(one.start_successor(worker, args, kwargs))) for one in ranks
    ]
    ready: list[tuple[Supervisor, Life]] = []
    try:
        await all_or_none(starts)
        ready = [(one, start.result()) for one, start in zip(ranks, starts, strict=True)]
        while ready:
            one, life = ready[0]
            await one.exchange(life, finish=finish, grace=group.grace)
            ready.pop(0)
    except BaseException:
        if ready:  # of the first, the exchange goes on if only its wait was cancelled
            one, life = ready.pop(0)
            if not one.is_exchanging:
                ready.append((one, life))
        else:
            done = zip(ranks, starts, strict=True)
            ready = [(one, start.result()) for one, start in done if _succeeded(start)]
        stops = [one.give_up_successor(life, group.grace) for one, life in ready]
        for stop in stops:
            await until_done(stop)
        log_failed_stops([None if one.cancelled() else one.exception() for one in stops])
        raise


def _succeeded(start: asyncio.Task[Any]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


async def _one_after_the_other(
    group: Replaceable,
    worker: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: float,
) -> None:
    """Stop each rank before its successor is started."""
    for done, one in enumerate(group.supervisors):
        try:
            await one.exchange_apart(worker, args, kwargs, finish=finish, grace=group.grace)
        except WorkerError as error:
            if done:
                error.add_note(f"ranks 0 to {done - 1} of {group.name} have been replaced before")
            raise


def _check(
    group: Replaceable,
    worker: type[Worker],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: float,
) -> None:
    """Raise `BuildError` for what cannot be done. Nothing is started."""
    name, ranks = group.name, group.supervisors
    check_class(worker, "replace()")
    check_arguments(worker, args, kwargs)
    if not finish >= 0.0:
        raise BuildError(f"{name}: finish must be seconds from 0, got {finish!r}")
    if group.ended:
        raise BuildError(f"{name}: the cluster of this group has been left")
    if not all(one.was_started for one in ranks):
        raise BuildError(f"{name} is being started: replace it once launch() has returned")
    if group.replacing or any(one.is_exchanging for one in ranks):
        raise BuildError(f"{name} is being replaced already: wait for the end of that first")
    info = ranks[0].spec.info
    if info.collective is not None:
        raise BuildError(
            f"{name}: ranks of a torch.distributed group ({info.collective!r}) cannot be replaced "
            "one by one: stop the run, and go on from a checkpoint"
        )
    homes = [channel for one in ranks for channel in one.homes]
    if homes:
        raise BuildError(
            f"{name}: channel {homes[0]!r} lives with it, and would be lost with it: make the "
            "channel by Cluster.channel(), or at another worker"
        )
    for one in ranks:
        one.check_successor(worker)
