"""Workers as OS processes of this host, each with an event loop of its own.

::

    this process                                      a worker's process (child.py)
    queues of all channels                            ends of channels
    unix socket, owner only  <---- one connection --->  proves the cluster's secret
    OutputLog: file, stderr  <---- pipe ---------------  what it prints, line by line
    pidfd of the process     ---- death --------------x
                                                      watches this process, and goes with it

The socket lives in a folder of the run's own, which is removed at the end; if this process is
killed, its workers see it, remove the folder and go.

A worker's process leads a session of its own: the terminal's Ctrl-C is for the process that started
it, and what the worker starts (simulators, loaders) is ended with it. What a worker starts in yet
another session is its own to end.

What a worker prints last, before it is killed or crashes, is still in the pipe and is not lost. The
pipe holds 1 MiB: a worker that prints more while this process stands still waits for it. Before a
process has the pipe it imports the main module: what it prints until then, also an error of that
import, goes to the standard error of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

from rlinf_async.deadlines import Timer
from rlinf_async.processes import how_it_ended
from rlinf_async.runtime import forked
from rlinf_async.runtime.child import Boot, child_main
from rlinf_async.runtime.forked import (
    LOST,
    ForkedProcess,
    NotForked,
    OtherPython,
    SpawnedProcess,
)
from rlinf_async.runtime.interpreters import what_is_wrong
from rlinf_async.runtime.launching import device_environment, host_devices
from rlinf_async.runtime.remote_worker import (
    CONNECT_SECONDS,
    LISTEN_VARIABLE,
    RemoteBackend,
    RemoteWorker,
    shared_secret,
)
from rlinf_async.runtime.signals import OF_THE_DRIVER, kill_tree
from rlinf_async.runtime.supervise import ProcessEnd, WorkerProcess, WorkerSpec, on_this_host
from rlinf_async.workers.base import BuildError, Device, Worker

log = logging.getLogger(__name__)

PIPE_BYTES: Final = 1 << 20
"""size of the pipe for a worker's output, and of what is still read once the worker has ended"""
LONGEST_LINE: Final = 1 << 16
"""bytes; what is longer is cut into several lines"""
OPENED: Final = b"\0"
"""first byte in the pipe: the worker's process prints there from now on"""
LINES_AT_ONCE: Final = 50_000
"""lines that a worker may print before it is limited"""
LINES_PER_SECOND: Final = 200
"""lines of a worker that are written, in the long run"""
LAST_LINES: Final = 200
"""last lines of those left out that are kept, and written when the worker ends"""


class LineLimit:
    """Limits the lines of one worker, so that a flood fills neither disk nor terminal.

    Lines are left out until a second's worth may be written again; then it is said how many.
    """

    def __init__(self) -> None:
        self._room = float(LINES_AT_ONCE)
        self._looked = 0.0
        self._left_out = 0
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def allowed(self, lines: Sequence[str], now: float) -> list[str]:
        """Return the lines that may be written now.

        Args:
            now: seconds, by any clock that does not go back.
        """
        self._room += (now - self._looked) * LINES_PER_SECOND
        self._room, self._looked = min(self._room, LINES_AT_ONCE), now
        written: list[str] = []
        if self._left_out and self._room >= LINES_PER_SECOND:
            written += self._note(self._left_out)
            self._left_out = 0
            self._last.clear()
        count = 0 if self._left_out else min(len(lines), int(self._room))
        self._room -= count
        self._left_out += len(lines) - count
        self._last.extend(lines[count:])
        return [*written, *lines[:count]]

    def rest(self) -> list[str]:
        """The last of the lines that were left out, once no more come."""
        lines = [*self._note(self._left_out - len(self._last)), *self._last]
        self._left_out = 0
        self._last.clear()
        return lines

    @staticmethod
    def _note(count: int) -> list[str]:
        limit = f"more than {LINES_PER_SECOND} a second"
        return [f"... {count} lines are left out: {limit} ..."] if count > 0 else []


class OutputLog:
    """Takes the lines of all workers of a cluster.

    Args:
        path: a file to append to, with the time of day; None for standard error.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._broken = False
        self._limits: dict[str, LineLimit] = {}
        """limits by worker"""

    @property
    def place(self) -> str:
        """Place of the lines, for a message."""
        return "on stderr" if self.path is None else f"in {self.path}"

    def write(self, worker: str, lines: list[str]) -> None:
        """Take lines of one worker. A disk that is full does not end the run."""
        limit = self._limits.setdefault(worker, LineLimit())
        self._write(worker, limit.allowed(lines, time.monotonic()))

    def end(self, worker: str) -> None:
        """Take note that a worker has printed its last line."""
        limit = self._limits.pop(worker, None)
        if limit is not None:
            self._write(worker, limit.rest())

    def close(self) -> None:
        """Take note that no worker prints any more."""
        for worker in list(self._limits):
            self.end(worker)

    def _write(self, worker: str, lines: list[str]) -> None:
        if not lines:
            return
        try:
            if self.path is None:
                sys.stderr.write("".join(f"{worker}: {line}\n" for line in lines))
                sys.stderr.flush()
            else:
                now = time.strftime("%H:%M:%S")
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{now} {worker}: {line}\n" for line in lines))
        except (OSError, ValueError) as error:  # ValueError: stderr is closed
            if not self._broken:
                log.warning("the output of workers cannot be written %s: %s", self.place, error)
            self._broken = True


class OutputPipe:
    """The pipe from one worker's process. Where a process is given it, it prints there."""

    def __init__(self, log: OutputLog, worker: str) -> None:
        self._log, self._worker = log, worker
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        with suppress(OSError, AttributeError):  # where it may not be so large, it is smaller
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.opened = False
        """whether the process has begun to print here; before, its output goes to stderr"""
        self._line = b""
        """the beginning of a line whose end has not come"""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    def __reduce__(self) -> tuple[Callable[[Any], None], tuple[Any]]:
        """Pickle as a function that, in the process that is started, prints into the pipe from the
        moment it is unpickled."""
        return _print_into, (DupFd(self._write_end),)

    def started(self) -> None:
        """Let go of the end that the process has now."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self) -> None:
        """Write what the process has printed, and close the pipe."""
        self.started()
        left = PIPE_BYTES  # and no more: what the process has started may still print
        while self._read_end >= 0 and left > 0 and (count := self._read()):
            left -= count
        self._end()

    def _read(self) -> int:
        """Take what is there, and return how many bytes it was."""
        try:
            data = os.read(self._read_end, LONGEST_LINE)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        count = len(data)
        if not self.opened:
            self.opened = True
            data = data.removeprefix(OPENED)
        *whole, self._line = (self._line + data).split(b"\n")
        if len(self._line) > LONGEST_LINE:
            whole.append(self._line)
            self._line = b""
        if whole:
            self._log.write(self._worker, [_text(line) for line in whole])
        return count

    def _end(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        if self._line:
            self._log.write(self._worker, [_text(self._line)])
            self._line = b""
        self._log.end(self._worker)


def _print_into(end: Any) -> None:
    """Let this process print into the pipe with this end."""
    descriptor = end.detach()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # None or closed, where the user wants no output
            stream.flush()
    os.write(descriptor, OPENED)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    with suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Before it is killed because it has not connected, it prints in which import it is.
    faulthandler.dump_traceback_later(0.9 * CONNECT_SECONDS, file=2)


def _text(line: bytes) -> str:
    """A line as a terminal would leave it: a carriage return begins it again."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


_spawn_lock = threading.Lock()


async def spawn_whole(boot: Boot, output: OutputPipe) -> SpawnProcess:
    """Start the process in a thread. If this is cancelled meanwhile, no process is left."""
    spawning = asyncio.create_task(asyncio.to_thread(_spawn, boot, output))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        while not spawning.done():  # cancelled once more, it still waits: nobody else would
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([spawning])
        if spawning.exception() is None:
            kill_tree(spawning.result())
            spawning.result().join()
            spawning.result().close()
        raise


def open_death(process: SpawnProcess) -> int:
    """A file that becomes readable when the process has ended; the caller closes it.

    Multiprocessing's own sentinel is a pipe, which what a spawned process has forked holds open;
    of a forked one, its server alone has the other end.
    """
    if isinstance(process, ForkedProcess):
        return os.dup(process.sentinel)
    if hasattr(os, "pidfd_open") and process.pid is not None:
        return os.pidfd_open(process.pid)
    return os.dup(process.sentinel)


def is_being_started() -> bool:
    """Whether this process is a child that still imports its main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _spawn(boot: Boot, output: OutputPipe) -> SpawnProcess:
    """Start the process; forked, where modules that it imports take seconds."""
    with _spawn_lock, _signals_blocked():
        resource_tracker.ensure_running()  # by itself first: it unblocks signals in the end
    process: dict[str, Any] = {
        "target": child_main, "args": (output, boot), "name": boot.life, "daemon": False,
    }  # fmt: skip
    extra = device_environment(boot.spec.info.devices) | boot.spec.env_vars
    python = boot.spec.runtime_env.get("py_executable")
    imports = (
        _slow_imports(boot.spec)
        if python is None and may_be_forked(*(one.kind for one in boot.spec.info.devices))
        else ()
    )
    if imports:
        with _spawn_lock:  # while another is spawned, `os.environ` is its own
            environment = dict(os.environ) | extra
        try:
            return _started(ForkedProcess(imports=imports, environment=environment, **process))
        except NotForked as why:
            log.warning("%s is not forked, and so starts more slowly: %s", boot.life, why)
    # Its environment is set here, because its modules are imported first of all.
    with _spawn_lock, _environment(extra):
        if python is not None:
            return _started(OtherPython(python=python, **process))
        return _started(SpawnedProcess(**process))


def _started(process: SpawnProcess) -> SpawnProcess:
    try:
        with _signals_blocked():
            process.start()
    except (OSError, NotForked):
        raise
    except Exception as error:  # pickle raises what the arguments' own methods raise
        raise cannot_be_sent(process.name, error) from error
    return process


def may_be_forked(*devices: str) -> bool:
    """Whether a worker on these devices may be a fork of the fork server; else it begins with a new
    interpreter. CUDA does not survive a fork, and the end of a fork, which is no child of this
    process, can be seen only with a pidfd."""
    if sys.platform != "linux" or any(kind != "cpu" for kind in devices):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or one that forbids it
        return False
    return True


def _slow_imports(spec: WorkerSpec) -> Sequence[str]:
    """Modules that this worker says it takes seconds to import."""
    signature = inspect.signature(spec.cls)
    bound = signature.bind(*spec.args, **spec.kwargs)
    bound.apply_defaults()
    return spec.cls.slow_imports(bound.arguments)


def check_importable(cls: type[Any]) -> None:
    """Raise `BuildError` for a class that no other process can import."""
    if cls.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise BuildError(
            f"{cls.__name__} is defined in a notebook or an interactive session, which a worker's "
            "process cannot import: write the class to a file beside it, and import it from there"
        )


def cannot_be_sent(life: str, error: Exception) -> BuildError:
    """The error for a worker that cannot be pickled."""
    return BuildError(
        f"{life}: the worker class or its arguments cannot be sent to another process "
        f"({error}): define the class at the top level of an importable module, and pass "
        "plain data"
    )


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """The child inherits the signals of this process as blocked, until it ignores them: before it
    leads a session of its own, what is sent to this process's group reaches it, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_DRIVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


MAIN_GUARD = (
    "a script must start its cluster under 'if __name__ == \"__main__\":', because its workers "
    "import it"
)
CROWDED: Final = 4
"""worker processes per core, above which a warning is logged"""


class ChildProcess(WorkerProcess):
    """The process of one rank, a child of this one."""

    exit_seconds = 1.0

    def __init__(self, process: SpawnProcess, output: OutputPipe, output_place: str) -> None:
        self.host = socket.gethostname()
        self.pid = process.pid or 0
        self._process = process
        self._output = output
        self._output_place = output_place
        self._silence: Timer | None = None
        """what ends its server, if that does not tell of its end"""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ProcessEnd] = self._loop.create_future()
        self._death_file = open_death(process)
        self._loop.add_reader(self._death_file, self._on_exit)

    def kill(self) -> None:
        """Kill the process, and the processes of the group that it leads."""
        kill_tree(self._process)
        if isinstance(self._process, ForkedProcess) and self._silence is None:
            self._silence = Timer(forked.ANSWER_SECONDS, self._process.kill_server)

    def _on_exit(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._loop.remove_reader(self._death_file)
        os.close(self._death_file)
        if not isinstance(self._process, ForkedProcess) or self._process.exitcode == LOST:
            kill_tree(self._process)  # what it started and left behind; else its server has
        self._process.join()
        self._output.close()
        code = self._process.exitcode or 0
        self._process.close()
        if code == LOST:
            how = "the process from which it was forked was killed, and it was killed, too"
        else:
            how = how_it_ended(code)
        self.ended.set_result(ProcessEnd(how, self._hint(code)))

    def _hint(self, code: int) -> str:
        """Where to look if the process never connected."""
        if code < 0:
            return " (was memory used up? the kernel's log says so)"
        if self._output.opened:
            return f"; its error is {self._output_place}"
        # It ended while it imported the main module.
        return f"; its error is on the stderr of this process ({MAIN_GUARD})"


class ProcessBackend(RemoteBackend):
    """Starts a process of this host for each rank."""

    def __init__(
        self, *, heartbeat_limit: float, listen: str | None = None, log: Path | None = None
    ) -> None:
        listen = listen or os.environ.get(LISTEN_VARIABLE)
        secret = None if listen is None else shared_secret()
        super().__init__(heartbeat_limit, listen, secret)
        self._output = OutputLog(log)
        self._warned_of_load = False

    def devices(self) -> Sequence[Device]:
        return host_devices()

    async def open(self) -> None:
        if is_being_started():
            raise BuildError(f"this is the process of a worker that is being started: {MAIN_GUARD}")
        await super().open()

    def check_class(self, cls: type[Worker]) -> None:
        check_importable(cls)

    async def place(self, ranks: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        check_importable(ranks[0].cls)
        here = on_this_host(ranks, self.listeners.socket.parent, processes=True)
        first = ranks[0]
        if python := first.runtime_env.get("py_executable"):
            wrong = await asyncio.to_thread(what_is_wrong, python, first.env_vars)
            if wrong:
                raise BuildError(f"{first.info.group}: py_executable = {python!r}: {wrong}")
        return here

    async def start(self, spec: WorkerSpec) -> RemoteWorker:
        return await self.start_by(spec, self._spawn)

    async def _spawn(self, boot: Boot) -> ChildProcess:
        output = OutputPipe(self._output, boot.spec.info.name)
        try:
            process = await spawn_whole(boot, output)
        except BaseException:
            output.close()
            raise
        output.started()
        return ChildProcess(process, output, self._output.place)

    def check_load(self, workers: int) -> None:
        cores = len(os.sched_getaffinity(0))
        if workers > CROWDED * cores and not self._warned_of_load:
            self._warned_of_load = True
            log.warning(
                "%d worker processes share %d cores: each is slow, also to answer heartbeats; "
                "start fewer workers, or pass a longer heartbeat_limit",
                workers,
                cores,
            )
