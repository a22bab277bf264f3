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
imported is the same for all workers of a server: another environment has another server. Workers
that are given accelerators are not forked, nor are those whose imports start threads.

The servers go with the process that started them, and so do their workers, by force where they do
not end by themselves. If a server is killed, its workers count as ended.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import (
    connection,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any, Final

import msgspec

from rlinf_async.config.registry import FOLDER, NAMES
from rlinf_async.runtime.fork_server import ASK_ANOTHER, HAS_THREADS
from rlinf_async.runtime.interpreters import is_of_this_python, setting_path
from rlinf_async.runtime.wakers import mark_internal

log = logging.getLogger(__name__)

UNREAD: Final = frozenset({"PYTEST_CURRENT_TEST", FOLDER, NAMES})
"""variables that no import reads: environments that differ in them alone share a server"""
WITHOUT_CUDA: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""variables of the server alone: a library that looks for a GPU when it is imported does not open
it"""
LOST: Final = 256
"""exit code of a worker whose server is gone: no process ends with it"""
SERVERS: Final = 4
"""environments whose servers are kept: each has some hundred MB"""
ANSWER_SECONDS: Final = 120.0
"""time that a server has for its imports and a fork, to tell of an end, and that a new process has
to read what it is told"""
END_SECONDS: Final = 1.0
"""time that a server without workers has to end with this process"""


class NotForked(Exception):
    """The process has to begin with a new interpreter, and why."""


class _AskAnother(Exception):
    """The server forks no more processes: ask another one."""


class ForkedProcess(SpawnProcess):
    """A process like that of multiprocessing's ``spawn``, but forked from a server of this process.

    Args:
        imports: modules that the server imports first. One that cannot be imported is left to the
            worker, who says why.
        environment: all variables of the process.

    `start` raises `NotForked` where its imports start threads or end the server, or the server does
    not answer, and `OSError` where there is no room for it.
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

    def kill_server(self) -> None:
        """Kill the server that does not say that this process has ended; it has, then."""
        popen: Any = getattr(self, "_popen")  # noqa: B009
        popen.server.kill()


class SpawnedProcess(SpawnProcess):
    """A process of multiprocessing's ``spawn`` that is told in a limited time what to do."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return Spawn(process_obj)


class Spawn(popen_spawn_posix.Popen):
    """A new interpreter. As multiprocessing's own, which waits for ever where the process ends
    before it has read all, for it holds the other end of the pipe open itself."""

    _fds: list[int]
    """what the process is handed, by `DupFd`"""

    def _launch(self, process_obj: SpawnProcess) -> None:
        message = _pickled(self, process_obj, self.preparation(process_obj.name))
        tracker = resource_tracker.getfd() or 0
        self.sentinel, held = os.pipe()
        read_told, write_told = os.pipe()
        # The process sees by its end of this pipe that this one is gone.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, write_told))
        command = self.command(process_obj, tracker, read_told)
        handed = [tracker, read_told, held, *self._fds]
        try:
            self.pid = util.spawnv_passfds(os.fsencode(command[0]), command, handed)
        finally:
            _close(read_told, held)
        _tell(self, process_obj.name, write_told, message)

    def preparation(self, name: str) -> dict[str, Any]:
        """What the process sets up before it reads its worker."""
        return spawn.get_preparation_data(name)

    def command(self, process_obj: SpawnProcess, tracker: int, pipe: int) -> list[str]:
        """The interpreter and its arguments.

        Args:
            process_obj: the process.
            tracker: file of multiprocessing's resource tracker.
            pipe: file from which it reads what to do.
        """
        return spawn.get_command_line(tracker_fd=tracker, pipe_handle=pipe)


class OtherPython(SpawnProcess):
    """A process like that of multiprocessing's ``spawn``, of another interpreter.

    Args:
        python: the interpreter's path.
    """

    def __init__(self, *, python: str, **process: Any) -> None:
        super().__init__(**process)
        self.python = python

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Started(process_obj)


class _Started(Spawn):
    """A new interpreter: another one, with its own path."""

    def preparation(self, name: str) -> dict[str, Any]:
        """What the process sets up: the path is its own, and so are programs that stand beside
        this process's Python."""
        found = super().preparation(name)
        del found["sys_path"]
        script = found.get("init_main_from_path")
        if script is not None and is_of_this_python(script):
            del found["init_main_from_path"]
        return found

    def command(self, process_obj: SpawnProcess, tracker: int, pipe: int) -> list[str]:
        assert isinstance(process_obj, OtherPython)
        program = (
            f"{setting_path()}from multiprocessing.spawn import spawn_main; "
            f"spawn_main(tracker_fd={tracker}, pipe_handle={pipe})"
        )
        flags: list[str] = getattr(util, "_args_from_interpreter_flags")()  # noqa: B009
        python = shutil.which(process_obj.python) or process_obj.python  # as subprocess finds it
        return [python, *flags, "-c", program, "--multiprocessing-fork"]


class _Fork(popen_forkserver.Popen):
    """A fork that was asked for: as multiprocessing's own, but for which server it comes from."""

    _fds: list[int]
    """what the process is handed, by `DupFd`"""

    def _launch(self, process_obj: ForkedProcess) -> None:
        self._reading = threading.Lock()
        imports = process_obj.imports
        environment = msgspec.msgpack.encode(process_obj.environment)
        message = len(environment).to_bytes(4, "big") + environment
        message += _pickled(self, process_obj, spawn.get_preparation_data(process_obj.name))
        for _ in range(2):
            if (why := _not_forked.get(imports)) is not None:
                raise NotForked(why)
            if self._forked(process_obj, message):
                return
        why = _not_forked[imports] = (
            f"a process that imported {', '.join(imports)} was killed before it could fork, and "
            "the next one, too (was memory used up? the kernel's log says so)"
        )
        raise NotForked(why)

    def _forked(self, process: ForkedProcess, message: bytes) -> bool:
        """Ask for the process; False where another server has to be asked: this one was killed
        before it had forked it, or has threads by the import of others."""
        self.sentinel, write_status = os.pipe()
        read_told, write_told = os.pipe()
        # The process sees by its end of this pipe that this one is gone.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, write_told))
        handed = (read_told, write_status, resource_tracker.getfd() or 0, *self._fds)
        try:
            server = _server_for(process.environment)
            while not server.fork(process.imports, handed):  # it was let go meanwhile
                server = _server_for(process.environment)
        finally:
            _close(read_told, write_status)
        try:
            self.pid = server.answer(self.sentinel, process.imports)
        except EOFError:
            self.finalizer()
            server.see_killed()
            return False
        except _AskAnother:
            self.finalizer()
            return False
        except BaseException:
            self.finalizer()
            raise
        self.server = server
        _tell(self, process.name, write_told, message)
        return True

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs; `LOST` where the server is gone."""
        if self.returncode is not None:
            return self.returncode
        if not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            return None
        # Any thread that starts a process looks for those that have ended, beside who waits for it.
        with self._reading:
            if self.returncode is None:
                try:
                    self.returncode = forkserver.read_signed(self.sentinel)
                except EOFError:
                    self.returncode = LOST
        return self.returncode


def _pickled(popen: Any, process: SpawnProcess, preparation: dict[str, Any]) -> bytes:
    """What a process is told by multiprocessing: about its main module, and what to run."""
    told = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, told)
        reduction.dump(process, told)
    finally:
        set_spawning_popen(None)
    return told.getvalue()


def _tell(popen: Any, name: str, pipe: int, message: bytes) -> None:
    """Tell a process what to do; kill it where it does not read that in time.

    One that has ended does not read it either, and says by its exit code how it has ended.
    """

    def kill() -> None:
        log.warning(
            "%s has not read what it is to do within %g s, and is killed: its process %d is "
            "stopped, or the import of the main module does not come to its end",
            *(name, ANSWER_SECONDS, popen.pid),
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(popen.pid, signal.SIGKILL)

    timer = threading.Timer(ANSWER_SECONDS, kill)
    mark_internal(timer)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb", closefd=False) as file:
            file.write(message)
    finally:
        timer.cancel()


class _Server:
    """The server of one environment, as this process sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _shared(environment)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.closed = False
        """whether it takes no more requests: it is told to end, or was killed"""
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
        # Somebody has to wait for it, or it stays as a zombie once it has ended.
        waiting = threading.Thread(target=self._process.wait, name="fork_server", daemon=True)
        mark_internal(waiting)
        waiting.start()

    def fork(self, imports: Sequence[str], descriptors: Sequence[int]) -> bool:
        """Ask for a process, which gets these descriptors; False where it is closed."""
        # Where it was killed, nobody has the other ends of these: their reader sees it.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self.closed:
                return False
            socket.send_fds(self._control, [msgspec.json.encode(imports)], descriptors)
        return True

    def answer(self, status: int, imports: tuple[str, ...]) -> int:
        """The number of the process that was asked for.

        Raises:
            EOFError: it was killed, or could not fork.
            _AskAnother: it has threads, but not by these imports. It is let go.
            NotForked: it does not answer, or has threads, which would hold for ever in the fork
                what they hold. It is let go.
        """
        if not connection.wait([status], ANSWER_SECONDS):
            self.close()
            raise NotForked(
                f"the process {self.pid}, which imports {', '.join(imports)}, has not answered for "
                f"{ANSWER_SECONDS:g} s (`kill -CONT {self.pid}` lets it go on if it is stopped)"
            )
        pid: int = forkserver.read_signed(status)
        if pid == HAS_THREADS:
            self.close()
            why = _not_forked[imports] = f"the import of {', '.join(imports)} starts threads"
            raise NotForked(why)
        if pid == ASK_ANOTHER:
            self.close()
            raise _AskAnother
        return pid

    def see_killed(self) -> None:
        """Note that it was killed; raises `OSError` where it lives, and could not fork."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            limits = "too many open files or processes: see its message, `ulimit -n`, `ulimit -u`"
            raise OSError(f"no process could be forked: {limits}") from None
        self.close()

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the server's process has not ended."""
        return self._process.poll() is None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether the server lives, and forks processes of this environment."""
        return self.environment == _shared(environment) and not self.closed and self.lives

    def close(self) -> None:
        """Let it end once its workers have."""
        with self._lock:
            self.closed = True
            self._control.close()

    def kill(self) -> None:
        """Kill the server; its workers count as ended."""
        self._process.kill()

    def forget(self) -> None:
        """Close the server's socket here: it serves the process that forked this one."""
        self._control.close()

    def wait(self) -> None:
        """Wait some moments for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


_lock = threading.Lock()
_servers: list[_Server] = []
"""servers of this process, in the order in which they were last asked"""
_not_forked: dict[tuple[str, ...], str] = {}
"""imports with which no process can be forked, and why"""


def _server_for(environment: Mapping[str, str]) -> _Server:
    """Return the server of this environment. Of those that serve, the one that was asked longest
    ago is closed once they are more than `SERVERS`."""
    with _lock:
        for one in [one for one in _servers if not one.lives]:
            one.close()
            _servers.remove(one)
        found = next((one for one in _servers if one.serves(environment)), None)
        if found is None:
            found = _Server(environment)
        else:
            _servers.remove(found)
        _servers.append(found)
        for one in [one for one in _servers if not one.closed][:-SERVERS]:
            one.close()
        return found


def close_servers() -> list[_Server]:
    """Let all servers end once their workers have; without workers they have ended then. Returns
    those that live."""
    with _lock:
        servers = list(_servers)
    for one in servers:
        one.close()
    for one in servers:
        one.wait()
    return [one for one in servers if one.lives]


@atexit.register
def _end_servers() -> None:
    """Leave no server: one may be in an import that does not end."""
    for one in close_servers():
        one.kill()


def _in_forked_child() -> None:
    """The servers are those of the process that has forked this one, and so are its threads."""
    global _lock
    _lock = threading.Lock()
    for one in _servers:
        one.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_in_forked_child)


def _close(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)


def pids() -> set[int]:
    """The servers of this process."""
    return {one.pid for one in tuple(_servers) if one.lives}


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in UNREAD}
