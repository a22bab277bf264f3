"""Runs one case once: pinned, in a clean environment; no process of it is left."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import psutil

from rlinf_async.bench.model import Case, Outcome
from rlinf_async.bench.results import Sample

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL = 400
"""characters of the end of a failed command's output that are shown"""
SKIPPED = 77
"""Exit code of a command that cannot run on this machine; the end of its output says why."""
_GRACE = 10.0
"""seconds between asking a command to stop and killing it"""
_DYING = 60.0
"""seconds at most until a killed process is gone: it may have much memory to free"""


class CaseFailed(Exception):
    """A case's command failed, hung, or printed no measurement."""


class CaseSkipped(Exception):
    """A case cannot run on this machine, and why."""


def run_case(case: Case, *, python: str, here: pathlib.Path, repetition: int) -> Sample:
    """One run of a case; `CaseFailed` says what went wrong, `CaseSkipped` what is missing here."""
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as scratch:
        out = pathlib.Path(scratch) / "out"
        out.mkdir()
        words = {"python": python, "here": str(here), "out": str(out)}
        command = [word.format(repetition=repetition, **words) for word in case.command]
        stdout = _output_of(case, command, cwd=scratch)
        try:
            return case.read(Outcome(stdout, out))
        except (OSError, ValueError) as error:
            raise CaseFailed(f"left no measurement: {error}") from error


def _output_of(case: Case, command: list[str], cwd: str) -> str:
    try:
        with pinned(case.cores):
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment_for(case, scratch=cwd),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
    except OSError as error:
        raise CaseFailed(f"cannot start {command[0]}: {error.strerror}") from error
    with _stopped_at_the_end(process):
        try:
            stdout, stderr = process.communicate(timeout=case.timeout)
        except subprocess.TimeoutExpired:
            raise CaseFailed(f"not done after {case.timeout:.0f} s") from None
    if process.returncode == SKIPPED:
        raise CaseSkipped((stderr or stdout).strip()[-_TAIL:])
    if process.returncode != 0:
        tail = (stderr or stdout).strip()[-_TAIL:]
        raise CaseFailed(f"exit code {process.returncode}: {tail}")
    return stdout


def environment_for(case: Case, scratch: str) -> dict[str, str]:
    """Our environment without what would change a peer: paths into our own, thread counts.

    Temporary files go into ``scratch``, which is removed after the run.
    """
    dropped = {*_THREAD_VARIABLES, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    if case.threads is not None:
        kept |= dict.fromkeys(_THREAD_VARIABLES, str(case.threads))
    return kept | {"TMPDIR": scratch} | dict(case.environment)


@contextlib.contextmanager
def pinned(cores: int) -> Iterator[None]:
    """What is started in here runs on this many cores (fewer where there are fewer)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _stopped_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leaves nothing running: the command's whole group is asked to stop, then killed.

    What it started in sessions of their own, such as workers, is given time to follow, then killed.
    """
    try:
        yield
    finally:
        started: list[psutil.Process] = []
        if process.poll() is None:
            started = _started_by(process.pid)
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        _signal(process, signal.SIGKILL)
        process.wait()
        _end(started, session=process.pid)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _started_by(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _end(started: list[psutil.Process], session: int) -> None:
    """Wait until none of these nor of a killed session runs: the next case is to be alone."""
    members = [one for one in psutil.process_iter() if _session_of(one) == session]
    for one in (alive := _wait_for({*started, *members}, _GRACE)):
        with contextlib.suppress(psutil.Error):
            one.kill()
    _wait_for(alive, _DYING)


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(process.pid)
    return None


def _wait_for(processes: set[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Return those that still run then; a dead one that nobody has reaped does not."""
    end = time.monotonic() + seconds
    while (alive := {one for one in processes if _runs(one)}) and time.monotonic() < end:
        time.sleep(0.01)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
