"""Finds benches and measures them: cases alternate, each in a clean environment on its own cores.

Cases alternate so that a slow minute of the machine affects all of them. No process of a case is
left after it. `Machine` says what a measurement depends on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import psutil

from benchmarks.harness.cores import cores_there
from benchmarks.harness.model import Absence, Bench, Case, CommandOutput, Gap, Results, Sample
from benchmarks.harness.peers import PeerMissing, PeerStore
from rlinf_async.config.registry import UsageError, nearest

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL = 400
"""characters of the end of a failed command's output that are shown"""
SKIPPED = 77
"""Exit code of a command that cannot run on this machine; the end of its output says why."""
CORES = "cores"
"""metric of a case on several cores: the work that they did beside each other, in cores"""
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
            return case.read(CommandOutput(stdout, out))
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
    """Return our environment without what would change a peer: paths into our own, thread counts.

    Temporary files go into ``scratch``, which is removed after the run.
    """
    dropped = {*_THREAD_VARIABLES, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    if case.threads is not None:
        kept |= dict.fromkeys(_THREAD_VARIABLES, str(case.threads))
    return kept | {"TMPDIR": scratch} | dict(case.environment)


@contextlib.contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Run what the block starts on ``cores`` cores (fewer where there are fewer)."""
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


Say = Callable[[str], None]


def measure(
    bench: Bench,
    here: pathlib.Path,
    *,
    store: PeerStore,
    with_peers: bool,
    repetitions: int,
    say: Say,
) -> Results:
    """All samples of a bench; a case that cannot run is a gap with its reason."""
    results = Results()
    pythons = _interpreters(bench, store, with_peers, results, say)
    for repetition in range(repetitions):
        for case in _rotated(bench.cases, repetition):
            if case.name in results.gaps:
                continue
            say(f"{case.name} ({repetition + 1} of {repetitions})")
            try:
                sample = _run(case, python=pythons[case.name], here=here, repetition=repetition)
            except CaseSkipped as skipped:
                results.drop(case.name, Gap(Absence.SKIPPED, str(skipped)))
            except CaseFailed as error:
                results.drop(case.name, Gap(Absence.FAILED, str(error)))
            else:
                results.add(case.name, sample)
    return results


def _run(case: Case, *, python: str, here: pathlib.Path, repetition: int) -> Sample:
    """`run_case`, and how many of its cores were there, before and after it."""
    before = cores_there(case.cores) if case.cores > 1 else None
    sample = run_case(case, python=python, here=here, repetition=repetition)
    after = None if before is None else cores_there(case.cores)
    return sample if before is None or after is None else {CORES: (before + after) / 2, **sample}


def _interpreters(
    bench: Bench, store: PeerStore, with_peers: bool, results: Results, say: Say
) -> dict[str, str]:
    """The interpreter of each case that can run; the others become gaps."""
    pythons = {}
    for case in bench.cases:
        found = _interpreter(case, store, with_peers, say)
        if isinstance(found, Gap):
            results.drop(case.name, found)
        else:
            pythons[case.name] = found
    return pythons


def _interpreter(case: Case, store: PeerStore, with_peers: bool, say: Say) -> str | Gap:
    absent = [name for name in case.requires if importlib.util.find_spec(name) is None]
    if absent:
        return Gap(Absence.MISSING, f"pip install {' '.join(absent)}")
    if case.peer is None:
        return sys.executable
    if not with_peers:
        return Gap(Absence.NOT_ASKED)
    if not store.is_made(case.peer):
        say(f"installing {case.peer.name}, once")
    try:
        return str(store.python(case.peer))
    except PeerMissing as error:
        return Gap(Absence.MISSING, str(error))


def _rotated(cases: Sequence[Case], by: int) -> list[Case]:
    """The cases in another order each time: none is always first."""
    shift = by % len(cases)
    return [*cases[shift:], *cases[:shift]]


BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]


def all_benches(folder: pathlib.Path = BENCHMARKS) -> list[Bench]:
    """Every bench, by name."""
    return [bench_named(name, folder) for name in _names(folder)]


def bench_named(name: str, folder: pathlib.Path = BENCHMARKS) -> Bench:
    """The bench of this name; `UsageError` lists those there are."""
    names = _names(folder)
    if name not in names:
        raise UsageError(
            f"there is no bench {name!r}{nearest(name, names)}; there are: {', '.join(names)}"
        )
    return _load(folder / name / "bench.py", name)


def folder_of(bench: Bench, folder: pathlib.Path = BENCHMARKS) -> pathlib.Path:
    """The folder that a bench's scripts lie in."""
    return folder / bench.name


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(found.parent.name for found in folder.glob("*/bench.py"))


def _load(file: pathlib.Path, name: str) -> Bench:
    spec = importlib.util.spec_from_file_location(f"benchmarks.{name}.bench", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bench = getattr(module, "BENCH", None)
    if not isinstance(bench, Bench) or bench.name != name:
        raise UsageError(f"{file}: must define BENCH = Bench(name={name!r}, ...)")
    return bench


_PACKAGES = ("rlinf-async", "anyio", "torch", "numpy", "msgspec", "uvloop", "gymnasium", "mujoco")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the versions with which a bench ran."""

    system: str
    cpu: str
    cores: int
    """cores that this process may use"""
    python: str
    versions: dict[str, str]
    load_average: tuple[float, float, float]
    """runnable processes over the last 1, 5 and 15 minutes, when the bench started"""


def this_machine() -> Machine:
    """Return what this machine is now."""
    return Machine(
        system=platform.platform(),
        cpu=_cpu(),
        cores=usable_cores(),
        python=platform.python_version(),
        versions=_versions(),
        load_average=os.getloadavg(),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
