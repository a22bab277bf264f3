"""A Python that has imported already what takes seconds: tests fork their processes from it.

::

    a test, or who runs `command`          the server             a process
    arguments, environment, descriptors -> forks ---------------> runs a script or module
    its number, and later its exit code <- waits for it <-------- ends

It is the process of a new interpreter in all but three things: its parent is the server,
``/proc/PID/cmdline`` and ``environ`` are the server's, and modules are there before they are
imported. So what an import does is not tested by it. Once who asks is gone, so is the process, and
once the server is: nobody else would see its end. The server goes with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlinf_async.processes import end_with_parent

ROOT = Path(__file__).parents[1]
MESSAGE_BYTES = 1 << 20

# Runs in an interpreter without `site`: it is there in some hundredths of a second.
SHIM = """
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
asked.connect(sys.argv[1])
leads = "group" if os.getpgrp() == os.getpid() else ""
told = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd(), leads]).encode()
socket.send_fds(asked, [told], [0, 1, 2])
asked.recv(4)
for one in range(3):
    os.close(one)
code = int.from_bytes(asked.recv(4) or b"\\1", "little", signed=True)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Preloaded:
    """A server of processes that find these modules imported. None of them may start a thread."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._at = folder / "preloaded"
        (folder / "preloaded.py").write_text(SHIM)
        self.command = shlex.join(
            [sys.executable, "-I", "-S", str(folder / "preloaded.py"), str(self._at)]
        )
        """to be followed by a script's path, or ``-m`` and a module, and arguments"""
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._at), *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"listening\n"
        self.pid = self._server.pid

    def start(
        self, *words: str, environment: Mapping[str, str], output: IO[Any], session: bool = False
    ) -> Preforked:
        """A process that runs ``python *words`` in this folder, as the leader of a session if
        asked; it reads nothing."""
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        asked.connect(str(self._at))
        leads = "session" if session else ""
        told = json.dumps([words, dict(environment), os.getcwd(), leads]).encode()
        with open(os.devnull) as nothing:
            given = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(asked, [told], given)
        return Preforked(asked)

    def close(self) -> None:
        """End the server, and what is left of its processes."""
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()


class Preforked:
    """A process of the server, for who has asked for it: as `subprocess.Popen`."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self.pid = int.from_bytes(asked.recv(4), "little")
        assert self.pid, "nothing was forked: the server's message says why"
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._ended(0)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        code = self._ended(None if seconds is None else 1000 * seconds)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds or 0.0)
        return code

    def send_signal(self, which: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, milliseconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._asked, select.POLLIN)
            if not poll.poll(milliseconds):
                return None
            answer = self._asked.recv(4)
            assert answer, "the server was killed"
            self.returncode = int.from_bytes(answer, "little", signed=True)
            self._asked.close()
        return self.returncode


class _Server:
    """What the server waits for: requests, the ends of who asked, of processes, and its own."""

    def __init__(self, path: str) -> None:
        self._path = sys.path[1:]
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._path = [one for one in self._path if one not in given]
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MESSAGE_BYTES)
        self._listening.bind(path)
        self._listening.listen(64)
        # A process that the one which started this has forked may hold the other end of 0 open.
        self._ends = (0, os.pidfd_open(os.getppid()))
        """files that are readable once the server is to end"""
        self._poll = select.poll()
        for descriptor in (*self._ends, self._listening.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._asked: dict[int, socket.socket] = {}
        """connections of who waits for a process, by their descriptors"""
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """by the file that is readable once a process has ended: its number, who waits for it"""

    def words(self) -> list[str]:
        """Fork processes. Returns in each of them with what it is to run; the server's own end is
        here."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor in self._running:
                    self._ended(descriptor)
                elif descriptor == self._listening.fileno():
                    connection = self._listening.accept()[0]
                    self._asked[connection.fileno()] = connection
                    self._poll.register(connection, select.POLLIN)
                elif descriptor in self._ends:
                    for pid, _ in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif descriptor in self._asked:
                    words = self._fork(self._asked[descriptor])
                    if words is not None:
                        return words

    def _fork(self, asked: socket.socket) -> list[str] | None:
        """Fork what is asked for; where nothing is, who asked is gone, and so is its process."""
        message, given = b"", list[int]()
        with contextlib.suppress(ConnectionError):  # gone before it read what it was told
            message, given, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 3)
        if not message:
            self._poll.unregister(asked)
            del self._asked[asked.fileno()]
            asked.close()
            for pid, waits in self._running.values():
                if waits is asked:
                    os.kill(pid, signal.SIGKILL)
            return None
        assert threading.active_count() == 1 == len(os.listdir("/proc/self/task"))
        server = os.getpid()
        child = os.fork()
        if not child:
            end_with_parent(server)
            return self._become(message, given)
        for descriptor in given:
            os.close(descriptor)
        watched = os.pidfd_open(child)
        self._running[watched] = child, asked
        self._poll.register(watched, select.POLLIN)
        with contextlib.suppress(OSError):  # who asked is gone, which the next look at it shows
            asked.send(child.to_bytes(4, "little"))
        return None

    def _ended(self, watched: int) -> None:
        pid, asked = self._running.pop(watched)
        self._poll.unregister(watched)
        os.close(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # who asked is gone
            asked.send(code.to_bytes(4, "little", signed=True))

    def _become(self, message: bytes, given: Sequence[int]) -> list[str]:
        for descriptor in (self._ends[1], *self._running):
            os.close(descriptor)
        for connection in (self._listening, *self._asked.values()):
            connection.close()
        for place, descriptor in enumerate(given):
            os.dup2(descriptor, place)
            os.close(descriptor)
        words: list[str]
        words, environment, folder, leads = json.loads(message)
        if leads == "session":
            os.setsid()
        elif leads == "group":  # as who asked: Ray kills what is left of an actor's group
            os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        first = folder if words[0] == "-m" else os.path.dirname(words[0])
        more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [first, *(one for one in more if one), *self._path]
        return words


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # it would look again and again at what stays
    for name in modules:
        with contextlib.suppress(ImportError):  # who needs it will say so
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # the collector would write to the memory that is shared


def _as_new() -> None:
    """What a new interpreter does not share with others."""
    atexit.register(gc.unfreeze)  # a library in C++ reports what is left of it at the end
    tempfile.tempdir = None
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[Preloaded]:
    """A server for a while."""
    with tempfile.TemporaryDirectory(prefix="preloaded") as folder:
        server = Preloaded(Path(folder), *modules)
        try:
            yield server
        finally:
            server.close()


if __name__ == "__main__":
    _import(sys.argv[2:])
    server = _Server(sys.argv[1])
    print("listening", flush=True)
    asked = server.words()
    _as_new()
    _run(asked)
