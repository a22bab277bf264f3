"""What a cluster needs of the place where its workers run.

``local`` runs them as coroutines of this event loop, ``process`` as OS processes of this host,
``ray`` as actors on the hosts of a Ray cluster. All have the same two protocols, so everything
above (groups, restarts, reports) is written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire import HomeMaker, Traffic
from rlinf_async.observe.trace import Span
from rlinf_async.workers.base import Worker
from rlinf_async.workers.context import Device, WorkerInfo
from rlinf_async.workers.errors import BuildError, WorkerDied
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
    """Ray's runtime environment, without ``env_vars`` of the rank"""
    restartable: bool = False
    """whether the run goes on after its death: then what it has put must not be lost with it"""


def refuse_what_ray_has(ranks: Sequence[WorkerSpec]) -> None:
    """Raise `BuildError` for ranks that ask for what only a cluster of Ray can give them."""
    for rank in ranks:
        for name in ("resources", "runtime_env"):
            if asked := getattr(rank, name):
                raise BuildError(
                    f"{rank.info.group}: {name}={dict(asked)} cannot be had here, only on a "
                    f"cluster of Ray: leave {name} out, or use Cluster.ray()"
                )


def with_rendezvous(ranks: Sequence[WorkerSpec], rendezvous: str) -> list[WorkerSpec]:
    """The ranks of a launch, where torch.distributed's ``init_method`` is this."""
    replace = msgspec.structs.replace
    return [replace(one, info=replace(one.info, rendezvous=rendezvous)) for one in ranks]


class Doing(msgspec.Struct, frozen=True):
    """What a worker is doing now."""

    spans: tuple[str, ...] = ()
    """names of its open spans, without waits"""


class Standstill(msgspec.Struct, frozen=True):
    """Whether a worker stands still for as long as nobody else does anything."""

    unless: str = ""
    """what could let it go on by itself, in a few words; empty: nothing"""
    moved: int = 0
    """changes while its process moves large items, though no channel changes: see `movement`"""


class WorkerHandle(Protocol):
    """One started rank."""

    died: asyncio.Future[WorkerDied]
    """set when the worker is gone though nobody stopped it"""

    def begin(self, method: Method, arguments: dict[str, Any], on_end: OnEnd) -> Cancel:
        """Start a method there and return at once, with a function that cancels it.

        ``on_end`` is called once, later: with the result; with a `WorkerError`, which the method
        raised; with `WorkerDied`, if the worker died while the call ran; or with `CancelledError`.

        Raises:
            WorkerError, BuildError: nothing was started.
        """
        ...

    async def doing(self) -> tuple[str, ...]:
        """Names of its open spans, without waits."""
        ...

    async def standstill(self) -> Standstill:
        """Whether only others can let it go on. The worker searches its memory: a look at a run
        asks what it is `doing`."""
        ...

    async def spans(self) -> list[Span]:
        """The spans recorded since the last time."""
        ...

    async def stop(self, grace: float) -> None:
        """End the worker; by force after ``grace`` seconds, with 0 at once."""
        ...


class Backend(Protocol):
    """Where workers run."""

    @property
    def address(self) -> str | None:
        """Where other hosts reach this process; None for nowhere."""
        ...

    @property
    def isolates_devices(self) -> bool:
        """Whether a worker's process sees its own accelerators alone, as ``cuda:0`` and on."""
        ...

    def devices(self) -> Sequence[Device]:
        """The devices that there are, by host.

        Raises:
            RuntimeError: they are not known before `open`.
        """
        ...

    async def open(self) -> None:
        """Get ready to start workers."""
        ...

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        """Register a channel, so that its ends can be given to workers."""
        ...

    async def home(self, name: str) -> HomeMaker | None:
        """Makes channels whose queues live with a started worker; None where it has no process of
        its own.

        Raises:
            WorkerDied: it is gone.
            HomeLost: it cannot be reached from here.
        """
        ...

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Reserve what the ranks of one launch need, before any of them starts.

        Returns:
            The ranks as they can be started, with the rendezvous of their torch.distributed.

        Raises:
            BuildError: it cannot be had; nothing is reserved.
        """
        ...

    async def release(self, ranks: Sequence[WorkerSpec]) -> None:
        """Give back what was reserved for a launch; its ranks have ended."""
        ...

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start one placed rank and run its ``setup``; again, where its process has died.

        Raises:
            WorkerError: ``__init__`` or ``setup`` raised, or the process died.
        """
        ...

    def check_load(self, workers: int) -> None:
        """Warn where so many workers are too many for this host."""
        ...

    def cut_off(self) -> dict[str, float]:
        """Workers whose connection is cut, and for how many seconds they have been reconnecting."""
        ...

    def traffic(self) -> list[Traffic]:
        """What went over the connections to workers that have a process of their own."""
        ...

    def pid(self, name: str) -> int | None:
        """The process of a worker, where it has one of its own."""
        ...

    def host(self, name: str) -> str | None:
        """The host on which a worker's process runs, where it has one of its own."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...
