"""Supervision: keeps the ranks of a group alive, on any backend; starts and stops many at once.

::

    started --died--> restart allowed? --yes--> started again (next incarnation); its calls are
    issued again
                            |
                            no --> the death is raised by its calls, or, if none runs or all of
                            them end without it (they were cancelled), ends the cluster
    started --asked--> its successor is started beside it; its calls leave it; they are issued again
                       in the successor, and the worker is stopped

A call outlives the worker that runs it: it holds its channel ends meanwhile, so nobody downstream
sees an end of channel, and items that the dead worker had leased are delivered again.

`Backend` is where workers run: ``local`` as coroutines of this event loop, ``process`` as processes
of this host, ``ray`` as actors on the hosts of a Ray cluster. Groups, restarts and reports are
written once, over this base class and `WorkerHandle`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from rlinf_async import deadlines
from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire.homes import HomeMaker
from rlinf_async.channels.wire.session.connection import Traffic
from rlinf_async.config.registry import names_for_workers
from rlinf_async.observe.trace import Meter, Span, Work
from rlinf_async.runtime.wakers import WorkEvent, WorkFuture, internal, result_of
from rlinf_async.workers.base import BuildError, Device, Worker, WorkerDied, WorkerError, WorkerInfo
from rlinf_async.workers.host import OnEnd
from rlinf_async.workers.methods import Method


class MethodRun(Protocol):
    """A method that runs in a worker."""

    def cancel(self) -> None:
        """Cancel it."""

    def leave(self, within: float, /) -> None:
        """Cancel it in a moment in which nothing is under way in it, so that it can begin anew
        elsewhere; after ``within`` seconds in any case."""


class MovingCall(Protocol):
    """A call on a rank, whose worker may be replaced."""

    def move(self, worker: WorkerHandle, within: float, left: Callable[[], None]) -> bool:
        """Have the method leave this worker, and begin again in the next; False where it does not
        run there. ``left`` is called once it has."""
        ...

    def let_go(self) -> None:
        """What the method still does there does not count any more."""

    def check(self, cls: type[Worker]) -> None:
        """Raise `BuildError` where it could not go on in a worker of this class."""

    def become(self, cls: type[Worker]) -> None:
        """The next worker is of this class."""


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


class LifeRecorder(Protocol):
    """Writes down what workers are told to do: see `rlinf_async.runtime.recorded`."""

    def launched(self, spec: WorkerSpec, /) -> None:
        """A life of a rank begins."""

    def called(self, spec: WorkerSpec, method: str, arguments: Mapping[str, Any], /) -> int:
        """A method is called in this life; a number for the call."""
        ...

    def returned(
        self, spec: WorkerSpec, call: int, value: Any, error: BaseException | None, /
    ) -> None:
        """A call has ended."""


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


class WorkDone(msgspec.Struct, frozen=True):
    """Work of one worker since it began."""

    at: int = 0
    """time up to which it counts, in nanoseconds of its own clock"""
    work: tuple[Work, ...] = ()

    @classmethod
    def of(cls, meter: Meter) -> WorkDone:
        """Return what a meter has seen by now."""
        return cls(at=meter.clock(), work=tuple(meter.seen()))


class WorkerHandle(ABC):
    """One started rank."""

    died: asyncio.Future[WorkerDied]
    """set when the worker is gone though nobody stopped it"""

    @abstractmethod
    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> MethodRun:
        """Start a method there and return at once, with what cancels it.

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
    async def work(self) -> WorkDone:
        """How long it has worked on what, since it began."""

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

    def check_class(self, cls: type[Worker]) -> None:  # noqa: B027
        """Raise `BuildError` for a class that no worker's process can import."""

    def took_over(self, worker: WorkerHandle) -> None:  # noqa: B027
        """Note that this worker has taken the place of another of its name, which is to end."""

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


SPANS_LIMIT: Final = 2.0
"""seconds that a worker which was replaced has to hand its last spans over"""
LET_GO_AFTER: Final = 10.0
"""seconds for which a call that should have left a worker is waited for; what it does there is then
refused"""


class Life(NamedTuple):
    """A started worker, and what it was started with."""

    spec: WorkerSpec
    worker: WorkerHandle


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
        self._replacing: set[asyncio.Task[Any]] = set()
        """starts of a successor, and its exchange with the present worker"""
        self._others: list[WorkerHandle] = []
        """workers that are to be stopped beside the live one: which it leaves, or which is ready to
        take its place"""
        self.left: WorkerHandle | None = None
        """the worker that calls are leaving, in an exchange"""
        self.running: dict[MovingCall, None] = {}
        """calls that run on this rank, or wait for its worker, in the order in which they began"""
        self._unraised: Exception | None = None  # the final death, until a call has raised it
        self._lives = 1
        """lives that were begun: the next has this incarnation"""
        self.restarts = 0
        """restarts after deaths"""
        self.failed_episodes = 0
        """episodes that ended with the process of their environment"""
        self.last_failure, self.failed_at = "", -math.inf
        """how the last of them ended, and when, by the loop's clock"""
        self._fatal_seeds: tuple[int, ...] = ()
        self.replaced = 0
        """number of times that it was replaced by another, as was asked for"""
        self.starting_successor = False
        self.homes: list[str] = []
        """channels whose queues live with its worker"""
        self.spans_left: list[Span] = []
        """spans of workers that were replaced"""
        self.stopping = False
        self.recorder: LifeRecorder | None = None
        """records its lives and calls; None: nobody does"""

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
        if self.recorder is not None:
            self.recorder.launched(self._spec)
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

    @property
    def at_work(self) -> WorkerHandle | None:
        """The worker in which calls run: the live one, or the one that they are leaving."""
        return self.live or self.left

    @property
    def spec(self) -> WorkerSpec:
        """What its worker was started with, or is to be started with again."""
        return self._spec

    @property
    def was_started(self) -> bool:
        """Whether it has ever had a worker that was ready."""
        return self._handle is not None

    def call_began(self, call: MovingCall) -> None:
        """Count a call as running."""
        self.running[call] = None

    def call_ended(self, call: MovingCall, error: BaseException | None) -> None:
        """Count a call as ended; ``error`` is what it raises."""
        del self.running[call]
        if error is not None and error is self._unraised:
            self._unraised = None
        self._check_raised()

    async def stop(self, grace: float) -> None:
        """End the rank for good."""
        self.stopping = True
        await _ended([*self._replacing, *([self._restarting] if self._restarting else [])])
        handles = [*self._others, *([self.live] if self.live is not None else [])]
        results = await asyncio.gather(
            *(one.stop(grace) for one in handles), return_exceptions=True
        )
        for error in results:
            if error is not None:
                raise error

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
        if (failed := death.failure.failed) is not None:
            self.failed_episodes += 1
            self.last_failure = death.failure.message
            self.failed_at = asyncio.get_running_loop().time()
            self._fatal_seeds += () if failed.seed is None else (failed.seed,)
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
        self._spec = self._next_life(self._spec)
        return True

    def _next_life(self, spec: WorkerSpec) -> WorkerSpec:
        incarnation, self._lives = self._lives, self._lives + 1
        info = msgspec.structs.replace(
            spec.info, incarnation=incarnation, fatal_seeds=self._fatal_seeds
        )
        return msgspec.structs.replace(spec, info=info)

    # ---- replacement

    def check_successor(self, cls: type[Worker]) -> None:
        """Raise `BuildError` where the calls that run could not go on in a worker of this class, or
        where its process could not import it."""
        self._backend.check_class(cls)
        for call in self.running:
            call.check(cls)

    def _successor(
        self, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> WorkerSpec:
        spec = self._next_life(self._spec)
        env_vars = {**spec.env_vars, **names_for_workers()}
        return msgspec.structs.replace(spec, cls=cls, args=args, kwargs=kwargs, env_vars=env_vars)

    async def start_successor(
        self, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Life:
        """Start a worker of this class beside the live one, whose place it may take.

        Raises:
            WorkerError: ``__init__`` or ``setup`` raised, or the process died.
            BuildError: it cannot be started.
        """
        spec = self._successor(cls, args, kwargs)
        starting = internal(asyncio.create_task(self._start_beside(spec)))
        self._replacing.add(starting)
        starting.add_done_callback(self._replacing.discard)
        self.starting_successor = True
        try:
            return await result_of(starting)
        except BaseException:
            await self._uncancelled(self._abandon(starting))
            raise
        finally:
            self.starting_successor = False

    async def _start_beside(self, spec: WorkerSpec) -> Life:
        if self.stopping:
            raise BuildError(f"{self.name}: its cluster was left while it was replaced")
        worker = await self._backend.start(spec)
        self._others.append(worker)
        return Life(spec, worker)

    async def _abandon(self, starting: asyncio.Task[Life]) -> None:
        """End the start of a successor, and the successor if it is there."""
        await _ended([starting])
        if not starting.cancelled() and starting.exception() is None:
            await self._end_successor(starting.result(), 0.0)

    def give_up_successor(self, life: Life, grace: float) -> asyncio.Task[None]:
        """Stop a successor that does not take over, whoever waits for that or not."""
        return self._in_background(self._end_successor(life, grace))

    async def _end_successor(self, life: Life, grace: float) -> None:
        if life.worker in self._others:
            try:
                await life.worker.stop(grace)
            finally:
                self._others.remove(life.worker)

    async def exchange(self, life: Life, *, finish: float, grace: float) -> None:
        """Let a successor take the place of the live worker. It cannot be cancelled by its caller:
        calls are in the one worker or in the other.

        Args:
            life: what `start_successor` has started.
            finish: seconds that calls have to finish what they have leased.
            grace: seconds that the worker gets to end.
        """
        await self._uncancelled(self._exchange(life, finish, grace))

    async def exchange_apart(
        self,
        cls: type[Worker],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        finish: float,
        grace: float,
    ) -> None:
        """Stop the live worker, then start one of this class; where that fails, one as before.

        Raises:
            WorkerError, BuildError: it could not be started, and one as before was.
        """
        spec = self._successor(cls, args, kwargs)
        await self._uncancelled(self._exchange_apart(spec, finish, grace))

    async def _uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        await result_of(self._in_background(work))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this in a task that ends with this rank, and not with whoever waits for it."""
        task = internal(asyncio.create_task(work, name=f"replace {self.name}"))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)
        task.add_done_callback(_retrieve)
        return task

    @property
    def is_exchanging(self) -> bool:
        """Whether a successor is started, or takes over."""
        return not all(task.done() for task in self._replacing)

    async def _exchange(self, life: Life, finish: float, grace: float) -> None:
        if life.worker.died.done():
            raise life.worker.died.result()
        old = await self._emptied(finish)
        self._others.remove(life.worker)
        self._take_over(life)
        if old is not None:
            await self._stop_replaced(old, grace)

    async def _exchange_apart(self, spec: WorkerSpec, finish: float, grace: float) -> None:
        old = await self._emptied(finish)
        if old is not None:
            await self._stop_replaced(old, grace)
        try:
            worker = await self._backend.start(spec)
        except (WorkerError, BuildError):
            self._spec = self._next_life(self._spec)
            try:
                self._adopt(await self._start_life())
            except (WorkerError, BuildError) as error:
                self._give_up(error)
            raise
        self._take_over(Life(spec, worker))

    def _take_over(self, life: Life) -> None:
        self._spec = life.spec
        if self.recorder is not None:
            self.recorder.launched(life.spec)
        for call in self.running:
            call.become(life.spec.cls)
        self._adopt(life.worker)
        self._backend.took_over(life.worker)
        self.replaced += 1

    async def _emptied(self, finish: float) -> WorkerHandle | None:
        """The live worker, which all calls have left; None where there is none.

        Raises:
            WorkerDied: it is dead for good.
        """
        while self._restarting is not None and not self._restarting.done():
            await _ended([self._restarting])  # it would be started as what is to be replaced
        old = self.live
        if old is not None:
            self._others.append(old)
            await self._empty(old, finish)
        elif self._handle is not None and self._handle.done():
            await self._handle
        return old

    async def _stop_replaced(self, old: WorkerHandle, grace: float) -> None:
        with suppress(TimeoutError):
            async with deadlines.timeout(SPANS_LIMIT):
                self.spans_left += await old.spans()
        try:
            await old.stop(grace)
        except WorkerError as error:  # it is gone all the same
            log.error("while %s was replaced: %s", self.name, error)
        self._others.remove(old)

    async def _empty(self, old: WorkerHandle, finish: float) -> None:
        """Have all calls leave a worker; they wait for the next."""
        self.live, self.left = None, old
        self._handle = WorkFuture()
        self._handle.add_done_callback(_retrieve)
        gone = WorkEvent()
        here = list[MovingCall]()

        def left(call: MovingCall) -> None:
            here.remove(call)
            if not here:
                gone.set()

        try:
            for call in list(self.running):
                here.append(call)
                if not call.move(old, finish, partial(left, call)):
                    here.remove(call)
            if here:
                with suppress(TimeoutError):
                    async with deadlines.timeout(finish + LET_GO_AFTER):
                        await gone.wait()
            for call in list(here):
                log.warning(
                    "%s has not ended %s within %g s and is stopped: what it puts now is refused",
                    self.name, call, finish + LET_GO_AFTER,
                )  # fmt: skip
                call.let_go()
        finally:
            self.left = None

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
        if self._unraised is not None and not self.running and not self.stopping:
            asyncio.get_running_loop().call_soon(self._report_if_idle)

    def _report_if_idle(self) -> None:
        if self._unraised is not None and not self.running:
            death, self._unraised = self._unraised, None
            self._on_idle_death(death)


def _not_replaced(death: WorkerDied, error: BuildError) -> WorkerDied:
    """The death of a worker that could not be started again."""
    message = f"{death.failure.message}; it cannot be started again: {error}"
    return type(death)(msgspec.structs.replace(death.failure, message=message))


def _retrieve(future: asyncio.Future[Any]) -> None:
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


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
