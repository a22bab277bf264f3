"""The calls that the ranks of a group make together, and the event loop on which each runs them.

One that fails alone leaves the others inside of a collective operation, which torch ends after
minutes, with an error of its sockets. So the first that fails notes it where all look::

    rank that fails   [ train ]--error, if it is the first--> store of the group
    other ranks       [ train ..... looks every half second <--------+
                              waits 5 s for its own end: errors that all agreed on have that
                              else PeerFailed, and this rank makes no other call

A rank whose process is lost notes nothing. The rank before it has asked Ray for an answer of it,
and so learns how it ended; and one whose connection breaks asks for answers of all.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from rlinf_async.channels.errors import error_text
from rlinf_async.runtime.ray.backend import how_it_ended
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.runtime.signals import loop_factory
from rlinf_async.workers.base import GroupStore

T = TypeVar("T")


class LoopThread:
    """Runs coroutines while the thread that asked for them waits, and goes on between them: what
    this process serves to others is answered at any time."""

    def __init__(self, name: str) -> None:
        make = loop_factory() or asyncio.new_event_loop
        self._loop: asyncio.AbstractEventLoop = make()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        self.interrupt: Future[None] | None = None
        """future whose error ends the wait for a coroutine; what the coroutine does in another
        thread goes on"""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise its error, or that of `interrupt`."""
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self.interrupt is not None:
            interrupt = self.interrupt
            either: tuple[Future[Any], Future[Any]] = (result, interrupt)
            wait(either, return_when=FIRST_COMPLETED)
            if not result.done():
                result.cancel()
                interrupt.result()
        return result.result()


log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 0.5
"""seconds between two looks whether another rank has failed"""
OWN_END_SECONDS: Final = 5.0
"""time that a rank has to end a call by itself, once another has failed in it"""
CAUSE_SECONDS: Final = 10.0
"""time until the cause of a broken connection is known"""


class PeerFailed(RuntimeError):
    """A rank cannot go on, since another one failed, or is lost: which one, and what happened.

    An actor and a critic that are paired train again once both are called again; a rank that is
    lost has to be replaced (`RayTrainGroup.connect`). A group whose ranks were left alone by one of
    them in the middle of a call has to be replaced, too.
    """


class PeerRank(msgspec.Struct, frozen=True):
    """A rank of the group, as the others know it."""

    rank: str
    actor: str
    """name of the rank as an actor of Ray"""
    place: str
    """process and host"""


class GroupRanks:
    """One rank's view of its group, once all ranks have joined it.

    Args:
        loop: runs what this rank computes.
        peers: all ranks, in order.
        rank: this one.
    """

    def __init__(self, loop: LoopThread, peers: Sequence[PeerRank], rank: int) -> None:
        self._loop, self._name = loop, peers[rank].rank
        self._store = GroupStore("calls", apart=True)
        ray = of_ray()
        # Handles by name keep no actor alive that the driver has forgotten.
        self._others = [
            (peer, ray.get_actor(peer.actor)) for peer in (*peers[rank + 1 :], *peers[:rank])
        ]
        self._has_store = True
        """rank 0, where the store is, was there when it was last asked"""
        self._calls = 0
        self.given_up = ""
        """what the others were left alone by; empty while they were not"""

    def check(self, doing: str) -> None:
        """Raise `PeerFailed` where this rank was left alone in an earlier call."""
        if self.given_up:
            raise PeerFailed(
                f"{self._name} cannot {doing}: in an earlier call {self.given_up}. End this group "
                "(shutdown()) and start another one"
            )

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Make a call that all ranks make.

        Raises:
            PeerFailed: another rank failed, or is lost, and this one cannot end the call.
        """
        self.check(doing)
        self._calls += 1
        call = f"{self._calls} {doing}"
        ended = threading.Event()
        self._loop.interrupt = interrupt = Future[None]()
        watch = threading.Thread(
            target=self._watch, args=(call, ended, interrupt), name="other ranks", daemon=True
        )
        watch.start()
        try:
            yield
        except BaseException as error:
            ended.set()
            cause = self._cause(call, error)
            if cause is None:
                raise
            self.given_up = cause
            raise PeerFailed(f"{self._name} cannot {doing}: {cause}") from error
        finally:
            ended.set()
            self._loop.interrupt = None

    def _watch(self, call: str, ended: threading.Event, interrupt: Future[None]) -> None:
        """Interrupt the call if another rank fails in it, and it does not end by itself."""
        failed, answers = None, None
        while failed is None:
            if ended.wait(LOOK_SECONDS):
                return
            answers = answers or _asked(self._others[:1])
            failed = self._first_failure(call) or self._lost(call, answers)
        if not ended.wait(OWN_END_SECONDS):
            interrupt.set_exception(_Interrupted(failed))

    def _cause(self, call: str, error: BaseException) -> str | None:
        """What ended the call, if that is not this error; else the error is noted."""
        if isinstance(error, _Interrupted):
            return str(error)
        if _is_broken_connection(error):
            answers, end = _asked(self._others), time.monotonic() + CAUSE_SECONDS
            while time.monotonic() < end:
                if found := self._first_failure(call) or self._lost(call, answers):
                    return found
                time.sleep(LOOK_SECONDS)
        self._first_failure(call, f"{self._name} failed: {error_text(error)}")
        return None

    def _first_failure(self, call: str, own: str | None = None) -> str | None:
        """What the first rank that failed in this call has noted; that of this rank, if it is the
        first. It is in a store of rank 0: Ray knows how that was lost."""
        if not self._has_store:
            return own
        try:
            if own is None:
                found = self._store.get(call)
            else:
                found = self._store.set_first(call, own.encode())
        except RuntimeError as error:
            self._has_store = False
            log.warning("%s has lost rank 0: %s", self._name, error)
            return own
        return own if found is None else found.decode()

    def _lost(self, call: str, answers: dict[Any, PeerRank]) -> str | None:
        """What happened to a rank that was asked, if its process has ended; it is noted.

        Where Ray has lost its connection alone, that is no answer any more.
        """
        ray, errors = of_ray(), of_ray("exceptions")
        done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=0)
        for answer in done:
            try:
                ray.get(answer)
            except errors.ActorUnavailableError:
                del answers[answer]
            except errors.RayActorError as error:
                peer = answers[answer]
                how = how_it_ended(error)
                return self._first_failure(call, f"{peer.rank} ({peer.place}) is lost: {how}")
        return None


class _Interrupted(Exception):
    """Another rank has failed. The message says what happened to it."""


def _asked(others: Sequence[tuple[PeerRank, Any]]) -> dict[Any, PeerRank]:
    """Ask ranks for an answer, which those that are busy give later, and those that are lost never:
    by reference, whose it is."""
    return {actor.get_master_addr_and_port.remote(): peer for peer, actor in others}


def _is_broken_connection(error: BaseException) -> bool:
    """Whether torch.distributed lost another rank."""
    from torch import distributed

    links: BaseException | None = error
    while links is not None:
        if isinstance(links, distributed.DistError) or "gloo/transport" in str(links):
            return True
        links = links.__cause__
    return False
