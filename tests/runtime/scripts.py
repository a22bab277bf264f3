"""Scripts as users write them, run in a process group of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]

PATIENCE = 100.0
"""seconds after which a script is taken to hang, on a busy machine, too"""


class Script:
    """A running script. Its temporary folder is its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self._read: list[str] = []
        self._read_errors: list[str] = []

    def wait_for(self, line: str) -> None:
        """Return once it has printed this line."""
        assert self.process.stdout is not None
        self._wait_for(line, self.process.stdout, self._read)

    def wait_for_error(self, line: str) -> None:
        """Return once this line is on its stderr, where its workers' output is, too."""
        assert self.process.stderr is not None
        self._wait_for(line, self.process.stderr, self._read_errors)

    def _wait_for(self, line: str, stream: IO[str], read: list[str]) -> None:
        while not read or read[-1] != f"{line}\n":
            read.append(stream.readline())
            assert read[-1], self.end()

    def terminate_until_ended(self) -> None:
        """Send SIGTERM until it has ended: a second one too soon after the first does not count."""
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < until
            self.process.terminate()
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str], str]:
        """Its exit code, the lines in alphabetical order that it printed, and its stderr; returns
        when it and its workers have closed their output."""
        out, err = self.process.communicate(timeout=PATIENCE)
        lines = sorted(("".join(self._read) + out).splitlines())
        return self.process.returncode, lines, "".join(self._read_errors) + err

    def gone(self) -> bool:
        """Whether nothing of it runs any more, workers included, or will soon."""
        until = time.monotonic() + PATIENCE
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.01)
        return not left

    def _processes(self) -> list[str]:
        """The processes with its environment; one that has ended and waits for its parent has
        none."""
        mine = f"TMPDIR={self.folder / 't'}".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if mine in file.read_bytes().split(b"\0"):
                    found.append(file.parent.name)
        return found

    @property
    def left(self) -> list[str]:
        """What is in its temporary folder now."""
        return sorted(os.listdir(self.folder / "t"))


@contextmanager
def running(source: str) -> Iterator[Script]:
    """Run this source as a script; whatever is left of its group is killed in the end."""
    with tempfile.TemporaryDirectory(prefix="s") as name:
        folder = Path(name)
        (folder / "t").mkdir()
        (folder / "script.py").write_text(source)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        environment = {**kept, "TMPDIR": str(folder / "t"), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, str(folder / "script.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        with process:
            try:
                yield Script(process, folder)
            finally:
                if alive(process.pid):
                    os.killpg(process.pid, signal.SIGKILL)


def gone(group: int, within: float = PATIENCE) -> bool:
    """Whether nobody is left in a process group, or will be in so many seconds."""
    until = time.monotonic() + within
    while (left := alive(group)) and time.monotonic() < until:
        time.sleep(0.01)
    return not left


def alive(group: int) -> bool:
    """Whether anybody runs in a process group; one that has ended and waits for its parent does
    not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def process_state(pid: int) -> str:
    """Letter of ``/proc/PID/stat``; empty where the process is gone, or goes while this reads."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def process_runs(pid: int) -> bool:
    """Whether this process is there; one that has ended and waits for its parent is not."""
    return process_state(pid) not in ("", "Z")


def wait_until_stopped(pid: int) -> None:
    """Return once this process has stopped for the signal that it was sent."""
    while process_state(pid) != "T":
        assert process_runs(pid)
