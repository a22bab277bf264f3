"""This process's connection to a Ray cluster.

Ray's API blocks: its calls are made in one thread, in order, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from rlinf_async.runtime.ray.hosts import Host, devices_of, present_hosts
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

P = ParamSpec("P")
R = TypeVar("R")

ANSWER_SECONDS: Final = 10.0
"""time that the address of a cluster has to answer"""
LOCAL_STORE_BYTES: Final = 100 << 20
"""size of Ray's object store where Ray is started here: items do not go through it"""
ADDRESS_VARIABLE: Final = "RAY_ADDRESS"


class RaySession:
    """A connection to Ray; several clusters of this process may use it.

    Args:
        address: ``host:port`` of the cluster's head, or ``"auto"`` for the one that runs on this
            host; None: that of RAY_ADDRESS, and where that is not set Ray is started here, for the
            time of the session.
        runtime_env: Ray's runtime environment of all workers.
    """

    def __init__(self, address: str | None, runtime_env: dict[str, Any] | None) -> None:
        self._address = address
        self._runtime_env = runtime_env
        self._connected = False
        """whether this session connected; else the script had"""
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="ray")

    async def open(self) -> None:
        """Connect.

        Raises:
            BuildError: Ray is not installed; the address does not answer; the cluster has another
                version of Ray or Python.
        """
        try:
            self._connected = await self.do(_connect, self._address, self._runtime_env)
        except BaseException:
            self._calls.shutdown(wait=False)
            raise

    async def do(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that calls Ray's API, and does not wait for workers, in Ray's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, lambda: function(*args, **kwargs))

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """As `do`, without a result."""
        with contextlib.suppress(RuntimeError):  # the session is closed: Ray ends what is left
            self._calls.submit(function, *args, **kwargs)

    async def hosts(self) -> list[Host]:
        """The hosts that are alive now."""
        return await present_hosts(await self.do(of_ray().nodes))

    async def close(self) -> None:
        """Disconnect, where this session connected; a Ray that it started ends."""
        if self._connected:
            await self.do(of_ray().shutdown)
        self._calls.shutdown(wait=False)


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


def _connect(address: str | None, runtime_env: dict[str, Any] | None) -> bool:
    """Connect this process to Ray; False where it is connected already."""
    try:
        ray = of_ray()
    except ImportError as error:
        raise BuildError(
            f"Ray is not installed ({error}): pip install 'rlinf_async[ray]', or use "
            "Cluster.process()"
        ) from error
    if ray.is_initialized():
        return False
    address = address or os.environ.get(ADDRESS_VARIABLE)
    options: dict[str, Any] = {"address": address or "local"}
    if options["address"] == "local":
        options |= {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    else:
        _check_answers(options["address"])
    try:
        ray.init(runtime_env=runtime_env, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        raise BuildError(f"cannot connect to Ray at {options['address']!r}: {error}") from error
    return True


def _check_answers(address: str) -> None:
    """Raise `BuildError` where nobody listens at the address: Ray itself waits for a minute."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise BuildError(
            f"address={address!r} is no address of a Ray cluster: write host:port of its head "
            "(what 'ray start --head' prints, port 6379), or 'auto' for the one of this host. "
            "A driver of Ray Client (ray://) is not supported: start the script on the cluster, "
            "by 'ray job submit' for example"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BuildError(
            f"no Ray cluster answers at {address!r} ({error}): is its head running "
            "('ray status' there), and does a firewall let this host reach the port?"
        ) from error
