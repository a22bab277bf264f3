"""Workers as actors of Ray, each with a process and an event loop of its own, on many hosts.

::

    this process                                     an actor of Ray (rank_process.py)
    queues of all channels                           ends of channels
    TCP, and a unix socket  <---- one connection --->  proves the cluster's secret
    Ray's API               ---- start, secret ------>
                            <--- end, what it prints -

Ray owns hosts, devices, start and death; items, calls and heartbeats go over the connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.wire import HomeMaker, Traffic
from rlinf_async.channels.wire.session.address import TcpAddress
from rlinf_async.runtime.backend import WorkerSpec, with_rendezvous
from rlinf_async.runtime.child import Boot
from rlinf_async.runtime.listeners import Listeners
from rlinf_async.runtime.output import OutputLog
from rlinf_async.runtime.ray.environment import check_runtime_env
from rlinf_async.runtime.ray.hosts import Host, devices_of
from rlinf_async.runtime.ray.interfaces import address_of
from rlinf_async.runtime.ray.interpreters import Interpreters, environment_of
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.output import RayOutput
from rlinf_async.runtime.ray.process import (
    ActorProcess,
    how_it_ended,
    is_lost_host,
    kill_actor,
)
from rlinf_async.runtime.ray.rank_process import (
    Payload,
    RankProcess,
    Standing,
    main_module,
    versions,
)
from rlinf_async.runtime.ray.reaper import REMOVE_FOLDER, when_this_process_ends
from rlinf_async.runtime.ray.reservation import Place, Reservations
from rlinf_async.runtime.ray.session import RaySession, own_address
from rlinf_async.runtime.remote_worker import RemoteWorker, RemoteWorkers
from rlinf_async.runtime.spawning import cannot_be_sent, check_importable
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

T = TypeVar("T")
log = logging.getLogger(__name__)
HOSTS_TRIED: Final = 5
"""number of hosts on which a rank is started, if one after the other is lost meanwhile"""
START_SECONDS: Final = 600.0
"""time in which Ray starts an actor's process; its runtime environment may install packages"""


class HostLost(Exception):
    """The host of an actor that was being started is lost."""


class _Actor(msgspec.Struct, frozen=True):
    """An actor that Ray starts."""

    handle: Any
    place: Place
    devices: tuple[Device, ...]
    """of its rank; others than asked, where the host of those was lost"""


class RayBackend:
    """Starts an actor for each rank and owns the queues of all channels.

    Args:
        heartbeat_limit: seconds after which a worker that does not answer is killed.
        wait: seconds to wait for devices that are in use.
        interface: network interface of every host; by default that of the address by which Ray
            knows the host.
        tls: whether connections between hosts are encrypted.
    """

    def __init__(
        self,
        address: str | None,
        *,
        heartbeat_limit: float,
        wait: float,
        interface: str,
        tls: bool,
        runtime_env: dict[str, Any] | None,
        log: Path | None,
    ) -> None:
        shared = dict(runtime_env or {})
        # Given to each rank, and not to Ray for all of its processes: those that look whether it is
        # right on a host would be started with it themselves.
        self._interpreter: str | None = shared.pop("py_executable", None)
        self._session = RaySession(address, shared or None)
        self._heartbeat_limit = heartbeat_limit
        self._interface = interface
        self._tls = tls
        self._output = RayOutput(OutputLog(log))
        self._reservations = Reservations(
            self._session, wait=wait, label=f"rlinf_async {socket.gethostname()}:{os.getpid()}"
        )
        self._interpreters = Interpreters(self._session)
        self._workers: RemoteWorkers | None = None
        self._hosts: list[Host] = []
        self._started: dict[str, _Actor] = {}
        """actors of ranks that are placed and do not serve yet, by name"""
        self._remove_folder: Callable[[], None] = lambda: None
        """removes the folder of the Unix socket, also where this process is killed before"""

    @property
    def isolates_devices(self) -> bool:
        return True

    @property
    def workers(self) -> RemoteWorkers:
        """The workers' connections."""
        if self._workers is None:
            raise RuntimeError("the cluster was not entered: what Ray has is not known before")
        return self._workers

    def devices(self) -> Sequence[Device]:
        if self._workers is None:
            raise RuntimeError("the cluster was not entered: what Ray has is not known before")
        return devices_of(self._hosts)

    async def open(self) -> None:
        await self._session.open()
        try:
            self._hosts = await self._session.hosts()
            host = address_of(self._interface) if self._interface else own_address()
            address = str(TcpAddress(host, 0, self._tls))
            listeners = Listeners(address, heartbeat_limit=self._heartbeat_limit)
            workers = RemoteWorkers(listeners, heartbeat_limit=self._heartbeat_limit)
            await workers.open()
            folder = str(listeners.socket.parent)
            self._remove_folder = when_this_process_ends(REMOVE_FOLDER, folder)
        except BaseException:
            await self._session.close()
            raise
        self._workers = workers
        self._output.open()

    @property
    def address(self) -> str | None:
        return None if self._workers is None else self._workers.listeners.address

    def publish(self, channel: Channel[Any] | Latest[Any]) -> None:
        self.workers.publish(channel)

    async def home(self, name: str) -> HomeMaker | None:
        return await self.workers.home(name)

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        check_importable(ranks[0].cls)
        ranks = [self._with_interpreter(one) for one in ranks]
        check_runtime_env(ranks[0].runtime_env, ranks[0].info.group)
        await self._reservations.reserve(ranks)
        if ranks[0].info.collective is None:
            return ranks
        try:  # the ranks meet at rank 0: it must stand before the others are told where
            return with_rendezvous(ranks, await on_a_living_host(ranks[0], self._listen_for_ranks))
        except BaseException:
            await self.release(ranks)
            raise

    def _with_interpreter(self, spec: WorkerSpec) -> WorkerSpec:
        """The rank with the cluster's interpreter, where its role has none of its own."""
        if self._interpreter is None or "py_executable" in spec.runtime_env:
            return spec
        own = {**spec.runtime_env, "py_executable": self._interpreter}
        return msgspec.structs.replace(spec, runtime_env=own)

    async def release(self, ranks: Sequence[WorkerSpec]) -> None:
        for rank in ranks:
            actor = self._started.pop(rank.info.name, None)
            if actor is not None:
                self._session.submit(kill_actor, actor.handle)
        await self._reservations.release(ranks[0].info.group)

    async def start(self, spec: WorkerSpec) -> RemoteWorker:
        return await on_a_living_host(spec, self._start)

    async def _start(self, spec: WorkerSpec) -> RemoteWorker:
        actor = self._started.pop(spec.info.name, None) or await self._start_actor(spec)
        replace = msgspec.structs.replace
        info = replace(spec.info, host=actor.place.host.name, devices=actor.devices)

        async def spawn(boot: Boot) -> ActorProcess:
            return await self._serve(actor, boot)

        return await self.workers.start(replace(spec, info=info), spawn)

    async def _listen_for_ranks(self, first: WorkerSpec) -> str:
        """Start the actor of rank 0, and return the address at which it waits for the others."""
        name = first.info.name
        actor = self._started[name] = await self._start_actor(first)
        method, host = actor.handle.listen_for_ranks, actor.place.host
        try:
            address: str = await self._ask(name, actor, method, host.address, self._interface)
        except HostLost:
            del self._started[name]
            raise
        return address

    async def _start_actor(self, spec: WorkerSpec) -> _Actor:
        spec, place = await self._reservations.place(spec)
        if command := spec.runtime_env.get("py_executable"):
            await self._interpreters.check(spec, command, place.host)
        handle = await self._session.do(_start_actor, spec, place)
        return _Actor(handle, place, spec.info.devices)

    async def _serve(self, actor: _Actor, boot: Boot) -> ActorProcess:
        """Give an actor its worker; it connects by itself."""
        name, host = boot.spec.info.name, actor.place.host
        try:
            payload = Payload(
                versions=versions(),
                main=main_module(),
                boot=_pickled(boot),
                interface=self._interface,
                address=host.address,
            )
            encoded = msgspec.msgpack.encode(payload)
            answer = await self._ask(name, actor, actor.handle.prepare, encoded)
            standing = msgspec.msgpack.decode(answer, type=Standing)
            if standing.error:
                raise BuildError(f"{name} on {host.name}: {standing.error}")
        except BaseException:
            self._session.submit(kill_actor, actor.handle)
            raise
        self._output.name(host.address, standing.pid, f"{name} on {host.name}")
        serving = await self._session.do(actor.handle.serve.remote)
        return ActorProcess(self._session, actor.handle, serving, host, standing.pid)

    async def _ask(self, name: str, actor: _Actor, method: Any, *args: Any) -> Any:
        """Call a method of an actor that is being started.

        Raises:
            BuildError: it cannot be started.
        """
        where = f"{name} on {actor.place.host.name}"
        try:
            async with asyncio.timeout(START_SECONDS):
                return await (await self._session.do(method.remote, *args))
        except TimeoutError:
            raise BuildError(f"{where}: Ray started no process in {START_SECONDS:g} s") from None
        except of_ray("exceptions").RayError as error:
            if is_lost_host(error):
                raise HostLost(f"host {actor.place.host.name} was lost") from error
            raise BuildError(f"{where}: Ray cannot start its process: {_why(error)}") from error

    def check_load(self, workers: int) -> None:
        pass

    def cut_off(self) -> dict[str, float]:
        return {} if self._workers is None else self._workers.cut_off()

    def traffic(self) -> list[Traffic]:
        return [] if self._workers is None else self._workers.traffic()

    def pid(self, name: str) -> int | None:
        worker = self.workers.get(name)
        return None if worker is None else worker.process.pid

    def host(self, name: str) -> str | None:
        worker = self.workers.get(name)
        return None if worker is None else worker.process.host

    async def close(self) -> None:
        if self._workers is None:
            return
        await self._workers.close()
        for actor in self._started.values():
            self._session.submit(kill_actor, actor.handle)
        try:
            await self._reservations.close()
            await self._output.drain()
        except BuildError as error:
            log.warning("the cluster's reservations may be left until this process ends: %s", error)
        finally:
            self._remove_folder()
            self._output.close()
            await self._session.close()


async def on_a_living_host(spec: WorkerSpec, start: Callable[[WorkerSpec], Awaitable[T]]) -> T:
    """Start a rank; again, elsewhere, where its host is lost meanwhile.

    Raises:
        BuildError: one host after the other was lost.
    """
    for _ in range(HOSTS_TRIED):
        try:
            return await start(spec)
        except HostLost as lost:
            log.warning("%s: %s; it is started elsewhere", spec.info.name, lost)
    raise BuildError(f"{spec.info.name}: {HOSTS_TRIED} hosts were lost while it was started")


def _start_actor(spec: WorkerSpec, place: Place) -> Any:
    """Have Ray start an actor; returns its handle at once."""
    ray, strategies = of_ray(), of_ray("util.scheduling_strategies")
    variables = environment_of(spec)
    if place.numbers:
        variables |= {
            "CUDA_VISIBLE_DEVICES": ",".join(place.numbers),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
    strategy: Any = strategies.NodeAffinitySchedulingStrategy(place.host.id, soft=False)
    if place.slot is not None:
        strategy = strategies.PlacementGroupSchedulingStrategy(place.slot.group, place.slot.index)
    runtime_env = dict(spec.runtime_env)
    if variables:
        runtime_env["env_vars"] = variables
    options: dict[str, Any] = {"runtime_env": runtime_env} if runtime_env else {}
    actor = ray.remote(RankProcess).options(
        num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=strategy, **options
    )
    return actor.remote()


def _pickled(boot: Boot) -> bytes:
    try:
        return pickle.dumps(boot)
    except Exception as error:  # pickle raises what the arguments' own methods raise
        raise cannot_be_sent(boot.life, error) from error


def _why(error: BaseException) -> str:
    """An error of Ray's at the start of an actor, with what to do where that is known."""
    text = how_it_ended(error)
    if "No module named 'rlinf_async" in text:
        return (
            "rlinf_async is not installed on that host. Install the same version there, or ship "
            f"it: Cluster.ray(runtime_env={{'pip': [...]}}) ({text})"
        )
    return text
