"""A run of a job on three hosts: started, watched, and accounted for once it has ended."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from rlinf_async.observe.trace import read_perfetto
from tests.jobs.embodied.kit import SMALL
from tests.jobs.language.kit import TINY
from tests.jobs.on_hosts.driven import FAIL_AT, JOURNAL, Step
from tests.jobs.on_hosts.hosts import HEAD, Host, Hosts, environment
from tests.jobs.on_hosts.observer import Seen
from tests.jobs.processes import PATIENCE, processes, until
from tests.net.hosts import ROOT

Kind = Literal["embodied", "language"]
KINDS: Final[tuple[Kind, ...]] = ("embodied", "language")
STEPS: Final = 128
"""of an iteration of the embodied job"""
ITEMS: Final[dict[Kind, int]] = {"embodied": 4, "language": 8}
"""trajectories, or samples, of an iteration"""
MADE: Final[dict[Kind, str]] = {"embodied": "trajectories", "language": "generated"}
"""channel into which rollout and env workers put them"""
TAKEN: Final[dict[Kind, str]] = {"embodied": "trajectories", "language": "scored"}
"""channel from which they are taken for training"""
SETTINGS: Final[dict[Kind, tuple[object, ...]]] = {
    "embodied": ("--cluster.env_workers", 2, "--training.checkpoint_every", 5),
    "language": (
        *("--cluster.rollout_workers", 2, "--training.checkpoint_every", 5),
        *("--data.verifier", "tests.jobs.language.verifiers:letters", "--evaluation.samples", 0),
    ),
}


class Observer:
    """What Ray says is there, asked on the head's host."""

    def __init__(self, hosts: Hosts) -> None:
        head = hosts[HEAD]
        with (hosts.folder / "observer.log").open("ab") as log:
            self._process = subprocess.Popen(
                head.inside(sys.executable, "-m", "tests.jobs.on_hosts.observer", hosts.address),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def see(self) -> Seen:
        """Ask."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Seen)

    def until_alive(self, *names: str) -> None:
        """Wait until Ray says that exactly these hosts are alive."""
        until(lambda: self.see().hosts == sorted(names), f"{', '.join(names)} are alive")

    def close(self) -> None:
        """End it."""
        with self._process:  # which closes its pipes, and waits
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Items(NamedTuple):
    """What became of trajectories or samples, over all drivers of a run."""

    made: int
    """put by the workers that make them"""
    taken: int
    """taken for training"""
    second: int
    """left out because they had come before: a worker that was started again made them again"""
    used: int
    """different ones that were trained"""
    again: int
    """trained again after a resume, from the checkpoint on"""


class Driver:
    """The driver of a run, on the head's host."""

    def __init__(self, host: Host, log: Path, *arguments: object) -> None:
        self._log = log
        self._started = host.run(*arguments, log=log)
        found: list[int] = []

        def runs() -> bool:
            found.extend(one.pid for one in processes() if one.parent == self._started.pid)
            return bool(found) or self._started.poll() is not None

        until(runs, "the driver runs")
        self.pid = found[0] if found else 0

    @property
    def said(self) -> str:
        """All that was printed."""
        return self._log.read_text(encoding="utf-8")

    @property
    def last_line(self) -> str:
        """The last line of it."""
        return [*self.said.splitlines(), "nothing was printed"][-1]

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._started.poll() is not None

    def send(self, what: signal.Signals) -> None:
        """Send a signal to the driver."""
        os.kill(self.pid, what)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that happens while it runs."""

        def happened() -> bool:
            if self.ended and not condition():
                raise AssertionError(f"it ended before: {what}\n{self.said}")
            return bool(condition())

        until(happened, what)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        return self._started.wait(seconds)

    def end(self) -> None:
        """Leave nothing of it."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._started.wait()


class JobOnHosts:
    """One run folder of a job.

    Args:
        folder: for this run; shared by all hosts.
        iterations: of the whole run.
    """

    def __init__(self, hosts: Hosts, kind: Kind, folder: Path, iterations: int) -> None:
        folder.mkdir()
        self.kind: Kind = kind
        self.iterations = iterations
        self.out = folder / "run"
        self._hosts, self._folder = hosts, folder
        self._drivers = 0
        text = SMALL
        if kind == "language":
            data = folder / "sums.jsonl"
            lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
            data.write_text("\n".join(lines) + "\n")
            text = TINY.format(data=data)
        (folder / "run.toml").write_text(text)

    def start(self, *settings: object, resume: bool = False, fail_at: int | None = None) -> Driver:
        """Start its driver on the head's host."""
        self._drivers += 1
        record = self._folder / f"channels-{self._drivers}.json"
        length: tuple[object, ...] = ("--training.iterations", self.iterations)
        if self.kind == "embodied":
            length = ("--training.total_steps", self.iterations * STEPS)
        variables = {JOURNAL: str(self._journal)}
        if fail_at is not None:
            variables[FAIL_AT] = f"version {fail_at}"  # a number would not stay text
        for name, value in variables.items():
            settings = (*settings, f"--cluster.ray.runtime_env.env_vars.{name}", value)
        return Driver(
            self._hosts[HEAD],
            self._folder / f"driver-{self._drivers}.log",
            *(sys.executable, "-m", "tests.jobs.on_hosts.driven", record),
            *("train", self._folder / "run.toml", "--out", self.out, *length),
            *("--cluster.backend", "ray", "--cluster.ray.address", self._hosts.address),
            *(*SETTINGS[self.kind], *settings, *(["--resume"] if resume else [])),
        )

    @property
    def rows(self) -> int:
        """Iterations that are booked."""
        path = self.out / "metrics.csv"
        if not path.exists():
            return 0
        with path.open(newline="") as file:
            return sum(1 for row in csv.DictReader(file) if row.get("iteration"))

    @property
    def summary(self) -> dict[str, Any]:
        path = self.out / "summary.json"
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    @property
    def steps(self) -> list[Step]:
        """Every training step, in the order in which they ended."""
        if not self._journal.exists():
            return []
        lines = self._journal.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Step) for line in lines]

    def items(self) -> Items:
        """Count."""
        carried = [
            json.loads(path.read_bytes()) for path in sorted(self._folder.glob("channels-*.json"))
        ]
        dropped = self.summary.get("dropped", {})
        names = Counter(item for step in self.steps for item in step.items)
        return Items(
            made=sum(one[MADE[self.kind]]["puts"] for one in carried if one),
            taken=sum(one[TAKEN[self.kind]]["gets"] for one in carried if one),
            second=dropped.get("second trajectories", 0) + dropped.get("second samples", 0),
            used=len(names),
            again=names.total() - len(names),
        )

    def check_trace(self, seconds: float) -> list[str]:
        """What is wrong with the trace, where hosts have other clocks; the run took so long."""
        path = self.out / "trace.json.gz"
        took = max((span.end for span in read_perfetto(path)), default=0) / 1e9
        return [] if 0.0 < took <= seconds else [f"the trace is {took:.3g} s long"]

    def check(self) -> list[str]:
        """What is wrong with a run that has ended well: items lost, doubled, or of another
        iteration."""
        wrong = []
        if self.summary.get("outcome") != "finished":
            wrong.append(f"outcome {self.summary.get('outcome')}: {self.summary.get('error')}")
        last: dict[int, Step] = {}
        """the step of each version that the weights at the end come from"""
        for step in self.steps:
            last = {version: one for version, one in last.items() if version < step.version}
            last[step.version] = step
        if sorted(last) != list(range(self.iterations)):
            wrong.append(f"versions {sorted(last)} were trained")
        for version, step in last.items():
            if len(set(step.items)) != len(step.items):
                wrong.append(f"version {version} was trained with an item twice")
            if len(step.items) != ITEMS[self.kind]:
                wrong.append(f"version {version} was trained with {len(step.items)} items")
            if any(item[0] != version for item in step.items):
                wrong.append(f"version {version} was trained with items of another")
        every = [item for step in last.values() for item in step.items]
        if len(set(every)) != len(every):
            wrong.append("an item was trained in two versions")
        if self.rows != self.iterations:
            wrong.append(f"metrics.csv has {self.rows} iterations")
        return wrong

    @property
    def _journal(self) -> Path:
        return self._folder / "steps.jsonl"


class Left(NamedTuple):
    """What is there of runs that are over. Each is 0 where nothing is left."""

    actors: int
    groups: int
    """placement groups"""
    processes: int
    """on all hosts, of drivers, of workers, and started by these"""
    sockets: int
    """sockets and folders in /tmp"""
    shm: int
    """files in /dev/shm"""
    used: float
    """CPUs that Ray says are in use"""


NOTHING: Final = Left(0, 0, 0, 0, 0, 0.0)


def left(hosts: Hosts, observer: Observer | None) -> Left:
    """Look; without an observer where Ray itself is to be gone."""
    seen = Seen([], [], [], {}) if observer is None else observer.see()
    return Left(
        actors=len(seen.actors),
        groups=len(seen.groups),
        processes=sum(len(own_processes(host)) for host in hosts),
        sockets=sum(len(_ours(host, "tmp")) for host in hosts),
        shm=sum(len(_ours(host, "dev/shm")) for host in hosts),
        used=sum(seen.used.values()),
    )


def own_processes(host: Host) -> list[str]:
    """Command lines of what is not Ray's own."""
    found = []
    for one in host.processes():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{one.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "on_hosts.observer" in line or one.pid == host.init:
                continue
            if not _of_ray(line):
                found.append(line.strip())
    return found


def _of_ray(line: str) -> bool:
    """Whether it is a process of Ray's own: a daemon, or one that waits for a task."""
    if "ray::RankProcess" in line:
        return False
    return "/ray/" in line or "ray.scripts" in line or "ray." in line or line.startswith("ray::")


def what_is_left(hosts: Hosts, observer: Observer | None) -> Left:
    """What is there after the end of a run; Ray is given a while."""
    found = [left(hosts, observer)]

    def nothing() -> bool:
        found.append(left(hosts, observer))
        return found[-1] == NOTHING

    with contextlib.suppress(AssertionError):
        until(nothing, "nothing is left", seconds=20.0)
    return found[-1]


def what_it_is(hosts: Hosts) -> dict[str, list[str]]:
    """Processes and files that are left, by host."""
    found = {
        host.name: [*own_processes(host), *_ours(host, "tmp"), *_ours(host, "dev/shm")]
        for host in hosts
    }
    return {name: what for name, what in found.items() if what}


def _ours(host: Host, folder: str) -> list[str]:
    """Files that are not Ray's, nor torch's folder for compiled code, which the next run uses; nor
    where this checkout is seen, see `hosts.SETUP`."""
    others = ("ray", "plasma", "torchinductor_")
    checkout = ROOT.parts[2:3] if ROOT.is_relative_to("/tmp") else ()
    return [
        name for name in host.files(folder) if not (name.startswith(others) or name in checkout)
    ]
