"""A rank's process on a host of the Ray cluster, as the driver sees it."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from rlinf_async.runtime.ray.hosts import Host
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.session import CALL_SECONDS, RaySession
from rlinf_async.runtime.remote_worker import Ended
from rlinf_async.runtime.stall import internal

_EXIT_CODE: Final = re.compile(r"exit code (\d+)")
_DETAILS: Final = (
    "Worker exit detail:",
    "The actor died because",
    "The actor is dead because",
    "unavailable:",
)
UNCONFIRMED: Final = f"it was killed, which Ray did not confirm within {CALL_SECONDS:g} s"
HINT: Final = "; its output is in Ray's log folder on that host, /tmp/ray/session_latest/logs"


class ActorProcess:
    """An actor of Ray that serves one rank.

    Args:
        actor: its handle.
        serving: reference to the result of the actor's ``serve``: by it the end is seen.
        host: on which it runs.
    """

    exit_seconds = 10.0  # Ray may take some seconds to notice, and knows the cause

    def __init__(self, session: RaySession, actor: Any, serving: Any, host: Host, pid: int) -> None:
        self.host = host.name
        self._node = host
        self.pid = pid
        self._session = session
        self._actor = actor
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self._looking: asyncio.Task[None] | None = None
        """the search for the host, once the actor is out of reach"""
        self._given_up: asyncio.TimerHandle | None = None
        """ends the wait for Ray's word that the actor is killed"""
        future: Future[Any] = serving.future()
        future.add_done_callback(self._on_served)

    def kill(self) -> None:
        """Kill the actor; what it started is killed with it, on its host."""
        self._session.submit(kill_actor, self._actor)
        if self._given_up is None:
            self._given_up = self._loop.call_later(CALL_SECONDS, self._set_ended, UNCONFIRMED)

    def _on_served(self, served: Future[Any]) -> None:
        """Note the end; in a thread of Ray's."""
        error = served.exception()
        self._session.submit(kill_actor, self._actor)  # it may only be out of Ray's reach
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._set_ended("it had been asked to")
        elif isinstance(error, of_ray("exceptions").ActorUnavailableError):
            self._looking = internal(asyncio.create_task(self._look_for_host(error)))
        else:
            self._set_ended(how_it_ended(error))

    async def _look_for_host(self, error: BaseException) -> None:
        """Note the end: of the whole host, where that does not answer either."""
        if await self._node.answers():
            return self._set_ended(how_it_ended(error))
        address = f"{self._node.address}:{self._node.port}"
        self._set_ended(f"its host was lost (Ray's node at {address} does not answer)")

    def _set_ended(self, how: str) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
        if not self.ended.done():
            self.ended.set_result(Ended(how, HINT))


def kill_actor(actor: Any) -> None:
    """Kill an actor for good; it may be dead."""
    of_ray().kill(actor, no_restart=True)


def how_it_ended(error: BaseException) -> str:
    """How an actor ended, in words, of the error that Ray raises for its method."""
    errors = of_ray("exceptions")
    text = " ".join(str(error).split())
    if isinstance(error, errors.RayActorError) and getattr(error, "preempted", False):
        return "its host was preempted"
    if isinstance(error, errors.OutOfMemoryError) or "running low on memory" in text:
        return f"its host ran out of memory ({text})"
    if "Owner's node has crashed" in text:
        return (
            "Ray has ended on the driver's host ('ray stop', or a crash): all workers end with it"
        )
    if is_lost_host(error):
        return f"its host was lost ({_detail(text)})"
    if code := _EXIT_CODE.search(text):
        return f"exit code {code[1]}"
    if isinstance(error, errors.ActorUnavailableError):
        return f"Ray lost its connection to it ({_detail(text)})"
    if "End of file" in text or isinstance(error, errors.WorkerCrashedError):
        return (
            "it was killed (by SIGKILL, or by the kernel for want of memory), crashed, or called "
            "os._exit; Ray does not know which"
        )
    return _detail(text)


def is_lost_host(error: BaseException) -> bool:
    """Whether an actor ended, or never ran, because its host is lost."""
    text = str(error)
    signs = ("node has died", "node was terminated", "NodeAffinitySchedulingStrategy")
    return any(sign in text for sign in signs)


def _detail(text: str) -> str:
    """What Ray says of the end, without the identifiers of the actor before it."""
    for start in _DETAILS:
        _, found, detail = text.partition(start)
        if found:
            return detail.strip()
    return text
