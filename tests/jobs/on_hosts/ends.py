"""``python -m tests.jobs.on_hosts.ends``: what is left after each way in which a run may end.

Success, an error of a worker, Ctrl-C, SIGKILL to the driver, ``ray stop`` on one host and on all of
them, for both jobs on a Ray cluster of three hosts. Counts actors and placement groups as Ray has
them, and on every host processes, sockets in /tmp and files in /dev/shm.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.jobs.on_hosts.hosts import HEAD, NAMES, Hosts, three_hosts
from tests.jobs.on_hosts.plan import settings
from tests.jobs.on_hosts.runs import (
    KINDS,
    NOTHING,
    Driver,
    JobOnHosts,
    Kind,
    Left,
    Observer,
    what_is_left,
    what_it_is,
)

End = Literal["success", "failure", "ctrl-c", "driver killed", "ray stop on one", "ray stop on all"]
ENDS: Final[dict[End, int]] = {
    "success": 0,
    "failure": 1,
    "ctrl-c": 130,
    "driver killed": -9,
    "ray stop on one": 1,
    "ray stop on all": 1,
}
"""exit code of each way to end"""
ENDLESS: Final = 10**6
SHORT: Final = 6
PLACES: Final[dict[Kind, dict[str, str]]] = {
    "embodied": {"actor": "beta:0", "rollout": "gamma:0"},
    "language": {"actor": "beta:0", "rollout": "gamma:0-1"},
}
HEADER: Final = (
    f"{'job':<9} {'end':<16} {'exit':>4} {'end after':>9} {'gone after':>10} {'actors':>6}"
    f" {'groups':>6} {'processes':>9} {'sockets':>7} {'shm':>4} {'CPUs':>4}  verdict"
)


class Ended(NamedTuple):
    """A run that is over."""

    kind: Kind
    end: End
    code: int
    seconds: float
    """until the driver ended"""
    gone: float
    """until nothing was left"""
    left: Left
    wrong: list[str]

    def __str__(self) -> str:
        found = self.left
        return (
            f"{self.kind:<9} {self.end:<16} {self.code:>4} {self.seconds:>7.1f} s"
            f" {self.gone:>8.1f} s {found.actors:>6} {found.groups:>6} {found.processes:>9}"
            f" {found.sockets:>7} {found.shm:>4} {found.used:>4g}"
            f"  {'; '.join(self.wrong) or 'ok'}"
        )


def perform(kind: Kind, end: End, hosts: Hosts, observer: Observer, folder: Path) -> Ended:
    """Let one run end in this way, and look."""
    run = JobOnHosts(hosts, kind, folder, SHORT if end == "success" else ENDLESS)
    driver = run.start(*settings(PLACES[kind]), fail_at=SHORT if end == "failure" else None)
    try:
        driver.until(lambda: run.rows >= SHORT - 1, "some iterations")
        began = time.monotonic()
        bring_about(end, driver, hosts)
        code = driver.wait()
        seconds = time.monotonic() - began
        found = what_is_left(hosts, None if end == "ray stop on all" else observer)
        gone = time.monotonic() - began
    finally:
        driver.end()
    wrong = []
    if code != ENDS[end]:
        wrong.append(f"exit code {code}: {driver.last_line}")
    if end != "failure" and "Traceback" in driver.said:  # that of the worker is shown
        wrong.append("a traceback")
    if found != NOTHING:
        wrong.append(f"left: {what_it_is(hosts)}")
    return Ended(kind, end, code, seconds, gone, found, wrong)


def bring_about(end: End, driver: Driver, hosts: Hosts) -> None:
    """Do what makes the run end."""
    if end == "ctrl-c":
        driver.send(signal.SIGINT)
    elif end == "driver killed":
        driver.send(signal.SIGKILL)
    elif end == "ray stop on one":
        ray_stop(hosts, ["beta"])
    elif end == "ray stop on all":
        ray_stop(hosts, NAMES)


def ray_stop(hosts: Hosts, names: Sequence[str]) -> None:
    """``ray stop`` on these hosts at the same time, as an administrator types it."""
    command = (sys.executable, "-m", "ray.scripts.scripts", "stop")
    log = hosts.folder / "stop.log"
    for stopping in [hosts[name].run(*command, log=log) for name in names]:
        stopping.wait()


def perform_all(kinds: Sequence[Kind], ends: Sequence[End], keep: Path | None) -> int:
    """All runs; the number of those in which something was wrong."""
    bad = 0
    print(HEADER, flush=True)
    with three_hosts() as hosts:
        observer = Observer(hosts)
        for kind in kinds:
            for end in ends:
                for name in NAMES:
                    if name not in hosts:
                        hosts.start(name)
                observer.until_alive(*NAMES)
                folder = (keep or hosts.folder) / f"{kind}-{end.replace(' ', '-')}"
                ended = perform(kind, end, hosts, observer, folder)
                print(ended, flush=True)
                bad += bool(ended.wrong)
                if end == "ray stop on one":
                    hosts.kill("beta")
                if end == "ray stop on all":
                    observer.close()
                    for name in NAMES:
                        hosts.kill(name)
                    hosts.start(HEAD)
                    observer = Observer(hosts)
        observer.close()
    return bad


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.jobs.on_hosts.ends")
    parser.add_argument("--job", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--end", choices=list(ENDS), nargs="*", default=list(ENDS))
    parser.add_argument("--keep", type=Path, help="folder for what the runs leave; not below /tmp")
    given = parser.parse_args()
    # What a shell starts in the background ignores SIGINT, and the drivers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    return 1 if perform_all(given.job, given.end, given.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
