"""Commands in processes of their own, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.preloaded import Preforked, Preloaded

PATIENCE = 200.0
"""seconds that anything may take on a busy machine"""


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Look again and again, until it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s still not: {what}")
        time.sleep(0.005)


class Process(NamedTuple):
    """A line of ``/proc/*/stat``."""

    pid: int
    state: str
    parent: int


def processes() -> list[Process]:
    """All that run; zombies, which only wait to be collected, are left out."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:  # it ended meanwhile
            continue
        found.append(Process(int(stat.parent.name), fields[0], int(fields[1])))
    return [one for one in found if one.state != "Z"]


def children() -> set[int]:
    """The processes that this one has started, without those that stay, which serve others."""
    mine = {one.pid for one in processes() if one.parent == os.getpid()}
    stay = (b"resource_tracker", b"fork_server")
    return {pid for pid in mine if not any(name in _command(pid) for name in stay)}


def _command(pid: int) -> bytes:
    return told_of(pid, "cmdline")


def told_of(pid: int, what: str) -> bytes:
    """A file of ``/proc/PID``; empty of a process that has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


class Driver:
    """``rlinf-async`` in a session of its own, as a shell would run it.

    Its workers lead sessions of their own and outlive it for a moment: they are known by the
    folder for temporary files, which nobody else has.

    It is forked from ``python``, if given, and finds imported what that has imported; what it
    starts begins with an interpreter of its own.
    """

    def __init__(
        self,
        temporary: pathlib.Path,
        *arguments: object,
        module: tuple[object, ...] = ("rlinf_async",),
        python: Preloaded | None = None,
    ) -> None:
        self._log = temporary.with_suffix(".log")
        self._mark = f"TMPDIR={temporary}".encode()
        self._process: subprocess.Popen[bytes] | Preforked
        words = ["-m", *(str(one) for one in (*module, *arguments))]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with self._log.open("w") as log:
            if python is not None:
                self._process = python.start(
                    *words, environment=environment, output=log, session=True
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, *words],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    @property
    def said(self) -> str:
        """All that it printed so far."""
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def running(self, name: bytes) -> list[int]:
        """Those that it has started, at whatever remove, whose command line has this in it."""
        parents = {one.pid: one.parent for one in processes()}

        def is_mine(pid: int) -> bool:
            while pid in parents and pid != self._process.pid:
                pid = parents[pid]
            return pid == self._process.pid

        return [pid for pid in parents if is_mine(pid) and name in _command(pid)]

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Wait for something that happens while it runs."""

        def happened() -> bool:
            if self._process.poll() is not None and not condition():
                raise AssertionError(f"it ended before: {what}\n{self.said}")
            return bool(condition())

        until(happened, what, seconds)

    def kill(self) -> None:
        """SIGKILL to the driver alone; its workers have to see it."""
        self._process.kill()

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to everybody in the driver's group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to everybody in the driver's group, as SLURM and ``timeout`` send it."""
        os.killpg(self._process.pid, signal.SIGTERM)

    def request_checkpoint(self) -> None:
        """SIGUSR1 to the driver."""
        self._process.send_signal(signal.SIGUSR1)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code, once neither it nor a worker of it is left."""
        code = self._process.wait(seconds)
        until(lambda: not self._whole_run(), "every process of the run is gone")
        return code

    def end(self) -> None:
        """Leave nothing of it, however the test went."""
        for pid in self._whole_run():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _whole_run(self) -> list[int]:
        """It and all that it started, at whatever remove and in whatever session."""
        every = (one.pid for one in processes())
        itself = self._process.pid if self.is_running else None
        return [
            pid
            for pid in every
            if pid == itself or self._mark in told_of(pid, "environ").split(b"\0")
        ]


Start = Callable[..., Driver]
"""Starts a driver."""
