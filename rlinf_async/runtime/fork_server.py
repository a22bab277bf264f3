"""The process from which workers are forked: see `rlinf_async.runtime.forked`.

It has one thread, and uses no device. It goes with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from rlinf_async.processes import kill_group, signal_at_end_of_parent
from rlinf_async.runtime.child import remove_unused_torch_cache

HAS_THREADS: Final = -1
"""answer in place of a process number: none was forked, because the worker's imports have started
threads"""
ASK_ANOTHER: Final = -2
"""answer in place of a process number: none was forked, because imports of another worker have
started threads"""
MESSAGE_BYTES: Final = 1 << 16
"""most bytes of a request to fork"""
LEFT_SECONDS: Final = 5.0
"""time that workers have to clean up and end, once the process that started this one is gone"""
DESCRIPTORS: Final = 64
"""most file descriptors of a request to fork"""


def main(control: int) -> None:
    """Fork processes until the one that started this is gone."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("fork_server", encoding="utf-8")
    forks = _Forks(socket.socket(fileno=control))
    signal.signal(signal.SIGCONT, lambda *_: forks.end_if_orphaned())  # in the midst of an import
    signal_at_end_of_parent(signal.SIGCONT)
    forks.serve()
    os._exit(0)  # libraries have nothing to take down: what they do is done in other processes


class _Forks:
    """The processes that this one has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._running: dict[int, tuple[int, int]] = {}
        """by the file that is readable once a process has ended: its number, and the pipe for its
        status"""
        self._ids = os.getpid(), os.getppid()
        self._parent = os.pidfd_open(self._ids[1])
        """a file that is readable once the process that started this one has ended"""
        self._poll.register(self._parent, select.POLLIN)

    def serve(self) -> None:
        listening = True
        while listening or self._running:
            if self._asked() and not self._fork():
                listening = False
                self._poll.unregister(self._control)

    def _asked(self, milliseconds: int | None = None) -> bool:
        """Tell of processes that have ended, and return whether a process is asked for. Waits for
        either, at most ``milliseconds``."""
        ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
        if self._parent in ready:
            self._end()
        ended = ready & self._running.keys()
        for one in ended:
            self._ended(one)
        return ready != ended

    def end_if_orphaned(self) -> None:
        """End if the process that started this one is gone; in a fork of this one do nothing."""
        itself, parent = self._ids
        if os.getpid() == itself and os.getppid() != parent:
            self._end()

    def _end(self) -> NoReturn:
        """End, after the processes that this one has forked: they see that they are to end, and
        clean up. One that does not, because it holds the interpreter lock, or has not begun, is
        killed."""
        ends = select.poll()
        for watched, (child, _) in self._running.items():
            ends.register(watched, select.POLLIN)
            os.kill(child, signal.SIGCONT)  # it may be stopped
        until = time.monotonic() + LEFT_SECONDS
        while self._running and (left := until - time.monotonic()) > 0:
            for watched, _ in ends.poll(1000 * left):
                ends.unregister(watched)
                self._ended(watched)
        for child, _ in self._running.values():
            kill_group(child)
        os._exit(0)

    def _fork(self) -> bool:
        """Fork a process, as asked; False where nobody asks any more."""
        asked, given, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, DESCRIPTORS)
        if not asked:
            return False
        # A library's own threads, which Python does not know, are prepared for a fork.
        refusal = ASK_ANOTHER if threading.active_count() > 1 else HAS_THREADS
        self._import(msgspec.json.decode(asked, type=tuple[str, ...]))
        try:
            self._start(given, refusal)
        except (OSError, ValueError) as error:  # there is no room for its files, or for a process
            print(f"no process could be forked: {error}", file=sys.stderr, flush=True)
            for descriptor in given:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return True

    def _import(self, modules: Sequence[str]) -> None:
        """Import these, without a word: who needs one that cannot be imported will say so."""
        missing = [name for name in modules if name not in sys.modules]
        if not missing:
            return
        gc.disable()  # it would look again and again at what stays: a tenth of the time
        for name in missing:
            with _silent(), contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
            self._asked(0)  # the ends of others do not wait for all imports
        remove_unused_torch_cache(Path(tempfile.gettempdir()))
        gc.enable()
        gc.collect()
        gc.freeze()  # the collector would write to the memory that is shared

    def _start(self, given: Sequence[int], refusal: int) -> None:
        told, status, *handed = given
        if threading.active_count() > 1:
            _write(status, refusal)
            for descriptor in given:
                os.close(descriptor)
            return
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
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
            self._control.close()
            os.close(self._parent)
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
    try:
        size = int.from_bytes(_read(told, 4), "big")
        environment = msgspec.msgpack.decode(_read(told, size), type=dict[str, str])
    except EOFError:  # who asked for it has given up, or is gone
        return 1
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


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard what the block prints: this process has no name under which it could be read."""
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
            raise EOFError
        parts += part
    return bytes(parts)


def _write(descriptor: int, number: int) -> None:
    """Say a number to the process that asked, if it is there; it reads it by `read_signed`."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, forkserver.SIGNED_STRUCT.pack(number))
