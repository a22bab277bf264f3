"""Whoever has a limit on what others may take does not blame them for a stall of its own.

Each place starts its limit, says what must be called once the others are heard, and notes when it
blames them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from rlinf_async import deadlines
from rlinf_async.channels.wire.session.link import GRACE_SECONDS
from rlinf_async.messages.language import Failed, Scored
from rlinf_async.processes import frame
from rlinf_async.rewards.scorer import CLOSED_SECONDS, Judged, Scorer
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.child import CallOutcome
from rlinf_async.runtime.jobs.view import SPANS_LIMIT, LiveView
from rlinf_async.runtime.process import ChildProcess
from rlinf_async.runtime.remote_worker import CANCEL_SECONDS, RemoteWorker, _Cancelled
from tests import stalled_wire as wire
from tests.stalled_wire import Blame, Heard
from tests.stalling import explore_stalls, stall


def background(work: Coroutine[Any, Any, Any], blame: Callable[[Any], None]) -> None:
    """Blame by what becomes of this, unless that is None."""

    async def run() -> None:
        outcome = await work
        if outcome is not None:
            blame(outcome)

    _running.add(task := asyncio.get_running_loop().create_task(run()))
    task.add_done_callback(_running.discard)


_running = set[asyncio.Task[None]]()


def cancelled_call(blame: Blame) -> Heard:
    call: Any = SimpleNamespace(cancel_timed_out=lambda: blame("timed out"), cancelled=lambda: None)
    told: Any = _Cancelled(call)
    return partial(told.set_result, None)


def lost_process(blame: Blame) -> Heard:
    loop = asyncio.get_running_loop()
    worker: Any = object.__new__(RemoteWorker)
    worker._stopping, worker._kill_timer, ended = False, None, loop.create_future()
    worker.process = SimpleNamespace(
        ended=ended, exit_seconds=ChildProcess.exit_seconds, kill=lambda: blame("killed")
    )
    worker.lose("a test")
    return partial(ended.set_result, None)


def connecting_worker(blame: Blame) -> Heard:
    loop = asyncio.get_running_loop()
    worker: Any = object.__new__(RemoteWorker)
    connected: asyncio.Future[Any] = loop.create_future()
    worker.died, worker.lose = loop.create_future(), blame
    worker.ask = lambda kind, reply: loop.create_future()
    background(worker.attach(connected, 4.0), blame)
    return partial(connected.set_result, None)


def stopping_worker(blame: Blame) -> Heard:
    async def ask(kind: str, reply: type[CallOutcome]) -> CallOutcome:
        await asked
        return CallOutcome()

    async def kill() -> None:
        if asked.cancelled():
            blame("killed")

    asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    worker: Any = object.__new__(RemoteWorker)
    worker.name, worker.connection = "A[0]", object()
    worker.process, worker._calls = SimpleNamespace(ended=asked), Path("nowhere")
    worker.ask, worker.kill = ask, kill
    background(worker.stop(4.0), blame)
    return partial(asked.set_result, None)


def ended_calls(blame: Blame) -> Heard:
    call: Any = object.__new__(GroupCall)
    call._done, call._end_waiters = False, ()

    async def finished() -> str | None:
        await call.finished(4.0)
        return None if call._done else "not waited for"

    def end() -> None:
        call._done = True
        call._end_waiters[0].set_result(None)

    background(finished(), blame)
    return end


def scorer(scoring: Any) -> Scorer:
    scoring.stdin, scoring.pid, scoring.kill = SimpleNamespace(close=lambda: None), 0, lambda: None
    return Scorer(scoring)


def closed_pipe(blame: Blame) -> Heard:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait() -> int:
        if not scoring.returncode:
            scoring.returncode = 1
            return await asyncio.shield(ended)
        return 1

    async def how() -> str | None:
        said = await scorer(scoring)._how()
        return said if "closed the pipe" in said else None

    scoring = SimpleNamespace(stdout=object(), wait=wait, returncode=None)
    background(how(), blame)
    return partial(ended.set_result, 1)


def judging(blame: Blame) -> Heard:
    async def wait() -> int:
        return 1

    async def judged() -> object:
        outcome = (await owner._end_of(call, 4.0)).outcome
        return outcome if isinstance(outcome, Failed) else None

    answers = asyncio.StreamReader()
    scoring = SimpleNamespace(stdout=answers, wait=wait, returncode=1)
    owner = scorer(scoring)
    call = owner.open("exact", company=1)
    background(owner._listen(), blame)
    background(judged(), blame)
    return partial(answers.feed_data, frame(Judged(call.number, Scored(reward=1.0))))


def spans(blame: Blame) -> Heard:
    said: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    kept = list[Any]()

    async def taken() -> str | None:
        live: Any = SimpleNamespace(keep=kept.append)
        handle: Any = SimpleNamespace(spans=lambda: said)
        await LiveView._take(live, handle)
        return None if kept else "left out"

    background(taken(), blame)
    return partial(said.set_result, [])


class Place(NamedTuple):
    """Somewhere where others have a limit."""

    limit: float
    start: Callable[[Blame], Heard]


PLACES = [
    Place(4.0, wire.heartbeat),
    Place(4.0, wire.cut_connection),
    Place(4.0, wire.greeting),
    Place(GRACE_SECONDS, wire.hanging_up),
    Place(GRACE_SECONDS, wire.closing_while_cut),
    Place(GRACE_SECONDS, wire.known_to_have_ended),
    Place(GRACE_SECONDS, wire.unconfirmed_items),
    Place(GRACE_SECONDS, wire.arrays_to_fetch),
    Place(CANCEL_SECONDS, cancelled_call),
    Place(ChildProcess.exit_seconds, lost_process),
    Place(4.0, connecting_worker),
    Place(4.0, stopping_worker),
    Place(4.0, ended_calls),
    Place(CLOSED_SECONDS, closed_pipe),
    Place(4.0, judging),
    Place(SPANS_LIMIT, spans),
]


@pytest.fixture(params=PLACES, ids=lambda place: place.start.__name__)
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


def test_a_stall_of_its_own_blames_nobody(place: Place) -> None:
    async def main() -> None:
        blamed = list[object]()
        heard = place.start(blamed.append)
        await asyncio.sleep(0.95 * place.limit)
        stall(10 * place.limit)
        await asyncio.sleep(0.5 * place.limit / deadlines.LOOKS)  # before it is read
        heard()
        await asyncio.sleep(place.limit / deadlines.LOOKS)
        assert not blamed

    explore_stalls(main)


def test_who_says_nothing_is_blamed_when_the_limit_is_over(place: Place) -> None:
    async def main() -> None:
        blamed = list[object]()
        place.start(blamed.append)
        await asyncio.sleep(0.99 * place.limit)
        assert not blamed
        await asyncio.sleep(0.02 * place.limit)
        assert blamed

    explore_stalls(main)


@pytest.mark.parametrize(
    "start", [wire.unconfirmed_items, wire.hanging_up, wire.known_to_have_ended]
)
def test_a_peer_that_makes_progress_is_waited_for(start: Callable[[Blame], Heard]) -> None:
    async def main() -> None:
        blamed = list[object]()
        heard = start(blamed.append)
        for _ in range(4):
            await asyncio.sleep(0.9 * GRACE_SECONDS)
            assert not blamed
            heard()
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert blamed

    explore_stalls(main)
