"""Workers are forked from a process that has imported what takes seconds, and start in a moment.

::

    this process                             fork server                       a worker's process
    Fork.start --- modules, descriptors ---> imports those it does not have
                                             forks ------------------------->  environment, main
    its number, and later its exit code <--- waits for it <---------exit-----  module, worker

Importing torch and transformers takes four seconds of a core, a fork some hundredths of one. So a
host imports them once, not for each rank and each restart, and all workers share that memory.

A worker finds what it would find in a new interpreter: the environment, the folder and the main
module of this process as they are now. What libraries read of the environment when they are
imported is the same for all workers of a server: another environment gets another server. The
server has one thread, and uses no device. Workers that are given accelerators are not forked.

The server goes with the process that started it; if it is killed, its workers count as ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import (
    connection,
    forkserver,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any, Final

import msgspec

from rlinf_async.runtime.child import remove_unused_torch_cache

UNREAD: Final = frozenset({"PYTEST_CURRENT_TEST"})
"""variables that no import reads: with another value of them it is the same environment"""
WITHOUT_CUDA: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Of the server alone: a library that asks, when it is imported, whether there is a GPU does not
open it."""
LOST: Final = 256
"""exit code of a worker whose server is gone: no process ends with it"""
MESSAGE_BYTES: Final = 1 << 16
DESCRIPTORS: Final = 64
END_SECONDS: Final = 1.0
"""time that a server without workers has to end with this process"""


class ForkedProcess(SpawnProcess):
    """As multiprocessing's process that is spawned, but forked from a server of this process.

    Args:
        imports: modules that the server imports first. One that cannot be imported is left to the
            worker, who says why.
        environment: all variables of the process.
    """

    def __init__(
        self, *, imports: Sequence[str], environment: Mapping[str, str], **process: Any
    ) -> None:
        super().__init__(**process)
        self.imports = tuple(imports)
        self.environment = dict(environment)

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Fork(process_obj)


class _Fork(popen_forkserver.Popen):
    """A fork that was asked for: as multiprocessing's own, but for which server it comes from."""

    _fds: list[int]
    """what the process is handed, by `DupFd`"""

    def _launch(self, process_obj: ForkedProcess) -> None:
        told = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), told)
            reduction.dump(process_obj, told)
        finally:
            set_spawning_popen(None)
        environment = msgspec.msgpack.encode(process_obj.environment)
        told.seek(0)
        message = len(environment).to_bytes(4, "big") + environment + told.read()
        if not self._forked(process_obj, message) and not self._forked(process_obj, message):
            raise OSError("the process that forks workers was killed, and the next one, too")

    def _forked(self, process: ForkedProcess, message: bytes) -> bool:
        """Ask for the process; False where the server is killed before it has forked it."""
        self.sentinel, write_status = os.pipe()
        read_told, write_told = os.pipe()
        # The process sees by its end of this pipe that this one is gone.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, write_told))
        handed = (read_told, write_status, resource_tracker.getfd() or 0, *self._fds)
        try:
            server = _server_for(process.environment)
            server.fork(process.imports, handed)
        finally:
            _close(read_told, write_status)
        try:
            with open(write_told, "wb", closefd=False) as pipe:
                pipe.write(message)
            self.pid = forkserver.read_signed(self.sentinel)
        except (BrokenPipeError, EOFError):
            self.finalizer()
            server.see_killed()
            return False
        return True

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """As multiprocessing's own, but for what it says where the server is gone."""
        if self.returncode is None:
            if flag == os.WNOHANG and not connection.wait([self.sentinel], 0):
                return None
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except EOFError:
                self.returncode = LOST
        return self.returncode


class _Server:
    """The server of one environment, as this process sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _shared(environment)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.killed = False
        """whether it was found to be, though it may not be seen yet"""
        self._pid = os.getpid()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rlinf_async.runtime.fork_server import main; main({theirs.fileno()})"
        )
        flags: list[str] = getattr(util, "_args_from_interpreter_flags")()  # noqa: B009
        with theirs:
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *flags, "-c", program, "fork_server"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment, **WITHOUT_CUDA},
                start_new_session=True,  # a Ctrl-C is for this process
            )

    def fork(self, imports: Sequence[str], descriptors: Sequence[int]) -> None:
        """Ask for a process; it gets these descriptors."""
        # Where it was killed, nobody has the other ends of these: their reader sees it.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [msgspec.json.encode(imports)], descriptors)

    def see_killed(self) -> None:
        """Note that it was killed; raises `OSError` where it lives, and could not fork."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            limits = "too many open files or processes: see its message, `ulimit -n`, `ulimit -u`"
            raise OSError(f"no process could be forked: {limits}") from None
        self.killed = True

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether it lives, and forks processes of this environment."""
        return (
            self._pid == os.getpid()  # not that of the process which has forked this one
            and self.environment == _shared(environment)
            and not self.killed
            and self.lives
        )

    def close(self) -> None:
        """Let it end once its workers have."""
        self._control.close()

    def wait(self) -> None:
        """Wait some moments for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


_lock = threading.Lock()
_server: _Server | None = None
_closed: list[_Server] = []
"""servers of other environments, while they wait for their workers"""


def _server_for(environment: Mapping[str, str]) -> _Server:
    """The server of this environment; there is one at a time that takes requests."""
    global _server, _closed
    with _lock:
        _closed = [one for one in _closed if one.lives]
        if _server is None or not _server.serves(environment):
            if _server is not None:
                _server.close()
                _closed.append(_server)
            _server = _Server(environment)
        return _server


@atexit.register
def close_servers() -> None:
    """Let all servers end once their workers have; without workers they have ended then."""
    global _server
    with _lock:
        servers = _closed if _server is None else [*_closed, _server]
        _server = None
    for one in servers:
        one.close()
    for one in servers:
        one.wait()


def _close(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)


def pids() -> set[int]:
    """The servers of this process."""
    return {one.pid for one in (*_closed, _server) if one is not None and one.lives}


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in UNREAD}


# ---- in the server


def main(control: int) -> None:
    """Fork processes until the one that started this is gone."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("fork_server", encoding="utf-8")
    _Forks(socket.socket(fileno=control)).serve()
    os._exit(0)  # libraries have nothing to take down: what they do is done in other processes


class _Forks:
    """The processes that this one has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._running: dict[int, tuple[int, int]] = {}
        """by a file that is readable once it has ended: its number, and the pipe for that"""

    def serve(self) -> None:
        listening = True
        while listening or self._running:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._ended(descriptor)
                elif not self._fork():
                    listening = False
                    self._poll.unregister(self._control)

    def _fork(self) -> bool:
        """Fork a process, as asked; False where nobody asks any more."""
        asked, given, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, DESCRIPTORS)
        if not asked:
            return False
        _import(msgspec.json.decode(asked, type=tuple[str, ...]))
        try:
            self._start(given)
        except (OSError, ValueError) as error:  # there is no room for its files, or for a process
            print(f"no process could be forked: {error}", file=sys.stderr, flush=True)
            for descriptor in given:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return True

    def _start(self, given: Sequence[int]) -> None:
        told, status, *handed = given
        child = os.fork()
        if not child:
            os.close(status)  # open here alone: it closes with this process
            self._become(told, handed)
        try:
            watched = os.pidfd_open(child)
        except OSError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        for descriptor in (told, *handed):
            os.close(descriptor)
        _write(status, child)
        self._running[watched] = child, status
        self._poll.register(watched, select.POLLIN)

    def _ended(self, watched: int) -> None:
        """Kill what the process has left behind, and say how it has ended."""
        child, status = self._running.pop(watched)
        self._poll.unregister(watched)
        os.close(watched)
        with contextlib.suppress(ProcessLookupError):  # its number is its group's until `waitpid`
            os.killpg(child, signal.SIGKILL)
        _write(status, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.close(status)

    def _become(self, told: int, handed: Sequence[int]) -> None:
        """Be the process that was asked for, and end with it."""
        code = 1
        try:
            self._control.close()
            for watched, (_, status) in self._running.items():
                os.close(watched)
                os.close(status)
            code = _run(told, handed)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)


def _run(told: int, handed: Sequence[int]) -> int:
    """What a spawned process does with what it is told."""
    size = int.from_bytes(_read(told, 4), "big")
    environment = msgspec.msgpack.decode(_read(told, size), type=dict[str, str])
    os.environ.clear()
    os.environ.update(environment)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # as Python's own, which does this itself
    if torch is not None:
        torch.default_generator.seed()
    tracker: Any = getattr(resource_tracker, "_resource_tracker")  # noqa: B009
    tracker._fd, *descriptors = handed
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009
    server._inherited_fds = descriptors
    begin: Any = getattr(spawn, "_main")  # noqa: B009
    code: int = begin(told, os.dup(told))
    return code


def _import(modules: Sequence[str]) -> None:
    """Import these, without a word: who needs one that cannot be imported will say so."""
    missing = [name for name in modules if name not in sys.modules]
    if not missing:
        return
    with _silent():
        for name in missing:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
    remove_unused_torch_cache(Path(tempfile.gettempdir()))
    gc.collect()
    gc.freeze()  # the collector would write to the memory that is shared


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing is printed: this process has no name, under which it could be read."""
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, real in zip((1, 2), kept, strict=True):
            os.dup2(real, stream)
            os.close(real)


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            raise EOFError("the process that asked for this one is gone")
        parts += part
    return bytes(parts)


def _write(descriptor: int, number: int) -> None:
    """Say a number to the process that asked, if it is there; it reads it by `read_signed`."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, forkserver.SIGNED_STRUCT.pack(number))
