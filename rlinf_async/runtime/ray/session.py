"""This process's connection to a Ray cluster, and the cluster's hosts by name with their devices.

Ray's API blocks: its calls are made in one thread, in order, so that the event loop goes on. Ray is
an optional dependency: its modules are imported when they are first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from rlinf_async.config.registry import nearest
from rlinf_async.runtime.signals import run_signals
from rlinf_async.workers.base import BuildError, Device

HOST_ANSWER_SECONDS: Final = 5.0
"""time that a host has to answer before it is taken for lost"""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host (a node, as Ray says) of a cluster."""

    id: str
    """Ray's identifier of the node"""
    name: str
    address: str
    port: int
    """port at which Ray's node listens on the host"""
    resources: Mapping[str, float]
    """all that it has, by name, also what is in use"""

    @property
    def devices(self) -> list[Device]:
        """Return the accelerators of the host, or its CPU cores where it has none."""
        accelerators = int(self.resources.get("GPU", 0))
        kind, count = ("cuda", accelerators) if accelerators else ("cpu", self.cores)
        return [Device(kind, index, self.name) for index in range(count)]

    @property
    def cores(self) -> int:
        """Number of its CPU cores, as Ray counts them."""
        return int(self.resources.get("CPU", 0))

    async def answers(self) -> bool:
        """Whether Ray's node listens there: until Ray itself says that a host is lost, half a
        minute goes by."""
        return await _answers(self.address, self.port)


def live_hosts(nodes: Iterable[Mapping[str, Any]]) -> list[Host]:
    """The hosts of Ray's nodes that are alive, in the order of their names.

    A host is known by the name that its node was given (``ray start --node-name``), else by its
    hostname; where several nodes of one host have no names, by hostname and number.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (natural(_name(node)), node["NodeID"]))
    times, seen = Counter(map(_name, alive)), Counter[str]()
    found = []
    for node in alive:
        name = _name(node)
        if times[name] > 1:
            seen[name] += 1
            name = f"{name}-{seen[name] - 1}"
        found.append(
            Host(
                id=node["NodeID"],
                name=name,
                address=node["NodeManagerAddress"],
                port=node["NodeManagerPort"],
                resources=dict(node["Resources"]),
            )
        )
    return found


async def present_hosts(nodes: Iterable[Mapping[str, Any]]) -> list[Host]:
    """Return the hosts that are alive, as `live_hosts` does; of several nodes with one name only
    those that answer.

    Where a host was started again, Ray takes its former node for alive for another while.
    """
    alive = [node for node in nodes if node["Alive"]]
    times = Counter(map(_name, alive))
    twice = [node for node in alive if times[_name(node)] > 1]
    there = await asyncio.gather(
        *(_answers(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in twice)
    )
    gone = {node["NodeID"] for node, answers in zip(twice, there, strict=True) if not answers}
    return live_hosts(node for node in alive if node["NodeID"] not in gone)


async def answering(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts that answer."""
    answers = await asyncio.gather(*(host.answers() for host in hosts))
    return [host for host, there in zip(hosts, answers, strict=True) if there]


def devices_of(hosts: Sequence[Host]) -> tuple[Device, ...]:
    """All devices, host by host."""
    return tuple(device for host in hosts for device in host.devices)


def least_loaded(hosts: Sequence[Host], ranks: Mapping[str, int]) -> Host:
    """Return the host for a rank without devices: the one with the fewest ranks for its cores.

    Args:
        hosts: hosts, at least one.
        ranks: number of ranks on each host, by the host's identifier.
    """
    return min(hosts, key=lambda host: (ranks.get(host.id, 0) + 1) / max(host.cores, 1))


def natural(text: str) -> list[tuple[int, str]]:
    """The order in which ``node2`` comes before ``node10``."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


async def _answers(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(HOST_ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _name(node: Mapping[str, Any]) -> str:
    given = node.get("NodeName") or ""
    hostname: str = node.get("NodeManagerHostname") or node["NodeManagerAddress"]
    return hostname if given in ("", node["NodeManagerAddress"]) else given


P = ParamSpec("P")
R = TypeVar("R")


class CallThread(Executor):
    """Calls what is submitted, in order. The thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call this after what was submitted before.

        Raises:
            RuntimeError: it was shut down.
        """
        future: Future[R] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {self._name!r} takes no more calls")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; what was submitted is still called."""
        if cancel_futures:
            raise NotImplementedError("what was submitted is called")
        with self._lock:
            thread, already, self._closed = self._thread, self._closed, True
            if thread is not None and not already:
                self._calls.put(None)
        if wait and thread is not None:
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def of_ray(module: str = "") -> Any:
    """Ray, or one of its modules: ``of_ray("util.placement_group")``."""
    return importlib.import_module(f"ray.{module}" if module else "ray")


def is_installed() -> bool:
    """Whether Ray can be imported, most likely; it is not."""
    return importlib.util.find_spec("ray") is not None


def not_installed(error: ImportError | None = None) -> str:
    """Return what to say where Ray cannot be imported."""
    why = "" if error is None else f" ({error})"
    return (
        f"Ray is not installed{why}: pip install 'rlinf_async[ray]', or use Cluster.process() "
        '(in a job: cluster.backend = "process")'
    )


PLUGINS: Final = "RAY_RUNTIME_ENV_PLUGINS"
"""environment variable by which Ray learns of further fields"""


def check_runtime_env(runtime_env: Mapping[str, Any], whose: str) -> None:
    """Check a runtime environment as far as it can be here.

    Args:
        whose: of what it is, for the error.

    Raises:
        BuildError: a field that Ray does not know, or a value of another type.
    """
    described = of_ray("runtime_env").RuntimeEnv
    known = sorted(name for name in described.known_fields if not name.startswith("_"))
    unknown = sorted(set(runtime_env) - set(described.known_fields))
    if unknown and not os.environ.get(PLUGINS):
        raise BuildError(
            f"{whose}: runtime_env has no field {unknown[0]!r}{nearest(unknown[0], known)}: there "
            f"are {', '.join(known)}"
        )
    try:
        described(**runtime_env)
    except (TypeError, ValueError) as error:
        raise BuildError(f"{whose}: runtime_env={dict(runtime_env)}: {error}") from error


log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 10.0
"""time that the address of a cluster has to answer"""
LOOK_SECONDS: Final = 0.2
"""time after which it is looked again whether a Ray node runs here"""
LOCAL_STORE_BYTES: Final = 100 << 20
"""size of Ray's object store where Ray is started here: items do not go through it"""
CALL_SECONDS: Final = 90.0
"""time that a call of Ray's API may take: Ray itself gives a head that is away 60 s to come back"""
ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
TOKENS: Final = (
    "A head that 'ray start' has started asks for a token by default: set RAY_AUTH_MODE=token, "
    "with the same file ~/.ray/auth_token on all hosts (RAY_AUTH_MODE=disabled where the head was "
    "started so)"
)
SAID_BY_RAY: Final = ("Version mismatch", "Could not find any running Ray instance")
"""errors of Ray that name their cause"""
HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""first bytes of HTTP/2 (RFC 9113, 3.4): Ray's node listens for gRPC, which is HTTP/2"""
HTTP2_SETTINGS: Final = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""An empty frame of settings: its fourth byte is the type."""


class RaySession:
    """A connection to Ray. A process has one at a time, which its sessions share; one that the
    script had made stays when they are closed.

    Args:
        address: ``host:port`` of the cluster's head, or ``"auto"`` for the one that runs on this
            host; None: that of RAY_ADDRESS, and where that is not set Ray is started here, for the
            time of the session.
        runtime_env: Ray's runtime environment of all workers.
    """

    def __init__(self, address: str | None, runtime_env: dict[str, Any] | None) -> None:
        self._address = address
        self._runtime_env = runtime_env
        self._open = False
        self._calls = CallThread("ray")

    async def open(self) -> None:
        """Connect.

        Raises:
            BuildError: Ray is not installed; the address does not answer; the cluster has another
                version of Ray or Python; this process is connected to another cluster.
        """
        connecting = self.make(
            partial(_shared.enter, self._address, self._runtime_env), undo=lambda _: _shared.leave()
        )
        try:
            await connecting
        except BaseException:
            self._calls.shutdown(wait=False)
            raise
        self._open = True
        # What Ray's C++ sets prints a stack, and kills the process by SIGABRT 3 s after the signal.
        run_signals().take_back(signal.SIGTERM, "ray")

    async def do(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that calls Ray's API, and does not wait for workers, in Ray's thread.

        Raises:
            BuildError: Ray does not answer.
        """
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._calls, lambda: function(*args, **kwargs))
        return await self._answered(call, getattr(function, "__name__", "a call"))

    async def make(self, function: Callable[[], R], undo: Callable[[R], object]) -> R:
        """Return what the function makes in Ray's thread, as `do` does; it is undone there if the
        caller is cancelled or has given up meanwhile."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._calls, function)
        try:
            return await self._answered(asyncio.shield(call), "a connection or a reservation")
        except BaseException:
            call.add_done_callback(partial(self._undo, undo))
            raise

    async def _answered(self, call: asyncio.Future[R], what: str) -> R:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await call
        except TimeoutError:
            raise BuildError(
                f"Ray at {_shared.address or self._address or 'local'!r} did not answer within "
                f"{CALL_SECONDS:g} s ({what}): does its head still run ('ray status')?"
            ) from None

    def _undo(self, undo: Callable[[R], object], call: asyncio.Future[R]) -> None:
        if not call.cancelled() and call.exception() is None:
            made = call.result()
            threading.Thread(target=lambda: undo(made), name="ray undo", daemon=True).start()

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a function in Ray's thread, without waiting for its end."""
        with contextlib.suppress(RuntimeError):  # the session is closed: Ray ends what is left
            self._calls.submit(function, *args, **kwargs)

    async def hosts(self) -> list[Host]:
        """The hosts that are alive now."""
        return await present_hosts(await self.do(of_ray().nodes))

    async def close(self) -> None:
        """Disconnect, unless others use the connection; a Ray that was started here ends."""
        if not self._open:
            return
        self._open = False
        try:
            await self.do(_shared.leave)
        except BuildError as error:  # the run is over: its own end is what counts
            log.warning("not disconnected from Ray: %s", error)
        finally:
            self._calls.shutdown(wait=False)


class _SharedConnection:
    """The connection of this process, and how many sessions use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions = 0
        self._own = False
        """whether a session connected; else the script had"""
        self.address = ""
        """address for which the session asked that connected"""
        self._runtime_env: dict[str, Any] = {}

    def enter(self, address: str | None, runtime_env: dict[str, Any] | None) -> None:
        """Connect, or use the connection that is there."""
        with self._lock:
            if _ray().is_initialized():
                self._check_same(address, runtime_env)
            else:
                self.address = _connect(address, runtime_env)
                self._own, self._runtime_env, self._sessions = True, runtime_env or {}, 0
            self._sessions += 1

    def leave(self) -> None:
        """Disconnect, if this was the last session and the script had not connected."""
        with self._lock:
            self._sessions -= 1
            if self._sessions == 0 and self._own:
                self._own, self.address, self._runtime_env = False, "", {}
                of_ray().shutdown()

    def _check_same(self, address: str | None, runtime_env: dict[str, Any] | None) -> None:
        asked = address or os.environ.get(ADDRESS_VARIABLE)
        connected = {self.address, str(of_ray().get_runtime_context().gcs_address)}
        if asked and asked not in connected | {"auto", "local"}:
            raise BuildError(
                f"address={asked!r}: this process is connected to Ray at "
                f"{' or '.join(sorted(filter(None, connected)))} already, and Ray allows one "
                "connection for each process: use that cluster, or another process"
            )
        if runtime_env and runtime_env != self._runtime_env:
            raise BuildError(
                "runtime_env is given, but this process is connected to Ray already, and Ray takes "
                "it when it connects: give it to ray.init, or to the first Cluster.ray"
            )


_shared = _SharedConnection()


async def devices_at(address: str) -> tuple[Device, ...]:
    """The devices of the cluster at this address.

    Raises:
        BuildError: it cannot be reached.
    """
    session = RaySession(address, None)
    await session.open()
    try:
        return devices_of(await session.hosts())
    finally:
        await session.close()


def own_address() -> str:
    """The address of this host as the cluster's other hosts reach it."""
    address: str = of_ray("util").get_node_ip_address()
    return address


def _ray() -> Any:
    try:
        return of_ray()
    except ImportError as error:
        raise BuildError(not_installed(error)) from error


def _connect(address: str | None, runtime_env: dict[str, Any] | None) -> str:
    """Connect this process to Ray; return the address."""
    ray = _ray()
    address = address or os.environ.get(ADDRESS_VARIABLE)
    options: dict[str, Any] = {"address": address or "local"}
    if options["address"] == "local":
        options |= {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    elif options["address"] != "auto":  # which Ray looks for on this host, and says so at once
        _check_answers(options["address"])
        _check_is_host(options["address"])
    check_runtime_env(runtime_env or {}, "the cluster")
    try:
        ray.init(runtime_env=runtime_env, logging_level=logging.ERROR, **options)
    except of_ray("exceptions").AuthenticationError as error:
        raise BuildError(
            f"Ray at {options['address']!r} does not take the token of this process: {error}. "
            f"{TOKENS}"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        raise BuildError(
            f"cannot connect to Ray at {options['address']!r}: {_explain_error(error, address)}"
        ) from error
    return str(options["address"])


def _explain_error(error: Exception, address: str | None) -> str:
    """Why Ray cannot be connected to, and what that may come from: often Ray says nothing of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    if address is None or any(one in text for one in SAID_BY_RAY):
        return text
    python = ".".join(map(str, sys.version_info[:3]))
    hints = (
        f"{text}. This process has Ray {of_ray().__version__} and Python {python}: the cluster has "
        "to have the same ('ray --version' on its head)"
    )
    return hints if os.environ.get("RAY_AUTH_MODE") else f"{hints}. {TOKENS}"


def _check_answers(address: str) -> None:
    """Raise `BuildError` where no gRPC server answers at the address: Ray itself waits for a
    minute, or for ever."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise BuildError(
            f"address={address!r} is no address of a Ray cluster: write host:port of its head "
            "(what 'ray start --head' prints, port 6379), or 'auto' for the one of this host. "
            "A driver of Ray Client (ray://) is not supported: start the script on the cluster, "
            "by 'ray job submit' for example"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as made:
            said = _greeting(made)
    except (OSError, OverflowError) as error:
        raise BuildError(
            f"no Ray cluster answers at {address!r} ({error}): is its head running "
            "('ray status' there), and does a firewall let this host reach the port?"
        ) from error
    if said and said[3:4] != HTTP2_SETTINGS[3:4]:
        raise BuildError(
            f"what listens at {address!r} is no head of a Ray cluster: it answers {said!r}. Write "
            "the address that 'ray start --head' prints, whose port is 6379 by default (8265 is "
            "that of the dashboard)"
        )


def _check_is_host(address: str) -> None:
    """Raise `BuildError` where no Ray node runs on this host: Ray connects through it, and waits
    for it for a minute without a word."""
    find = getattr(of_ray("_private.services"), "find_node_ids", None)  # what Ray itself calls
    end = time.monotonic() + ANSWER_SECONDS  # it may be starting
    while find is not None and not find():
        if time.monotonic() >= end:
            raise BuildError(
                f"the Ray cluster at {address!r} answers, but this host has no part in it: start "
                f"the driver on one of its hosts, or 'ray start --address={address}' here before"
            )
        time.sleep(LOOK_SECONDS)


def _greeting(made: socket.socket) -> bytes:
    """What answers the first bytes of a gRPC client (RFC 9113, 3.4); nothing where TLS would have
    to come first. An HTTP/2 server begins with a frame of settings.

    Raises:
        OSError: it does not answer.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return b""
    made.sendall(HTTP2_PREFACE + HTTP2_SETTINGS)
    said = b""
    while len(said) < len(HTTP2_SETTINGS):
        more = made.recv(len(HTTP2_SETTINGS) - len(said))
        if not more:
            raise ConnectionError("it closes the connection")
        said += more
    return said
