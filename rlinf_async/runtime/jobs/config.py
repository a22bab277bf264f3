"""Settings that every kind of run has, and checks of any configuration against this host, against
what is registered here, and against the run that is to go on.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rlinf_async.config import ConfigError, Document, UsageError
from rlinf_async.config.counts import MOST_THREADS, check_counts
from rlinf_async.config.entry_point import FOLDER
from rlinf_async.observe.errors import MetricsError
from rlinf_async.observe.metrics import find_sink
from rlinf_async.observe.run_folder import MARKER
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.devices import host_devices
from rlinf_async.runtime.ray.library import is_installed, not_installed
from rlinf_async.workers.context import Device
from rlinf_async.workers.errors import BuildError

LONGEST_GRACE: Final = 86400.0
"""seconds; threads cannot wait without a limit, and a job scheduler never does"""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Ray is reached and used, with ``backend = "ray"``."""

    address: str = ""
    """``host:port`` of the cluster's head, or ``"auto"``; empty: that of RAY_ADDRESS, and without
    it Ray is started on this host for the time of the run"""
    wait: float = 10.0
    """seconds to wait for devices that are in use"""
    interface: str = ""
    """network interface between the hosts, ``"eth1"``; empty: that of the hosts' addresses"""
    tls: bool = False
    """whether the channels' connections between hosts are encrypted"""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment of all workers: ``working_dir``, ``pip``, ..."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.wait < math.inf:
            raise ValueError(f"wait is {self.wait}; it must be seconds from 0")


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of ``[cluster]`` that is the same for every kind of run: how workers are started,
    watched and restarted."""

    backend: Literal["process", "local", "ray"] = "process"
    """``process``: a process of this host for each worker; ``ray``: an actor of Ray for each, on
    the hosts of its cluster; ``local``: all in one process"""
    ray: RayConfig = RayConfig()
    threads: int = 1
    """threads of the arithmetic in each process (OMP_NUM_THREADS)"""
    node_groups: dict[str, tuple[str, ...]] = {}
    """names for several hosts, used in ``placement``: ``gpus = ["alpha", "beta"]``"""
    max_restarts: int = 3
    """restarts of each worker within a minute, after which its death ends the run"""
    deadlock_after: float | None = 30.0
    """seconds in which no worker can go on, after which the run ends; None: never"""
    heartbeat_limit: float = 60.0
    """seconds after which a worker that does not answer is killed"""
    grace_seconds: float = 25.0
    """seconds from a SIGTERM to the end of the run, at most; no more than a day"""

    def __post_init__(self) -> None:
        check_counts(self, least=1, names=("threads",), most=MOST_THREADS)
        check_counts(self, least=0, names=("max_restarts",))
        if self.deadlock_after is not None and not self.deadlock_after > 0.0:
            raise ValueError(
                f"deadlock_after is {self.deadlock_after}; it must be above 0, or 'none' for no "
                "limit"
            )
        if not self.heartbeat_limit >= 1.0:
            raise ValueError(
                f"heartbeat_limit is {self.heartbeat_limit}; it must be at least 1: a healthy "
                "worker does not answer at once"
            )
        if not 0.0 < self.grace_seconds <= LONGEST_GRACE:
            raise ValueError(
                f"grace_seconds is {self.grace_seconds}; it must be above 0 and at most "
                f"{LONGEST_GRACE:.0f} (a day)"
            )

    def check_roles(self, placement: object) -> None:
        """Raise `ConfigError` for what a role's table asks and only a cluster of Ray can give.

        ``placement``: the settings of the roles, or a preset.
        """
        if self.backend == "ray" or not isinstance(placement, msgspec.Struct):
            return
        for field in msgspec.structs.fields(placement):
            settings = getattr(placement, field.name)
            for name in ("resources", "runtime_env"):
                if getattr(settings, name, None):
                    raise ConfigError(
                        f"only Ray's hosts have any: set cluster.backend to 'ray', or leave {name} "
                        "out",
                        path=("cluster", "placement", field.encode_name, name),
                    )

    @property
    def processes(self) -> bool:
        """Whether each worker has a process of its own."""
        return self.backend != "local"

    def devices(self) -> Sequence[Device]:
        """The devices on which this run would be placed, without starting anything.

        Raises:
            UsageError: Ray is not installed; its cluster cannot be reached; this host has no
                interface of the name that was given.
        """
        address = self.ray.address or os.environ.get("RAY_ADDRESS")
        if self.backend != "ray":
            return host_devices()
        self._check_interface()
        if not is_installed():
            raise UsageError(not_installed())
        if not address:  # Ray is started here
            host = socket.gethostname()
            return [msgspec.structs.replace(one, host=host) for one in host_devices()]
        from rlinf_async.runtime.ray.session import devices_at

        try:
            return asyncio.run(devices_at(address))
        except BuildError as error:
            raise UsageError(str(error)) from error

    def _check_interface(self) -> None:
        """Raise `ConfigError` where this host, whose driver listens there, has no such interface;
        other hosts are asked when workers start on them."""
        from rlinf_async.runtime.ray.interfaces import address_of

        if self.ray.interface:
            try:
                address_of(self.ray.interface)
            except BuildError as error:
                raise ConfigError(str(error), path=("cluster", "ray", "interface")) from None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every worker's process."""
        one = {"OMP_NUM_THREADS": str(self.threads)}
        # A thread that spins while it waits for its neighbours keeps a core from another worker.
        if self.threads > 1:
            one["OMP_WAIT_POLICY"] = "passive"
        if self.backend == "ray":  # whose workers may run in another folder
            one[FOLDER] = os.getcwd()
        return one

    def make_cluster(self, log: Path | None = None) -> Cluster:
        """A cluster of this configuration, not entered.

        ``log``: file for what worker processes print; None: stderr.
        """
        if self.backend == "local":
            return Cluster.local(deadlock_after=self.deadlock_after)
        if self.backend == "ray":
            return Cluster.ray(
                address=self.ray.address or None,
                heartbeat_limit=self.heartbeat_limit,
                deadlock_after=self.deadlock_after,
                wait=self.ray.wait,
                interface=self.ray.interface,
                tls=self.ray.tls,
                runtime_env=self.ray.runtime_env or None,
                log=log,
            )
        return Cluster.process(
            heartbeat_limit=self.heartbeat_limit, deadlock_after=self.deadlock_after, log=log
        )


def check_sinks(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a metrics sink that is not installed."""
    for name in names:
        try:
            find_sink(name)
        except MetricsError as error:
            raise ConfigError(str(error), path=("training", "metrics")) from error


def check_resumed(config: Any, started: Path, may_differ: Sequence[str]) -> list[str]:
    """Refuse to go on with a run under a configuration of which too much differs.

    Returns the settings that differ and may, with both of their values.

    Args:
        config: of the command.
        started: the file with the configuration that the run has now; nothing is checked where
            the folder holds no run, or one that was killed before it had written this file.
        may_differ: paths of the settings, or of whole sections, that a resumed run may change.

    Raises:
        UsageError: with the settings that differ, both of their values, and those that may.
    """
    if not started.is_file():
        checkpoints = started.parent / "checkpoints"  # without any, it begins from the beginning
        if (started.parent / MARKER).is_file() and any(checkpoints.glob("*")):
            raise UsageError(
                f"{started.parent} holds a run, but not its {started.name}, so whether the run can "
                "go on under this configuration is not known: put the file back, or start in "
                "another folder"
            )
        return []
    document = Document.read(started)
    job = document.tables.get("job")
    if job is not None and job != getattr(config, "job", job):
        raise UsageError(
            f"{started.parent} holds a run of the job {job!r}, and this configuration is for "
            f"{config.job!r}: start it in another folder"
        )
    before = document.to(type(config))
    allowed: list[str] = []
    differing: list[str] = []
    for path, old, new in _differences(before, config):
        may = any(path == one or path.startswith(f"{one}.") for one in may_differ)
        (allowed if may else differing).append(f"{path} ({old} in the run, {new} now)")
    if differing:
        raise UsageError(
            f"the run in {started.parent} cannot go on under another configuration: "
            f"{'; '.join(differing)}. Use the values of the run ({started}), or start in another "
            f"folder. A resumed run may change: {', '.join(may_differ)}"
        )
    return allowed


def _differences(
    before: msgspec.Struct, now: msgspec.Struct, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """The settings that differ: path, value before, value now."""
    for field in msgspec.structs.fields(now):
        old, new = getattr(before, field.name), getattr(now, field.name)
        path = f"{prefix}{field.encode_name}"
        if isinstance(old, msgspec.Struct) and type(old) is type(new):
            yield from _differences(old, new, f"{path}.")
        elif isinstance(old, dict) and isinstance(new, dict):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    yield f"{path}.{name}", old.get(name), new.get(name)
        elif old != new:
            yield path, old, new
