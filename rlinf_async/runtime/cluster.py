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
import math
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlinf_async.channels import Channel, Latest, Statistics
from rlinf_async.channels.statistics import Wait, mark_cut_off, render
from rlinf_async.channels.wire.homes import HomeMaker
from rlinf_async.channels.wire.protocol import ChannelSeen
from rlinf_async.channels.wire.session.connection import Traffic
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.calls import FirstCause, GroupCall, WorkerGroup, WorkerRef
from rlinf_async.runtime.deadlock import DeadlockWatch
from rlinf_async.runtime.homes import HomedChannel
from rlinf_async.runtime.launching import (
    Launch,
    Placement,
    check_launch,
    check_limits,
    specs,
)
from rlinf_async.runtime.recording import ClusterRecording, RecordingConfig, next_start
from rlinf_async.runtime.signals import run_signals
from rlinf_async.runtime.supervise import (
    Backend,
    Never,
    Restart,
    Supervisor,
    WorkerSpec,
    all_ended,
    all_or_none,
    log_failed_stops,
    stop_all,
    unless,
)
from rlinf_async.runtime.wakers import internal
from rlinf_async.workers.base import BuildError, Device, Worker, is_secondary

if TYPE_CHECKING:  # a cluster that records nothing does not load it
    from rlinf_async.recording.recorder import Recorder
    from rlinf_async.runtime.recorded import CallsRecorder

W = TypeVar("W", bound=Worker)
log = logging.getLogger(__name__)


class ClusterGroups:
    """Starts groups on a backend, and ends them.

    Args:
        grace: seconds that workers get to finish when they are stopped.
        on_failure: told of a call that failed.
        on_idle_death: told of a worker that died while nobody called it, and stays dead.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        grace: float,
        on_failure: Callable[[BaseException, GroupCall[Any]], None],
        on_idle_death: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._grace = grace
        self._on_failure = on_failure
        self._on_idle_death = on_idle_death
        self.by_name: dict[str, WorkerGroup[Any]] = {}
        self.closing = False
        """whether the cluster is being left: what starts is cancelled"""
        self._starting: set[asyncio.Task[Any]] = set()
        self._placing: set[str] = set()
        """names of groups whose devices are being reserved"""
        self._spans: list[Span] = []
        self._recorder: CallsRecorder | None = None

    def record_calls(self, recorder: CallsRecorder) -> None:
        """Record launches and calls from now on, and what runs already as it was launched."""
        if self._recorder is not None:
            return
        self._recorder = recorder
        for one in self.supervisors():
            one.recorder = recorder
            recorder.launched(one.spec)

    def check_name(self, name: str) -> None:
        """Raise `BuildError` where a name is taken."""
        if name in self.by_name or name in self._placing:
            raise BuildError(f"there is a group {name!r} already: pass another name=")

    async def start(
        self, worker: type[W], launch: Launch, ranks: list[WorkerSpec]
    ) -> WorkerGroup[W]:
        """Reserve what the ranks need, and start all of them, or none.

        Raises:
            BuildError: they cannot be had or started; the cluster was left meanwhile.
            WorkerError: ``__init__`` or ``setup`` raised in a rank.
        """
        placed = await self._place(launch.group, ranks)
        supervisors = [
            Supervisor(self._backend, spec, launch.restart or Never(), self._on_idle_death)
            for spec in placed
        ]
        for one in supervisors:
            one.recorder = self._recorder
        made = WorkerGroup(worker, launch.group, supervisors, self._on_failure, self._grace)
        self.by_name[launch.group] = made
        self._backend.check_load(len(self.supervisors()))
        starts = [asyncio.create_task(one.start(), name=one.name) for one in supervisors]
        self._starting.update(starts)
        try:
            await all_or_none(starts)
        except BaseException as error:  # the ranks that did start are of no use alone
            log_failed_stops(await stop_all(supervisors, self._grace))
            del self.by_name[launch.group]
            await self._backend.release(placed)
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

    def _explain_end(self, group: str, error: BaseException) -> None:
        """Raise `BuildError` for a launch whose starts were cancelled by `close`."""
        task = asyncio.current_task()
        by_others = task is None or not task.cancelling()
        if self.closing and by_others and isinstance(error, asyncio.CancelledError):
            raise BuildError(f"{group}: this cluster was left while it started") from None

    def supervisors(self) -> list[Supervisor]:
        """Supervisors of all ranks of all groups."""
        return [one for group in self.by_name.values() for one in group.supervisors]

    async def spans(self) -> list[Span]:
        """All spans that workers have recorded since the last time."""
        for supervisor in self.supervisors():
            handle = supervisor.live
            if handle is not None:
                self._spans += await handle.spans()
            left, supervisor.spans_left = supervisor.spans_left, []
            self._spans += left
        taken, self._spans = self._spans, []
        return taken

    async def close(self, hurry: asyncio.Event) -> list[Any]:
        """End calls and starts, then the workers; without grace once ``hurry`` is set.

        Returns what stopping each worker raised, or None, see `log_failed_stops`.
        """
        calls = [call for group in self.by_name.values() for call in group.calls]
        for group in self.by_name.values():
            group.ended = True
        for call in calls:
            call.cancel()
        for start in self._starting:
            start.cancel()
        ending = (call.finished(self._grace) for call in calls)
        await unless(hurry, *ending, all_ended(self._starting))
        supervisors = self.supervisors()
        results = await unless(hurry, *(one.stop(self._grace) for one in supervisors))
        if results is None:
            log.warning("interrupted again: workers are killed")
            results = await stop_all(supervisors, 0.0)
        return results


T = TypeVar("T")
C = TypeVar("C", Channel[Any], Latest[Any])


class ClusterChannels:
    """Channels of a cluster. Gives them to the backend, so that workers can have ends of them, and
    finds who waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.recording = ClusterRecording()
        self.here: dict[str, Channel[Any] | Latest[Any]] = {}
        """channels whose queues live in this process, by name"""
        self.homed: dict[str, HomedChannel[Any]] = {}
        """channels whose queues live with workers, by name"""
        self._makers: dict[str, HomeMaker] = {}
        self._seen: list[ChannelSeen] = []
        """state of the channels in ``homed``, when they were last looked at"""

    def check_name(self, name: str) -> None:
        """Raise `BuildError` where a name is taken."""
        if name in self.here or name in self.homed:
            raise BuildError(f"there is a channel {name!r} already: give each its own name")

    def make(self, kind: type[C], item_type: Any, *, name: str, **options: Any) -> C:
        """Make and add a `Channel` or `Latest` whose queue lives here.

        Raises:
            BuildError: its name is taken, or its type cannot cross to workers.
        """
        self.check_name(name)
        try:
            made = kind(item_type, name=name, **options)
            self._backend.publish(made)
        except TypeError as error:
            raise _cannot_cross(name, error) from error
        self.here[name] = made
        self.recording.made(made)
        return made

    async def make_at(
        self, home: str, item_type: type[T] | UnionType, *, name: str, **options: Any
    ) -> HomedChannel[T]:
        """Make and add one whose queue lives with a worker. ``options``: as of `Channel`.

        Raises:
            BuildError: the type cannot cross to workers.
            WorkerDied, HomeLost: as `Cluster.channel_at`.
        """
        maker = await self._backend.home(home)
        if maker is not None:
            self.recording.made_elsewhere(name, home)
        if maker is None:  # all are in one process
            here: Channel[T] = self.make(Channel, item_type, name=name, **options)
            made = HomedChannel[T](here, home)
        else:
            try:
                there = await maker.create(item_type, name=name, **options)
            except TypeError as error:
                raise _cannot_cross(name, error) from error
            made = HomedChannel[T](there, home)
            self._makers[home] = maker
        self.homed[name] = made
        return made

    async def look_at_homes(self) -> list[Statistics]:
        """Look at those whose queues live with workers, for `waits` and `dead_letters`."""
        if self._makers:
            found = await asyncio.gather(*(maker.look() for maker in self._makers.values()))
            self._seen = [one for of_home in found for one in of_home]
        return [one.statistics for one in self._seen]

    def waits(self) -> list[Wait]:
        """Everybody who waits, the longest first."""
        cut_off = tuple(f"{name}." for name in self._backend.cut_off())
        here = [wait for channel in self.here.values() for wait in channel.waits()]
        every = [*here, *(wait for one in self._seen for wait in one.waits)]
        found = [mark_cut_off(wait, cut_off) for wait in every]
        return sorted(found, key=lambda wait: -wait.seconds)

    def dead_letters(self) -> list[str]:
        """A line for each channel that gave items up, with the last one's error."""
        return [
            f"dead letters of channel {name!r}: {len(dead)}, the last after "
            f"{dead[-1].deliveries} deliveries: {dead[-1].error}"
            for name, channel in self.here.items()
            if isinstance(channel, Channel) and (dead := channel.dead_letters)
        ] + [
            f"dead letters of channel {one.statistics.name!r}: {one.statistics.dead_letters}, the "
            f"last after {one.dead_letter}"
            for one in self._seen
            if one.dead_letter
        ]


def _cannot_cross(name: str, error: TypeError) -> BuildError:
    return BuildError(f"channel {name!r} cannot cross to workers: {error}")


class ClusterBody:
    """Body of ``async with`` of a cluster. The first failure cancels it, and is raised once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        """task that entered the cluster"""
        self._cause = FirstCause()
        self._aborted = False
        self._leaving = False
        self._hurry = asyncio.Event()
        """set once the task is cancelled while the cluster is closed"""

    @property
    def entered(self) -> bool:
        """Whether the body was entered, at any time."""
        return self._task is not None

    def enter(self) -> None:
        """Note that this task runs the body.

        Raises:
            RuntimeError: it was entered before.
        """
        if self.entered:
            raise RuntimeError("a Cluster can be entered once: make another one")
        self._task = asyncio.current_task()

    def abort(self, cause: BaseException) -> None:
        """Cancel it, and raise ``cause`` when it is left; of several the first."""
        self._cause.note(cause, None)
        if self._aborted or self._leaving or self._task is None:
            return
        if self._task.done():  # entered by a cell of a notebook: nobody is there to be cancelled
            log.error("the cluster failed: leave it, and make another one\n%s", cause)
        else:
            self._aborted = True
            run_signals().note_failure()
            self._task.cancel()

    def call_failed(self, error: BaseException, call: GroupCall[Any]) -> None:
        """Note the failure of a call; where nobody awaits it, it ends the cluster."""
        self._cause.note(error, call)
        if not call.awaited:
            self.abort(error)

    async def leave(
        self,
        error: BaseException | None,
        close: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
    ) -> None:
        """Close, and raise what the cluster ends with.

        Args:
            error: error that the body ended with, raised anyway unless this raises another.
            close: ends what the body started; without grace once its argument is set.
        """
        body_failed = isinstance(error, Exception) and not is_secondary(error)
        if isinstance(error, Exception):
            run_signals().note_failure()
        interrupted = await self._close_shielded(close)
        if self._aborted and self._task is not None:
            self._task.uncancel()
        cause = self._cause.error
        if cause is None or not self._cause.outranks(error, aborted=self._aborted):
            if error is None and interrupted is not None:
                raise interrupted
            return
        if body_failed:
            cause.add_note(f"the body of the cluster then raised {error!r}")
        raise cause from cause.__cause__  # not from the errors that it led to

    async def _close_shielded(
        self, close: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    ) -> asyncio.CancelledError | None:
        """Close; without grace once the task is cancelled, and return that cancellation."""
        self._leaving = True
        interrupted = None
        closing = internal(asyncio.create_task(close(self._hurry), name="close cluster"))
        own = int(self._aborted)  # our own cancellation may arrive only now
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                if self._task is not None and self._task.cancelling() > own:
                    interrupted = error
                    self._hurry.set()
        closing.result()
        return interrupted


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
        """channels whose queues live in this process, by name"""
        self.homed = self._channels.homed
        """channels whose queues live with workers, by name"""
        self._body = ClusterBody()
        self._groups = ClusterGroups(
            backend,
            grace=grace,
            on_failure=self._body.call_failed,
            on_idle_death=self._body.abort,
        )
        self.groups = self._groups.by_name
        """groups of workers, by name"""
        self._devices = None if devices is None else tuple(devices)
        self._watch = DeadlockWatch(
            self.channels,
            self._groups.supervisors,
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

        if not 0.0 <= wait < math.inf:
            raise BuildError(f"wait must be seconds from 0, got {wait!r}")
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
            placement: devices of each rank; without one, none are assigned.
            name: name of the group in errors and reports; by default the class's.
            restart: what to do when a rank's process dies; by default the run ends.
            collective: torch.distributed backend for the group; see `Worker.join_collective`.
            env_vars: environment variables of the ranks' processes.
            resources: what each rank's host must have besides devices, by name: ``{"robot": 1}``.
                Only a cluster of Ray knows any.
            runtime_env: Ray's runtime environment of the ranks, such as ``{"py_executable": ...}``,
                over that of the cluster; ``env_vars`` go before those in it. Only on Ray.

        A call on the group gives a list with one result per rank, a call on ``group[0]`` the
        result itself. If the launch is cancelled, or one rank cannot be started, none is left.

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
        if not self.groups:
            self._channels.recording.check([*self.channels, *self.homed])
        places = placement.assign(count, self.devices) if placement else [()] * count
        ranks = specs(launch, places, self._backend, args, kwargs)
        return await self._groups.start(worker, launch, ranks)

    # ---- channels

    def channel(
        self,
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
        stealing: bool = False,
    ) -> Channel[T]:
        """A new channel. See `Channel` for the arguments.

        Raises:
            BuildError: the name is taken, or the type cannot cross to workers.
        """
        return self._channels.make(
            Channel,
            item_type,
            name=name,
            capacity=capacity,
            max_weight=max_weight,
            max_deliveries=max_deliveries,
            stealing=stealing,
        )

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
        homes = home.group.supervisors[home.rank].homes
        homes.append(name)  # now: it must not be replaced meanwhile
        try:
            return await self._channels.make_at(
                home.name,
                item_type,
                name=name,
                capacity=capacity,
                max_weight=max_weight,
                max_deliveries=max_deliveries,
            )
        except BaseException:
            homes.remove(name)
            raise

    def _check_home(self, home: WorkerRef[Any], name: str) -> None:
        self._channels.check_name(name)
        group = home.group
        if self.groups.get(group.name) is not group:
            raise BuildError(f"channel {name!r}: {home.name} is no worker of this cluster")
        if group.replacing:
            raise BuildError(f"channel {name!r}: {group.name} is being replaced: wait for its end")
        if group.supervisors[home.rank].restartable:
            raise BuildError(
                f"channel {name!r} cannot live with {home.name}, which is started again when it "
                "dies: what is queued would be lost with its first life. Launch it without "
                "restart=, or choose another worker"
            )

    def latest(self, item_type: type[T] | UnionType, *, name: str) -> Latest[T]:
        """A new `Latest`: a channel that holds only the newest value.

        Raises:
            BuildError: the name is taken, or the type cannot cross to workers.
        """
        return self._channels.make(Latest, item_type, name=name)

    # ---- recording

    def record(self, channel: Channel[Any] | Latest[Any], folder: Path | None = None) -> None:
        """Write down everything that passes a channel, from now on: see `rlinf_async.recording`.

        Args:
            channel: one whose queue lives in this process.
            folder: of the recording, empty or not there, chosen with the first channel; by default
                ``recording/1`` in the working directory, or the next number that is free.

        Raises:
            BuildError: the queue lives with a worker.
            RecordingError: the folder is not empty, or cannot be made.
        """
        if not isinstance(channel, Channel | Latest):
            raise BuildError(
                f"{channel!r} lives with a worker, and its items do not pass this process: it "
                "cannot be recorded; make it with cluster.channel"
            )
        recording = self._channels.recording
        folder = folder or next_start(Path("recording"))
        recording.open(folder, RecordingConfig().nbytes).record(channel)
        self._record_calls()

    def record_into(self, folder: Path, channels: Sequence[str], limit: int) -> None:
        """Record the channels of these names as they are made; ``"all"``: every one.

        When the first worker is launched, all that are named must be there.

        Args:
            folder: of the recording, empty or not there.
            channels: their names.
            limit: bytes of all recordings beside this one, and of this one.

        Raises:
            RecordingError: the folder is not empty, or cannot be made.
        """
        self._channels.recording.open(folder, limit)
        self._channels.recording.want(channels)
        self._record_calls()

    def _record_calls(self) -> None:
        """Record what the workers are told to do, too."""
        from rlinf_async.runtime.recorded import CallsRecorder

        if self.recorder is not None:
            self._groups.record_calls(CallsRecorder(self.recorder.note, self.recorder.folder))

    @property
    def recorder(self) -> Recorder | None:
        """Who writes down what passes the channels; None where nothing is recorded."""
        return self._channels.recording.recorder

    # ---- what can be seen of it

    def waits(self) -> list[Wait]:
        """Everybody who waits on a channel of this cluster, the longest first. Of channels whose
        queues live with workers, those who did within the last second."""
        return self._channels.waits()

    def traffic(self) -> list[Traffic]:
        """Return what went over the connection to each worker's process."""
        return self._backend.traffic()

    def report(self) -> str:
        """Return who waits for whom, who is cut off, and which items were given up, for people."""
        cut_off = [
            f"{name} is cut off: reconnecting for {seconds:.1f} s"
            for name, seconds in self._backend.cut_off().items()
        ]
        return "\n".join([render(self.waits()), *cut_off, *self._channels.dead_letters()])

    @property
    def devices(self) -> Sequence[Device]:
        """Devices that placements choose from."""
        return self._backend.devices() if self._devices is None else self._devices

    @property
    def address(self) -> str | None:
        """Address at which other hosts reach this cluster; None where it does not `listen`."""
        return self._backend.address

    def pid(self, name: str) -> int | None:
        """The process of a worker by its name (``"Env[0]"``); None where it has none of its own."""
        process = self._backend.process(name)
        return None if process is None else process.pid

    def host(self, name: str) -> str | None:
        """The host of a worker's process; None where it has no process of its own."""
        process = self._backend.process(name)
        return None if process is None else process.host

    async def spans(self) -> list[Span]:
        """All spans that workers have recorded since the last time."""
        return await self._groups.spans()

    # ---- life

    async def __aenter__(self) -> Self:
        self._body.enter()
        await self._backend.open()
        self._watch.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._groups.closing = True
        await self._body.leave(error, self._close)

    def abort(self, cause: BaseException) -> None:
        """End the cluster: cancel its body, and raise ``cause`` when it is left; of several the
        first."""
        self._body.abort(cause)

    async def _close(self, hurry: asyncio.Event) -> None:
        self._watch.stop()
        results = await self._groups.close(hurry)
        await self._backend.close()
        self._channels.recording.close()
        log_failed_stops(results)

    def _check_open(self, group: str) -> None:
        if self._groups.closing:
            raise BuildError(f"{group}: this cluster has been left: make another one")
        if not self._body.entered:
            raise BuildError("enter the cluster first: async with Cluster.process() as c: ...")
        self._groups.check_name(group)
