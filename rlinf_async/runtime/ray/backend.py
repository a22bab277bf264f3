"""Workers as actors of Ray, each with a process and an event loop of its own, on many hosts.

::

    this process                                     an actor of Ray: `RankProcess`
    queues of all channels                           ends of channels
    TCP, and a unix socket  <---- one connection --->  proves the cluster's secret
    `RayBackend`            ---- start, `ActorStart` ---> imports the main module and the worker
    `ActorProcess`          <--- end, by Ray --------  serves the worker until its end

Ray owns hosts, devices, start and death; items, calls and heartbeats go over the connection.

What a worker starts is in one process group, which a small process of its own kills once the
actor's process is gone, however it ended: Ray kills the actor alone.

Another Python for a role (``py_executable``) is asked for its versions before Ray starts it: Ray
starts a program that is not there again and again without a word, and a Python of another version
dies by SIGSEGV of the classes that Ray sends it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.spawn
import os
import pickle
import re
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rlinf_async.channels.wire.session.endpoint import TcpAddress
from rlinf_async.runtime.child import Boot, remove_unused_torch_cache, serve
from rlinf_async.runtime.interpreters import SECONDS, answer_of, in_words, versions
from rlinf_async.runtime.process import OutputLog, cannot_be_sent, check_importable
from rlinf_async.runtime.ray.output import (
    KILL_GROUP,
    REMOVE_FOLDER,
    RayOutput,
    address_of,
    interface_of,
    when_this_process_ends,
)
from rlinf_async.runtime.ray.reservation import DeviceReservations, RankPlace
from rlinf_async.runtime.ray.session import (
    CALL_SECONDS,
    Host,
    RaySession,
    check_runtime_env,
    devices_of,
    of_ray,
    own_address,
)
from rlinf_async.runtime.remote_worker import RemoteBackend, RemoteWorker
from rlinf_async.runtime.signals import ignore_in_worker
from rlinf_async.runtime.supervise import ProcessEnd, WorkerProcess, WorkerSpec, with_rendezvous
from rlinf_async.runtime.wakers import internal
from rlinf_async.workers.base import BuildError, Device, Worker, listen_for_ranks


class ActorStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start message of a rank's process."""

    versions: dict[str, str]
    main: dict[str, Any]
    """how to import the driver's main module, see `main_module`"""
    boot: bytes
    """the pickled `Boot`: only readable once the main module is imported"""
    interface: str
    """network interface; empty: that of the host's address"""
    address: str
    """the host's address, as Ray knows it"""


class Standing(msgspec.Struct, frozen=True):
    """A rank's process that is ready to serve, or what is wrong with it."""

    pid: int
    error: str = ""


def main_module() -> dict[str, Any]:
    """Return how another process imports this one's main module, as multiprocessing does."""
    data = multiprocessing.spawn.get_preparation_data("ray")
    names = ("sys_path", "init_main_from_name", "init_main_from_path")
    return {name: data[name] for name in names if name in data}


class RankProcess:
    """One rank's process, as an actor of Ray."""

    def __init__(self) -> None:
        self._boot: Boot | None = None

    def listen_for_ranks(self, address: str, interface: str) -> str:
        """Listen for the other ranks of the group, and return where: see
        `workers.base.listen_for_ranks`."""
        return listen_for_ranks(address_of(interface) if interface else address)

    def prepare(self, payload: bytes) -> bytes:
        """Get ready to serve: a `Standing`. ``payload`` is a `ActorStart`."""
        error = self._prepare(msgspec.msgpack.decode(payload, type=ActorStart))
        return msgspec.msgpack.encode(Standing(os.getpid(), error))

    def serve(self) -> bool:
        """Serve the worker until asked to stop (True) or cut off (False)."""
        if self._boot is None:
            raise RuntimeError("the process was not prepared")
        asked_to_stop = serve(self._boot)
        remove_unused_torch_cache(Path(tempfile.gettempdir()))
        return asked_to_stop

    def _prepare(self, payload: ActorStart) -> str:
        """What is wrong; empty if nothing."""
        if payload.versions != versions():
            return (
                f"the driver has {in_words(payload.versions)}, but this host {in_words(versions())}"
            )
        with suppress(PermissionError):  # it leads a group already
            os.setpgid(0, 0)
        when_this_process_ends(KILL_GROUP, str(os.getpgrp()))
        ignore_in_worker()
        try:
            missing = _import_main(payload.main)
        except BaseException as error:
            return f"the driver's main module cannot be imported: {_name(error)}"
        try:
            boot: Boot = pickle.loads(payload.boot)
        except Exception as error:
            return (
                f"its class or arguments cannot be imported: {_name(error)}"
                f"{missing or ''}. Install the package that defines them on every host, or ship "
                "it: Cluster.ray(runtime_env={'working_dir': '.'})"
            )
        self._boot = boot
        if boot.spec.info.collective is not None:
            name = payload.interface or interface_of(payload.address)
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if name:
                    os.environ.setdefault(variable, name)
        return ""


def _import_main(main: dict[str, Any]) -> str:
    """Import the driver's main module as ``__main__``; says so where it is not on this host."""
    here = set(sys.path)
    sys.path += [one for one in main["sys_path"] if one not in here and os.path.exists(one)]
    path = main.get("init_main_from_path")
    if path is not None:
        # At its own path, or in the working directory that Ray has shipped.
        found = [one for one in (Path(path), Path.cwd() / Path(path).name) if one.is_file()]
        if not found:
            return f" (the script {path} is not on this host)"
        main = main | {"init_main_from_path": str(found[0])}
    names = ("init_main_from_name", "init_main_from_path")
    multiprocessing.spawn.prepare({name: main[name] for name in names if name in main})
    return ""


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_EXIT_CODE: Final = re.compile(r"exit code (\d+)")
_DETAILS: Final = (
    "Worker exit detail:",
    "The actor died because",
    "The actor is dead because",
    "unavailable:",
)
UNCONFIRMED: Final = f"it was killed, which Ray did not confirm within {CALL_SECONDS:g} s"
HINT: Final = "; its output is in Ray's log folder on that host, /tmp/ray/session_latest/logs"


class ActorProcess(WorkerProcess):
    """An actor of Ray that serves one rank.

    Args:
        actor: handle of the actor.
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
        self.ended: asyncio.Future[ProcessEnd] = self._loop.create_future()
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
            self.ended.set_result(ProcessEnd(how, HINT))


def kill_actor(actor: Any) -> None:
    """Kill an actor for good; it may be dead."""
    of_ray().kill(actor, no_restart=True)


def how_it_ended(error: BaseException) -> str:
    """Return how an actor ended, in words, by the error that Ray raises for its method."""
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


QUESTION: Final = (
    "import json, ray; from rlinf_async.runtime.interpreters import versions; "
    "print(json.dumps({**versions(), 'Ray': ray.__version__}))"
)


class Interpreters:
    """Checks each interpreter once on each host."""

    def __init__(self, session: RaySession) -> None:
        self._session = session
        self._right: set[tuple[str, str]] = set()
        """host's identifier and command"""

    async def check(self, spec: WorkerSpec, command: str, host: Host) -> None:
        """Ask the interpreter with which a rank would be started.

        Raises:
            BuildError: it is not there, cannot import what it needs, or has other versions.
        """
        if (host.id, command) in self._right:
            return
        asked = await self._session.do(_ask, command, environment_of(spec), host)
        where = f"{spec.info.name} on {host.name}: py_executable = {command!r}"
        try:
            async with asyncio.timeout(2 * SECONDS):
                answer: dict[str, str] | str = await asked
        except TimeoutError:
            raise BuildError(f"{where}: Ray ran no task there that could look at it") from None
        except of_ray("exceptions").RayError as error:
            raise BuildError(f"{where}: Ray cannot run a task there: {error}") from error
        if isinstance(answer, str):
            raise BuildError(f"{where}: {answer}")
        wanted = {**versions(), "Ray": of_ray().__version__}
        if answer != wanted:
            raise BuildError(f"{where}: it has {in_words(answer)}, the driver {in_words(wanted)}")
        self._right.add((host.id, command))


def environment_of(spec: WorkerSpec) -> dict[str, str]:
    """Return the variables that a rank's process is started with: those of its own come last."""
    return {**spec.runtime_env.get("env_vars", {}), **spec.env_vars}


def _ask(command: str, env_vars: dict[str, str], host: Host) -> Any:
    """Have a task on the host ask; returns the reference to its answer."""
    here = of_ray("util.scheduling_strategies").NodeAffinitySchedulingStrategy(host.id, soft=False)
    task = of_ray().remote(versions_of).options(num_cpus=0, scheduling_strategy=here)
    return task.remote(command, env_vars)


def versions_of(command: str, env_vars: dict[str, str]) -> dict[str, str] | str:
    """Versions that the interpreter has on this host, or what is wrong with it."""
    return answer_of(command, env_vars, QUESTION, "Ray and rlinf_async")


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
    place: RankPlace
    devices: tuple[Device, ...]
    """devices of the rank; others than asked for, where their host was lost"""


class RayBackend(RemoteBackend):
    """Starts an actor of Ray for each rank.

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
        super().__init__(heartbeat_limit)
        self._session = RaySession(address, shared or None)
        self._interface = interface
        self._tls = tls
        self._output = RayOutput(OutputLog(log))
        self._reservations = DeviceReservations(
            self._session, wait=wait, label=f"rlinf_async {socket.gethostname()}:{os.getpid()}"
        )
        self._interpreters = Interpreters(self._session)
        self._hosts: list[Host] | None = None
        """hosts of the cluster; None until it is opened"""
        self._started: dict[str, _Actor] = {}
        """actors of ranks that are placed and do not serve yet, by name"""
        self._remove_folder: Callable[[], None] = lambda: None
        """removes the folder of the Unix socket, also where this process is killed before"""

    def devices(self) -> Sequence[Device]:
        if self._hosts is None:
            raise RuntimeError("the cluster was not entered: what Ray has is not known before")
        return devices_of(self._hosts)

    async def open(self) -> None:
        await self._session.open()
        try:
            hosts = await self._session.hosts()
            host = address_of(self._interface) if self._interface else own_address()
            self.listeners.listen = str(TcpAddress(host, 0, self._tls))
            await super().open()
            folder = str(self.listeners.socket.parent)
            self._remove_folder = when_this_process_ends(REMOVE_FOLDER, folder)
        except BaseException:
            await self._session.close()
            raise
        self._hosts = hosts
        self._output.open()

    def check_class(self, cls: type[Worker]) -> None:
        check_importable(cls)

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

        return await self.start_by(replace(spec, info=info), spawn)

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
            payload = ActorStart(
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
            raise BuildError(
                f"{where}: Ray cannot start its process: {_explain_start(error)}"
            ) from error

    async def close(self) -> None:
        if self._hosts is None:
            return
        await super().close()
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


def _start_actor(spec: WorkerSpec, place: RankPlace) -> Any:
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


def _explain_start(error: BaseException) -> str:
    """An error of Ray's at the start of an actor, with what to do where that is known."""
    text = how_it_ended(error)
    if "No module named 'rlinf_async" in text:
        return (
            "rlinf_async is not installed on that host. Install the same version there, or ship "
            f"it: Cluster.ray(runtime_env={{'pip': [...]}}) ({text})"
        )
    return text
