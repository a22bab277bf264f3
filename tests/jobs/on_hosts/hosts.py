"""Hosts of a Ray cluster on this machine, each with a network, a monotonic clock, processes, /tmp
and /dev/shm of its own: Linux namespaces, with a switch between them. To make them takes root.

A host is killed by SIGKILL to its process 1: the kernel kills all others with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.jobs.processes import Process, processes, told_of, until
from tests.net.hosts import ROOT, NotAllowed, ip

HEAD: Final = "alpha"
NAMES: Final = (HEAD, "beta", "gamma")
PORT: Final = 6379
CLOCKS_APART: Final = 100_000
"""seconds between the monotonic clocks of two hosts, as if these had started a day apart"""
STORE_BYTES: Final = 100 << 20
"""Of Ray's object store."""
NOTICING: Final = (
    '--system-config={"health_check_period_ms":1000,"health_check_timeout_ms":10000,'
    '"health_check_initial_delay_ms":10000,"health_check_failure_threshold":5}'
)
"""By default Ray takes half a minute until it says that a host is lost. One that is killed refuses
at once; one that lives is given time to answer: these hosts share few cores with other tests."""
_WORKER: Final = re.compile(r"[A-Z]\w*\[\d+\]")
SETUP: Final = (
    # This checkout is seen on each host, also where it lies below /tmp.
    'exec 3<. && mount -t tmpfs tmpfs /tmp && mkdir -p "$PWD" && '
    'mount -c --bind /proc/self/fd/3 "$PWD" && cd "$PWD" && exec 3<&- && '
    'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && "$@" & '
    # Process 1 of a host collects the processes whose parents have ended.
    "wait; exec sleep infinity"
)


class Host:
    """One host that runs.

    Args:
        namespace: name of its network.
        started: process of this machine that holds it.
    """

    def __init__(
        self, name: str, address: str, namespace: str, started: subprocess.Popen[bytes]
    ) -> None:
        self.name, self.address, self.namespace = name, address, namespace
        self._started = started
        until(lambda: _children(started.pid), f"host {name} runs")
        [self.init] = _children(started.pid)
        """its process 1, by the number that it has on this machine"""

    def inside(self, *command: object) -> list[str]:
        """The command that runs this one there."""
        enter = ["nsenter", "-t", str(self.init), "-m", "-n", "-p", "-u", "-i", "-T"]
        return [*enter, *(str(one) for one in command)]

    def run(self, *command: object, log: Path) -> subprocess.Popen[bytes]:
        """Start a command there; it prints to ``log``."""
        with log.open("ab") as out:
            return subprocess.Popen(
                self.inside(*command),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self) -> list[Process]:
        """Those that run there."""
        own = _namespace(self.init)
        return [one for one in processes() if _namespace(one.pid) == own]

    def files(self, folder: str) -> set[str]:
        """Names in a folder there."""
        path = Path(f"/proc/{self.init}/root/{folder}")
        return {one.name for one in path.iterdir()} if path.is_dir() else set()

    def listens(self, port: int) -> bool:
        """Whether a process there listens at this port of TCP."""
        paths = (Path(f"/proc/{self.init}/net/{kind}") for kind in ("tcp", "tcp6"))
        lines = [line.split() for path in paths for line in path.read_text().splitlines()]
        return any(one[1].endswith(f":{port:04X}") and one[3] == "0A" for one in lines[1:])

    @property
    def ended(self) -> bool:
        """Whether what was started there has, and all that this has started."""
        return told_of(self.init, "comm") == b"sleep\n"  # see `SETUP`

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._started.wait()


class Hosts:
    """Three hosts that reach each other, and a Ray node on each. The first has Ray's head.

    Args:
        folder: that all of them share, as they do this checkout; not below /tmp.
        cores: of each, as Ray counts them.
    """

    def __init__(self, folder: Path, cores: int = 4) -> None:
        self.folder = folder
        self._cores = cores
        self._prefix = f"ray-{os.getpid()}"
        self._running: dict[str, Host] = {}

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"{self._address(HEAD)}:{PORT}"

    def __getitem__(self, name: str) -> Host:
        return self._running[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._running.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def wire(self) -> None:
        """Make the networks.

        Raises:
            NotAllowed: they cannot be made here.
        """
        switch = f"{self._prefix}-switch"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        ip("-n", switch, "link", "set", "switch0", "up")
        for name in NAMES:
            own = f"{self._prefix}-{name}"
            ip("netns", "add", own)
            ip("-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns",
               own)  # fmt: skip
            ip("-n", switch, "link", "set", name, "master", "switch0", "up")
            ip("-n", own, "address", "add", f"{self._address(name)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", own, "link", "set", device, "up")
            # Ray finds a host's own address by where its default route leads.
            ip("-n", own, "route", "add", "default", "dev", "eth0")

    def start(self, name: str, *options: str) -> Host:
        """Start a host and its Ray node; Ray needs some seconds until it is there."""
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", NOTICING]
        if name != HEAD:
            where = [f"--address={self.address}"]
        namespace = f"{self._prefix}-{name}"
        command = [
            *("ip", "netns", "exec", namespace),
            *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
            *("--time", f"--monotonic={CLOCKS_APART * NAMES.index(name)}"),
            *("--mount-proc", "bash", "-c", SETUP, name),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *("--disable-usage-stats", f"--node-name={name}", f"--num-cpus={self._cores}"),
            *(f"--object-store-memory={STORE_BYTES}", f"--node-ip-address={self._address(name)}"),
            *where,
            *options,
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        host = self._running[name] = Host(name, self._address(name), namespace, started)
        if name == HEAD:
            until(lambda: host.listens(PORT) or host.ended, "Ray's head listens")
            if host.ended:
                raise AssertionError((self.folder / f"{name}.log").read_text())
        return host

    def kill(self, name: str) -> None:
        """Kill a host."""
        self._running.pop(name).kill()

    def close(self) -> None:
        """Kill all hosts, and remove the networks."""
        for host in self:
            self.kill(host.name)
        for name in (*NAMES, "switch"):
            with contextlib.suppress(NotAllowed):
                ip("netns", "delete", f"{self._prefix}-{name}")

    def workers(self) -> dict[str, dict[str, int]]:
        """Processes of workers by host and name, as the kernel has them."""
        return {host.name: _workers(host) for host in self}

    def find_worker(self, name: str) -> int | None:
        """Process of a worker, by the number that it has on this machine."""
        return next((mine[name] for mine in self.workers().values() if name in mine), None)

    def _address(self, name: str) -> str:
        return f"10.78.0.{NAMES.index(name) + 1}"


@contextmanager
def three_hosts(cores: int = 4) -> Iterator[Hosts]:
    """Three hosts with Ray.

    Raises:
        NotAllowed: they cannot be made here.
    """
    for program in ("ip", "unshare", "nsenter", "bash"):
        if shutil.which(program) is None:
            raise NotAllowed(f"there is no {program!r}")
    if os.geteuid() != 0:
        raise NotAllowed("it takes root")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts end, too
    folder = Path("/var/tmp") / f"ray-hosts-{os.getpid()}"  # /tmp is each host's own
    folder.mkdir()
    made = Hosts(folder, cores)
    try:
        made.wire()
        made.start(HEAD)
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _workers(host: Host) -> dict[str, int]:
    """Its workers by name, which their processes show."""
    found = {}
    for one in host.processes():
        name = told_of(one.pid, "comm").decode().strip()
        if _WORKER.fullmatch(name):
            found[name] = one.pid
    return found


def _children(pid: int) -> list[int]:
    return [one.pid for one in processes() if one.parent == pid]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it ended meanwhile
        return ""


def environment() -> dict[str, str]:
    """Of what starts on a host: that of this process, without what is this one's own.

    Modules that many processes import are compiled once, also where this one keeps no bytecode.
    """
    left_out = ("RAY_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    # A token that lies in the home folder would be asked for on some hosts and not given by others.
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_enable_worker_prestart": "0"}
    return kept | ray | {"PYTHONPATH": str(ROOT)}
