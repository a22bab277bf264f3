"""Supervision: keeps the ranks of a group alive, on any backend; starts and stops many at once.

::

    started --died--> restart allowed? --yes--> started again (next incarnation); its calls are
    issued again
                            |
                            no --> the death is raised by its calls, or, if none runs or all of
                            them end without it (they were cancelled), ends the cluster

A call outlives the worker that runs it: it holds its channel ends meanwhile, so nobody downstream
sees an end of channel, and items that the dead worker had leased are delivered again.

`Backend` is where workers run: ``local`` as coroutines of this event loop, ``process`` as processes
of this host, ``ray`` as actors on the hosts of a Ray cluster. Groups, restarts and reports are
written once, over this base class and `WorkerHandle`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire.homes import HomeMaker
from rlinf_async.channels.wire.session.connection import Traffic
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.wakers import WorkFuture, internal, result_of
from rlinf_async.workers.base import BuildError, Device, Worker, WorkerDied, WorkerInfo
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method

Cancel = Callable[[], None]
"""Cancels a method that runs."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is needed to start one rank, and to start it again."""

    cls: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    info: WorkerInfo
    env_vars: dict[str, str]
    """environment variables of the rank's process, where it has one of its own"""
    resources: Mapping[str, float] = {}
    """what its host must have besides devices, by name: ``{"robot": 1}``"""
    runtime_env: Mapping[str, Any] = {}
    """Ray's runtime environment, without ``env_vars`` of the rank; ``py_executable`` alone, another
    Python, also where each rank is a process of this host"""
    restartable: bool = False
    """whether the run goes on after its death: then what it has put must not be lost with it"""


def on_this_host(
    ranks: Sequence[WorkerSpec], folder: Path, *, processes: bool = False
) -> list[WorkerSpec]:
    """The ranks of a launch on this host. Where they use torch.distributed, they meet at a file of
    this folder. ``processes``: each has its own, whose Python may be another one.

    Raises:
        BuildError: they ask for what only a cluster of Ray can give them.
    """
    for rank in ranks:
        for name in ("resources", "runtime_env"):
            asked = dict(getattr(rank, name))
            if processes:
                asked.pop("py_executable", None)
            if asked:
                raise BuildError(
                    f"{rank.info.group}: {name}={asked} cannot be had here, only on a "
                    f"cluster of Ray: leave {name} out, or use Cluster.ray()"
                )
    return with_rendezvous(ranks, (folder / f"rendezvous-{uuid4().hex}").as_uri())


def with_rendezvous(ranks: Sequence[WorkerSpec], rendezvous: str) -> list[WorkerSpec]:
    """The ranks of a launch, where torch.distributed's ``init_method`` is this."""
    replace = msgspec.structs.replace
    return [replace(one, info=replace(one.info, rendezvous=rendezvous)) for one in ranks]


class Doing(msgspec.Struct, frozen=True):
    """Present work of a worker."""

    spans: tuple[str, ...] = ()
    """names of its open spans, without waits"""


class Standstill(msgspec.Struct, frozen=True):
    """Whether a worker stands still for as long as nobody else does anything."""

    unless: str = ""
    """what could let it go on by itself, in a few words; empty: nothing"""
    moved: int = 0
    """changes while its process moves large items, though no channel changes: see `movement`"""


class WorkerHandle(ABC):
    """One started rank."""

    died: asyncio.Future[WorkerDied]
    """set when the worker is gone though nobody stopped it"""

    @abstractmethod
    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> Cancel:
        """Start a method there and return at once, with a function that cancels it.

        ``on_end`` is called once, later: with the result; with a `WorkerError`, which the method
        raised; with `WorkerDied`, if the worker died while the call ran; or with `CancelledError`.

        Raises:
            WorkerError, BuildError: nothing was started.
        """

    @abstractmethod
    async def doing(self) -> tuple[str, ...]:
        """What it says that it does, and the names of its open spans, without waits."""

    @abstractmethod
    async def standstill(self) -> Standstill:
        """Whether only others can let it go on. The worker searches its memory: a look at a run
        asks what it is `doing`."""

    @abstractmethod
    async def spans(self) -> list[Span]:
        """The spans recorded since the last time."""

    @abstractmethod
    async def stop(self, grace: float) -> None:
        """End the worker; by force after ``grace`` seconds, with 0 at once."""


class ProcessEnd(msgspec.Struct, frozen=True):
    """End of a worker's process."""

    how: str
    """``"exit code 1"``, ``"its node was lost"``"""
    hint: str = ""
    """where to look, if the process never connected"""


class WorkerProcess(ABC):
    """The process of one rank."""

    host: str
    """name of its host"""
    pid: int
    exit_seconds: float
    """time that a process which closed its connection has to be seen to end by itself"""
    ended: asyncio.Future[ProcessEnd]
    """set once it is gone"""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and what it started; `ended` is set soon."""


class Backend(ABC):
    """A place where workers run. What is not abstract does nothing where they have no processes of
    their own."""

    isolates_devices: bool = False
    """whether a worker's process sees its own accelerators alone, as ``cuda:0`` and on"""

    @property
    def address(self) -> str | None:
        """Address at which other hosts reach this process; None for nowhere."""
        return None

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """The devices that there are, by host.

        Raises:
            RuntimeError: they are not known before `open`.
        """

    @abstractmethod
    async def open(self) -> None:
        """Get ready to start workers."""

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:  # noqa: B027
        """Register a channel, so that its ends can be given to workers."""

    async def home(self, name: str) -> HomeMaker | None:
        """Makes channels whose queues live with a started worker; None where it has no process of
        its own.

        Raises:
            WorkerDied: it is gone.
            HomeLost: it cannot be reached from here.
        """
        return None

    @abstractmethod
    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Reserve what the ranks of one launch need, before any of them starts.

        Returns:
            The ranks as they can be started, with the rendezvous of their torch.distributed.

        Raises:
            BuildError: it cannot be had; nothing is reserved.
        """

    async def release(self, ranks: Sequence[WorkerSpec]) -> None:  # noqa: B027
        """Give back what was reserved for a launch; its ranks have ended."""

    @abstractmethod
    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start one placed rank and run its ``setup``; again, where its process has died.

        Raises:
            WorkerError: ``__init__`` or ``setup`` raised, or the process died.
        """

    def check_load(self, workers: int) -> None:  # noqa: B027
        """Warn where ``workers`` workers are too many for this host."""

    def cut_off(self) -> dict[str, float]:
        """Workers whose connection is cut, and for how many seconds they have been reconnecting."""
        return {}

    def traffic(self) -> list[Traffic]:
        """Return what went over the connections to workers that have a process of their own."""
        return []

    def process(self, name: str) -> WorkerProcess | None:
        """The process of a worker; None where it has none of its own, or has ended."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Leave nothing behind."""


log = logging.getLogger(__name__)


class Never(msgspec.Struct, frozen=True):
    """The death of a rank's process ends the run with its cause."""


class Restart(msgspec.Struct, frozen=True):
    """A rank whose process dies is started again, at most ``max`` times within ``within`` seconds.

    An exception that a method raises is not a death: it would only be raised again. Seconds in
    which a process is started, or for which it was waited until one was found to hang, do not
    count: one that takes long to start and dies again and again is not started for ever.
    """

    max: int = 3
    within: float = 60.0

    def __post_init__(self) -> None:
        if type(self.max) is not int or self.max < 0:
            raise BuildError(f"Restart: max must be a whole number from 0, got {self.max!r}")
        if not self.within > 0:
            raise BuildError(f"Restart: within must be more than 0 seconds, got {self.within!r}")


class Supervisor:
    """One rank: its live worker, or the restart that is under way."""

    def __init__(
        self,
        backend: Backend,
        spec: WorkerSpec,
        policy: Never | Restart,
        on_idle_death: Callable[[Exception], None],
    ) -> None:
        self.name = spec.info.name
        self.devices = spec.info.devices
        """the accelerators of the rank, or its cores"""
        self.restartable = isinstance(policy, Restart) and policy.max > 0
        """whether it is started again when its process dies"""
        self._backend = backend
        self._spec = spec
        self._policy = policy
        self._on_idle_death = on_idle_death
        self._restarts: deque[float] = deque()
        self._waited = 0.0
        """seconds in which its processes were started, or until it was found that they hang"""
        self._handle: asyncio.Future[WorkerHandle] | None = None
        self.live: WorkerHandle | None = None
        """the worker; None while there is none"""
        self._restarting: asyncio.Task[None] | None = None
        self.calls = 0
        """calls that run on this rank, or wait for its worker"""
        self._unraised: Exception | None = None  # the final death, until a call has raised it
        self.restarts = 0
        self.stopping = False

    async def start(self) -> None:
        """Start the rank: another life where one dies before it is ready.

        Raises:
            WorkerDied: it died once more than the policy allows.
            WorkerError: ``__init__`` or ``setup`` raised.
        """
        while True:
            try:
                self._adopt(await self._start_life())
            except WorkerDied as death:
                if not self._may_restart(death):
                    raise
            else:
                return

    async def _start_life(self) -> WorkerHandle:
        began = asyncio.get_running_loop().time()
        try:
            return await self._backend.start(self._spec)
        finally:
            self._waited += asyncio.get_running_loop().time() - began

    async def worker(self) -> WorkerHandle:
        """The live worker; waits for a restart that is under way.

        Raises:
            WorkerDied: the worker died, and is not restarted.
        """
        if self._handle is None:
            raise RuntimeError(f"{self.name} was not started")
        return await result_of(self._handle)

    def call_ended(self, error: BaseException | None) -> None:
        """Count a call as ended; ``error`` is what it raises."""
        self.calls -= 1
        if error is not None and error is self._unraised:
            self._unraised = None
        self._check_raised()

    async def stop(self, grace: float) -> None:
        """End the rank for good."""
        self.stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self.live is not None:
            await self.live.stop(grace)

    def _adopt(self, handle: WorkerHandle) -> None:
        if self._handle is None or self._handle.done():
            self._handle = WorkFuture()
        self._handle.set_result(handle)
        self.live = handle
        handle.died.add_done_callback(partial(self._on_death, handle))

    def _on_death(self, worker: WorkerHandle, died: asyncio.Future[WorkerDied]) -> None:
        if not died.cancelled():
            self.lost(worker, died.result())

    def lost(self, worker: WorkerHandle, death: WorkerDied) -> None:
        """The worker has died: restart it, or give up. Reported by whoever notices first."""
        if self.stopping or self.live is not worker:
            return
        self.live = None
        self._handle = WorkFuture()
        self._handle.add_done_callback(_retrieve)
        self._waited += death.failure.waited
        if self._may_restart(death):
            task = asyncio.create_task(self._restart(death), name=f"restart {self.name}")
            self._restarting = internal(task)
        else:
            self._give_up(death)

    def _may_restart(self, death: WorkerDied) -> bool:
        """Whether the policy allows another life; then what is started is the next one."""
        if isinstance(self._policy, Never):
            return False
        now = asyncio.get_running_loop().time() - self._waited
        while self._restarts and self._restarts[0] < now - self._policy.within:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max:
            death.add_note(
                f"{self.name} was restarted {self.restarts} times; the policy allows "
                f"{self._policy.max} within {self._policy.within:g} s"
            )
            return False
        log.warning("%s; starting it again (%d so far)", death.summary, self.restarts + 1)
        self._restarts.append(now)
        self.restarts += 1
        info = msgspec.structs.replace(self._spec.info, incarnation=self.restarts)
        self._spec = msgspec.structs.replace(self._spec, info=info)
        return True

    async def _restart(self, death: WorkerDied) -> None:
        try:
            await self.start()
        except BuildError as error:  # not a wrong graph any more: the run has begun
            self._give_up(_not_replaced(death, error))
        except Exception as error:  # whatever it is: calls that wait for the worker must fail
            self._give_up(error)

    def _give_up(self, death: Exception) -> None:
        if self._handle is not None and not self._handle.done():
            self._handle.set_exception(death)
        self._unraised = death
        self._check_raised()

    def _check_raised(self) -> None:
        """Report a death that no call raises, with the next turn of the loop.

        It cancels the cluster's body, which must not look like the end of a call that the body
        itself cancelled and waits for.
        """
        if self._unraised is not None and not self.calls and not self.stopping:
            asyncio.get_running_loop().call_soon(self._report_if_idle)

    def _report_if_idle(self) -> None:
        if self._unraised is not None and not self.calls:
            death, self._unraised = self._unraised, None
            self._on_idle_death(death)


def _not_replaced(death: WorkerDied, error: BuildError) -> WorkerDied:
    """The death of a worker that could not be started again."""
    message = f"{death.failure.message}; it cannot be started again: {error}"
    return type(death)(msgspec.structs.replace(death.failure, message=message))


def _retrieve(future: asyncio.Future[WorkerHandle]) -> None:
    """Mark the exception as retrieved: a death that no call waits for is reported otherwise."""
    if not future.cancelled():
        future.exception()


async def all_or_none(tasks: list[asyncio.Task[None]]) -> None:
    """Await all tasks; at the first failure cancel the rest and raise it, not a group of one."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def all_ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until all tasks have ended, however they did."""
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(hurry: asyncio.Event, *waits: Coroutine[Any, Any, None]) -> list[Any] | None:
    """The results of ``waits``, errors included; None where ``hurry`` is set before."""
    every: asyncio.Future[Any] = asyncio.gather(*waits, return_exceptions=True)
    either: list[asyncio.Future[Any]] = [every]
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([*either, hurried], return_when=asyncio.FIRST_COMPLETED)
    in_time = every.done()
    hurried.cancel()
    every.cancel()
    await asyncio.gather(every, hurried, return_exceptions=True)
    return every.result() if in_time else None


async def stop_all(supervisors: Sequence[Supervisor], grace: float) -> list[Any]:
    """Stop these ranks; what one raises does not keep the others from being stopped."""
    stops = (one.stop(grace) for one in supervisors)
    return await asyncio.gather(*stops, return_exceptions=True)


def log_failed_stops(results: list[Any]) -> None:
    """Log the workers that failed while they were stopped: they must not hide the first cause."""
    for result in results:
        if isinstance(result, Exception):
            log.error("while a worker was stopped: %s", result)
