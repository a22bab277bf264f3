"""`Cluster`: makes channels, starts workers, and leaves nothing behind.

::

                     waits for                         unblocked by
    the body         calls, channels                   workers; a failure cancels it
    a rank's call    its rank's restart, its method    the worker's reply or death
    a worker         its calls, channels, compute      the driver, items, its own thread
    leaving          calls, workers, processes         cancellation, then force after `grace`

The body of ``async with`` and everything it started end together: the first failure cancels the
rest and is raised once, with the worker, rank, host, method and traceback of its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Self, TypeVar

from rlinf_async.channels import Channel, Latest, Wait, render
from rlinf_async.channels.wire import Traffic
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.backend import Backend, WorkerSpec
from rlinf_async.runtime.calls import FirstCause, GroupCall
from rlinf_async.runtime.cluster_channels import ClusterChannels
from rlinf_async.runtime.deadlock import DeadlockWatch
from rlinf_async.runtime.group import WorkerGroup, WorkerRef
from rlinf_async.runtime.homes import HomedChannel
from rlinf_async.runtime.launching import Launch, check_launch, check_limits, check_seconds, specs
from rlinf_async.runtime.placement import Placement
from rlinf_async.runtime.signals import run_signals
from rlinf_async.runtime.stall import internal
from rlinf_async.runtime.supervise import (
    Never,
    Restart,
    Supervisor,
    all_ended,
    all_or_none,
    log_failed_stops,
    stop_all,
    unless,
)
from rlinf_async.workers.base import Worker
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError, is_secondary

T = TypeVar("T")
W = TypeVar("W", bound=Worker)
log = logging.getLogger(__name__)


class Cluster:
    """A task group whose tasks are workers, and the channels between them.

    Make one with `local`, `process` or `ray`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        devices: Sequence[Device] | None = None,
        deadlock_after: float | None = 10.0,
        grace: float = 5.0,
    ) -> None:
        check_limits(deadlock_after=deadlock_after, grace=grace)
        self._backend = backend
        self._channels = ClusterChannels(backend)
        self.channels = self._channels.here
        """by name"""
        self.homed = self._channels.homed
        """channels whose queues live with workers, by name"""
        self.groups: dict[str, WorkerGroup[Any]] = {}
        """by name"""
        self._devices = None if devices is None else tuple(devices)
        self.grace = grace
        self._spans: list[Span] = []
        self._starting: set[asyncio.Task[Any]] = set()
        self._placing: set[str] = set()
        """names of groups whose devices are being reserved"""
        self._parent: asyncio.Task[Any] | None = None
        self._cause = FirstCause()
        self._aborted = False
        self._entered = False
        self._closing = False
        self._hurry = asyncio.Event()
        self._watch = DeadlockWatch(
            self.channels,
            self.groups,
            homed=self._channels.look_at_homes,
            waits=self.waits,
            report=self.report,
            on_deadlock=self.abort,
            limit=deadlock_after,
        )

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
        log: Path | None = None,
    ) -> Self:
        """One OS process per worker on this host.

        Args:
            devices: what placements choose from; by default the host's accelerators, else its CPU
                cores.
            deadlock_after: seconds in which nobody can go on before `Deadlock` is raised; None:
                it is only reported.
            grace: seconds that workers get to finish when the cluster ends.
            heartbeat_limit: seconds after which a worker whose event loop does not answer is
                killed.
            listen: ``tcp://host:port``, or ``tls://host:port`` for encrypted connections, to be
                reached from other hosts at this address, under the secret that
                RLINF_ASYNC_SECRET_FILE or RLINF_ASYNC_SECRET gives; by default what
                RLINF_ASYNC_LISTEN says. The workers of this host use a Unix socket in any case.
            log: file to which the output of the workers is appended, each line with the worker's
                name; by default it goes to standard error.

        Raises:
            BuildError: invalid time limit; an address to listen at, but no secret.
        """
        from rlinf_async.runtime.process import ProcessBackend

        backend = ProcessBackend(heartbeat_limit=heartbeat_limit, listen=listen, log=log)
        return cls(backend, devices=devices, deadlock_after=deadlock_after, grace=grace)

    @classmethod
    def ray(
        cls,
        *,
        address: str | None = None,
        devices: Sequence[Device] | None = None,
        deadlock_after: float | None = 10.0,
        grace: float = 5.0,
        heartbeat_limit: float = 60.0,
        wait: float = 10.0,
        interface: str = "",
        tls: bool = False,
        runtime_env: dict[str, Any] | None = None,
        log: Path | None = None,
    ) -> Self:
        """One actor of Ray per worker, on the hosts of a Ray cluster.

        Args:
            address: ``host:port`` of the cluster's head, or ``"auto"`` for the one that runs on
                this host. None: that of RAY_ADDRESS; where it is not set, Ray is started on this
                host and ends with the cluster. A connection that the script has made by
                ``ray.init`` is used as it is.
            devices: what placements choose from; by default the accelerators of all hosts, and the
                CPU cores of hosts that have none.
            deadlock_after, grace, heartbeat_limit: as of `process`.
            wait: seconds to wait for devices that others use, or that autoscaling is to bring;
                then `launch` raises `BuildError`. With 0, what no host has is refused at once.
            interface: network interface between the hosts, such as ``"eth1"``; by default that of
                the address by which Ray knows each host.
            tls: whether the channels' connections between hosts are encrypted, under a certificate
                that follows from the cluster's secret.
            runtime_env: Ray's runtime environment of all workers: working directory, packages.
            log: file to which the output of the workers is appended, each line with the worker's
                name and host; by default Ray prints it to standard error.

        Raises:
            BuildError: invalid time limit. When it is entered: Ray is not installed, the address
                does not answer, the cluster has another version of Ray or Python.
        """
        from rlinf_async.runtime.ray.backend import RayBackend

        check_seconds("heartbeat_limit", heartbeat_limit, "60 or so")
        backend = RayBackend(
            address,
            heartbeat_limit=heartbeat_limit,
            wait=wait,
            interface=interface,
            tls=tls,
            runtime_env=runtime_env,
            log=log,
        )
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
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
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
            resources: what each rank's host must have besides devices, by name: ``{"robot": 1}``.
                Only a cluster of Ray knows any.
            runtime_env: Ray's runtime environment of the ranks, such as ``{"py_executable": ...}``,
                over that of the cluster; ``env_vars`` go before those in it. Only on Ray.

        A call on the group gives a list with one result per rank, ``[x]`` where ``count`` is 1: see
        `launch_one`. If the launch is cancelled, or one rank cannot be started, none is left.

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
            resources=resources,
            runtime_env=runtime_env,
        )
        check_launch(launch, args, kwargs)
        self._check_open(launch.group)
        places = placement.assign(count, self.devices) if placement else [()] * count
        ranks = await self._place(launch.group, specs(launch, places, self._backend, args, kwargs))
        supervisors = [
            Supervisor(self._backend, spec, restart or Never(), self._on_idle_death)
            for spec in ranks
        ]
        made = WorkerGroup(worker, launch.group, supervisors, self._on_failure)
        self.groups[launch.group] = made
        self._backend.check_load(sum(map(len, self.groups.values())))
        starts = [asyncio.create_task(one.start(), name=one.name) for one in supervisors]
        self._starting.update(starts)
        try:
            await all_or_none(starts)
        except BaseException as error:  # the ranks that did start are of no use alone
            log_failed_stops(await stop_all(supervisors, self.grace))
            del self.groups[launch.group]
            await self._backend.release(ranks)
            self._explain_end(launch.group, error)
            raise
        finally:
            self._starting.difference_update(starts)
        return made

    async def _place(self, group: str, ranks: list[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Reserve what a launch needs; ended with the cluster."""
        placing = asyncio.create_task(self._backend.place(ranks), name=f"place {group}")
        self._placing.add(group)
        self._starting.add(placing)
        try:
            return await placing
        except BaseException as error:
            placing.cancel()
            [placed] = await asyncio.gather(placing, return_exceptions=True)
            if not isinstance(placed, BaseException):  # just when this was cancelled
                await self._backend.release(placed)
            self._explain_end(group, error)
            raise
        finally:
            self._placing.discard(group)
            self._starting.discard(placing)

    async def launch_one(
        self,
        worker: type[W],
        *args: Any,
        placement: Placement | None = None,
        name: str | None = None,
        restart: Never | Restart | None = None,
        env_vars: dict[str, str] | None = None,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> WorkerRef[W]:
        """Start a single worker, whose calls give the result itself. See `launch`."""
        group = await self.launch(
            worker,
            *args,
            placement=placement,
            name=name,
            restart=restart,
            env_vars=env_vars,
            resources=resources,
            runtime_env=runtime_env,
            **kwargs,
        )
        return group[0]

    # ---- channels

    def channel(
        self,
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
    ) -> Channel[T]:
        """A new channel. See `Channel` for the arguments.

        Raises:
            BuildError: the name is taken.
        """
        made: Channel[T] = Channel(
            item_type,
            name=name,
            capacity=capacity,
            max_weight=max_weight,
            max_deliveries=max_deliveries,
        )
        self._channels.publish(made)
        return made

    async def channel_at(
        self,
        home: WorkerRef[Any],
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
    ) -> HomedChannel[T]:
        """A new channel whose queue lives with a worker: its items do not pass this process.

        Give its ends to calls as those of any other channel. With the worker, what is queued is
        lost: its death ends the run, and every use of the channel raises `HomeLost`.

        Args:
            home: the worker, ``group[0]``. It must not be one that is started again.
            item_type, name, capacity, max_weight, max_deliveries: as of `Channel`.

        Raises:
            BuildError: the name is taken; the worker is restarted when it dies, or of another
                cluster; the type cannot cross to workers.
            WorkerDied: the worker is gone.
            HomeLost: it cannot be reached from here.
        """
        self._check_home(home, name)
        return await self._channels.make_at(
            home.name,
            item_type,
            name=name,
            capacity=capacity,
            max_weight=max_weight,
            max_deliveries=max_deliveries,
        )

    def _check_home(self, home: WorkerRef[Any], name: str) -> None:
        self._channels.check_name(name)
        group = home.group
        if self.groups.get(group.name) is not group:
            raise BuildError(f"channel {name!r}: {home.name} is no worker of this cluster")
        if group.supervisors[home.rank].restartable:
            raise BuildError(
                f"channel {name!r} cannot live with {home.name}, which is started again when it "
                "dies: what is queued would be lost with its first life. Launch it without "
                "restart=, or choose another worker"
            )

    def latest(self, item_type: type[T] | UnionType, *, name: str) -> Latest[T]:
        """A new `Latest`: a channel that holds only the newest value.

        Raises:
            BuildError: the name is taken.
        """
        made: Latest[T] = Latest(item_type, name=name)
        self._channels.publish(made)
        return made

    # ---- what can be seen of it

    def waits(self) -> list[Wait]:
        """Everybody who waits on a channel of this cluster, the longest first. Of channels whose
        queues live with workers, those who did within the last second."""
        return self._channels.waits()

    def traffic(self) -> list[Traffic]:
        """What went over the connection to each worker's process."""
        return self._backend.traffic()

    def report(self) -> str:
        """Who waits for whom, who is cut off, and which items were given up, for a person."""
        cut_off = [
            f"{name} is cut off: reconnecting for {seconds:.1f} s"
            for name, seconds in self._backend.cut_off().items()
        ]
        return "\n".join([render(self.waits()), *cut_off, *self._channels.dead_letters()])

    @property
    def devices(self) -> Sequence[Device]:
        """What placements choose from."""
        return self._backend.devices() if self._devices is None else self._devices

    @property
    def address(self) -> str | None:
        """Where other hosts reach this cluster; None where it does not `listen`."""
        return self._backend.address

    def pid(self, name: str) -> int | None:
        """The process of a worker by its name (``"Env[0]"``); None where it has none of its own."""
        return self._backend.pid(name)

    def host(self, name: str) -> str | None:
        """The host of a worker's process; None where it has no process of its own."""
        return self._backend.host(name)

    async def spans(self) -> list[Span]:
        """All spans that workers have recorded since the last time."""
        for supervisor in self._supervisors():
            handle = supervisor.handle_nowait()
            if handle is not None:
                self._spans += await handle.spans()
        taken, self._spans = self._spans, []
        return taken

    def _supervisors(self) -> list[Supervisor]:
        return [one for group in self.groups.values() for one in group.supervisors]

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
        if isinstance(error, Exception):
            run_signals().note_failure()
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
        raise cause from cause.__cause__  # not from the errors that it led to

    def abort(self, cause: BaseException) -> None:
        """End the cluster: cancel its body, and raise ``cause`` when it is left; of several the
        first."""
        self._cause.note(cause, None)
        if self._aborted or self._closing or self._parent is None:
            return
        if self._parent.done():  # entered by a cell of a notebook: nobody is there to be cancelled
            log.error("the cluster failed: leave it, and make another one\n%s", cause)
        else:
            self._aborted = True
            run_signals().note_failure()
            self._parent.cancel()

    def _on_failure(self, error: BaseException, call: GroupCall[Any]) -> None:
        self._cause.note(error, call)
        if not call.awaited:
            self.abort(error)

    def _on_idle_death(self, death: BaseException) -> None:
        self.abort(death)

    async def _close_shielded(self) -> asyncio.CancelledError | None:
        """Close; without grace once the parent is cancelled, and return that cancellation."""
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
        await unless(self._hurry, *ending, all_ended(self._starting))
        supervisors = self._supervisors()
        results = await unless(self._hurry, *(one.stop(self.grace) for one in supervisors))
        if results is None:
            log.warning("interrupted again: workers are killed")
            results = await stop_all(supervisors, 0.0)
        await self._backend.close()
        log_failed_stops(results)

    # ---- inside

    def _explain_end(self, group: str, error: BaseException) -> None:
        """Raise `BuildError` for a launch whose starts were cancelled by `_close`."""
        task = asyncio.current_task()
        by_others = task is None or not task.cancelling()
        if self._closing and by_others and isinstance(error, asyncio.CancelledError):
            raise BuildError(f"{group}: this cluster was left while it started") from None

    def _check_open(self, group: str) -> None:
        if self._closing:
            raise BuildError(f"{group}: this cluster has been left: make another one")
        if self._parent is None:
            raise BuildError("enter the cluster first: async with Cluster.process() as c: ...")
        if group in self.groups or group in self._placing:
            raise BuildError(f"there is a group {group!r} already: pass another name=")
