"""`Cluster`: makes channels, starts workers, and leaves nothing behind.

::

                     waits for                         unblocked by
    the body         calls, channels                   workers; a failure cancels it
    a call's part    its rank's restart, its method    the worker's reply or death
    a worker         its calls, channels, compute      the driver, items, its own thread
    leaving          calls, workers, processes         cancellation, then force after `grace`

The body of ``async with`` and everything it started end together: the first failure cancels the
rest and is raised once, with the worker, rank, host, method and traceback of its cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from rlinf_async.runtime.backend import Backend
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cause import FirstCause
from rlinf_async.runtime.graph import Graph
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.launching import Launch, check_launch, check_limits, specs
from rlinf_async.runtime.placement import Placement, host_devices
from rlinf_async.runtime.stall import internal
from rlinf_async.runtime.supervise import Never, Restart, Supervisor
from rlinf_async.runtime.together import all_or_none, settled, stop_all, tell, unless
from rlinf_async.runtime.watch import Watch
from rlinf_async.workers.base import Worker
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError, is_secondary

W = TypeVar("W", bound=Worker)


class Cluster(Graph):
    """A task group whose tasks are workers. Make one with `local` or `process`."""

    def __init__(
        self,
        backend: Backend,
        *,
        devices: Sequence[Device] | None = None,
        deadlock_after: float | None = 10.0,
        grace: float = 5.0,
    ) -> None:
        check_limits(deadlock_after=deadlock_after, grace=grace)
        super().__init__(backend)
        self.devices = tuple(host_devices() if devices is None else devices)
        self.grace = grace
        self._lives: Counter[str] = Counter()
        self._starting: set[asyncio.Task[None]] = set()
        self._parent: asyncio.Task[Any] | None = None
        self._cause = FirstCause()
        self._aborted = False
        self._entered = False
        self._closing = False
        self._hurry = asyncio.Event()
        self._watch = Watch(self, deadlock_after)

    @classmethod
    def local(
        cls,
        *,
        devices: Sequence[Device] | None = None,
        deadlock_after: float | None = 10.0,
        grace: float = 5.0,
    ) -> Self:
        """Workers are coroutines of this event loop: for debugging, tests and simulation.

        Args:
            devices, deadlock_after, grace: as of `process`.
        """
        from rlinf_async.runtime.local import LocalBackend

        return cls(LocalBackend(), devices=devices, deadlock_after=deadlock_after, grace=grace)

    @classmethod
    def process(
        cls,
        *,
        devices: Sequence[Device] | None = None,
        deadlock_after: float | None = 10.0,
        grace: float = 5.0,
        heartbeat_limit: float = 60.0,
        listen: str | None = None,
    ) -> Self:
        """One OS process per worker on this host.

        Args:
            devices: what placements choose from; by default the host's accelerators, else its CPU
                cores.
            deadlock_after: seconds of nobody being able to go on before `Deadlock` is raised;
                None: only reported.
            grace: seconds that workers get to finish when the cluster ends.
            heartbeat_limit: seconds after which a worker whose event loop does not answer is
                killed.
            listen: ``tcp://host:port``, to be reached from other hosts at this address, under the
                secret that RLINF_ASYNC_SECRET_FILE or RLINF_ASYNC_SECRET gives; by default what
                RLINF_ASYNC_LISTEN says. The workers of this host use a Unix socket in any case.

        Raises:
            BuildError: a time that is none; an address to listen at, but no secret.
        """
        from rlinf_async.runtime.process import ProcessBackend

        backend = ProcessBackend(heartbeat_limit=heartbeat_limit, listen=listen)
        return cls(backend, devices=devices, deadlock_after=deadlock_after, grace=grace)

    async def launch(
        self,
        worker: type[W],
        *args: Any,
        count: int = 1,
        placement: Placement | None = None,
        name: str | None = None,
        restart: Never | Restart | None = None,
        collective: str | None = None,
        env_vars: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> WorkerGroup[W]:
        """Start ``count`` ranks of a worker class and run their ``setup``.

        Args:
            worker: the class.
            args, kwargs: for its ``__init__``.
            placement: which devices each rank gets; without one, none are assigned.
            name: of the group in errors and reports; by default the class's name.
            restart: what to do when a rank's process dies; by default the run ends.
            collective: torch.distributed backend for the group; see `Worker.join_collective`.
            env_vars: environment variables of the ranks' processes.

        If it is cancelled, or one rank cannot be started, none is left.

        Raises:
            BuildError: wrong arguments, name or placement, and nothing was started; or the cluster
                was left meanwhile.
            WorkerError: ``__init__`` or ``setup`` raised in a rank.
        """
        launch = Launch(
            worker=worker,
            name=name,
            count=count,
            placement=placement,
            restart=restart,
            collective=collective,
            env_vars=env_vars,
        )
        check_launch(launch, args, kwargs)
        self._check_open(launch.group)
        places = placement.assign(count, self.devices) if placement else [()] * count
        self._lives[launch.group] += 1
        life = self._lives[launch.group]
        meeting = self._backend.rendezvous(launch.group, life) if collective else ""
        supervisors = [
            Supervisor(self._backend, spec, restart or Never(), self._on_idle_death)
            for spec in specs(launch, places, meeting, args, kwargs)
        ]
        made = WorkerGroup(worker, launch.group, supervisors, self._on_failure)
        self.groups[launch.group] = made
        starts = [asyncio.create_task(one.start(), name=one.name) for one in supervisors]
        self._starting.update(starts)
        try:
            await all_or_none(starts)
        except BaseException as error:  # those ranks that did start are of no use alone
            tell(await stop_all(supervisors, self.grace))
            del self.groups[launch.group]
            self._explain_end(launch.group, error)
            raise
        finally:
            self._starting.difference_update(starts)
        return made

    # ---- life

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a Cluster can be entered once: make another one")
        self._entered = True
        self._parent = asyncio.current_task()
        await self._backend.open()
        self._watch.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        body_failed = isinstance(error, Exception) and not is_secondary(error)
        interrupted = await self._close_shielded()
        if self._aborted and self._parent is not None:
            self._parent.uncancel()
        cause = self._cause.error
        if cause is None or not self._cause.outranks(error, aborted=self._aborted):
            if error is None and interrupted is not None:
                raise interrupted
            return
        if body_failed:
            cause.add_note(f"the body of the cluster then raised {error!r}")
        raise cause from cause.__cause__  # not from what it led to

    def abort(self, cause: BaseException) -> None:
        """End the cluster: cancel its body and raise this when it is left. The first cause
        counts."""
        self._cause.blame(cause, None)
        if not (self._aborted or self._closing or self._parent is None or self._parent.done()):
            self._aborted = True
            self._parent.cancel()

    def _on_failure(self, error: BaseException, call: GroupCall[Any]) -> None:
        self._cause.blame(error, call)
        if not call.awaited:
            self.abort(error)

    def _on_idle_death(self, death: BaseException) -> None:
        self.abort(death)

    async def _close_shielded(self) -> asyncio.CancelledError | None:
        """Close even if the parent is cancelled meanwhile: then without grace, and say so."""
        self._closing = True
        interrupted = None
        closing = internal(asyncio.create_task(self._close(), name="close cluster"))
        own = int(self._aborted)  # our own cancellation may arrive only now
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                if self._parent is not None and self._parent.cancelling() > own:
                    interrupted = error
                    self._hurry.set()
        closing.result()
        return interrupted

    async def _close(self) -> None:
        self._watch.stop()
        calls = [call for group in self.groups.values() for call in group.calls]
        for group in self.groups.values():
            group.ended = True
        for call in calls:
            call.cancel()
        for start in self._starting:
            start.cancel()
        ending = (call.finished(self.grace) for call in calls)
        await unless(self._hurry, *ending, settled(self._starting))
        supervisors = self._supervisors()
        results = await unless(self._hurry, *(one.stop(self.grace) for one in supervisors))
        if results is None:
            results = await stop_all(supervisors, 0.0)
        await self._backend.close()
        tell(results)

    # ---- inside

    def _explain_end(self, group: str, error: BaseException) -> None:
        """A launch whose starts were cancelled by `_close`, rather than itself, says so."""
        task = asyncio.current_task()
        by_others = task is None or not task.cancelling()
        if self._closing and by_others and isinstance(error, asyncio.CancelledError):
            raise BuildError(f"{group}: this cluster was left while it started") from None

    def _check_open(self, group: str) -> None:
        if self._closing:
            raise BuildError(f"{group}: this cluster has been left: make another one")
        if self._parent is None:
            raise BuildError("enter the cluster first: async with Cluster.process() as c: ...")
        if group in self.groups:
            raise BuildError(f"there is a group {group!r} already: pass another name=")
