"""Programs that a model writes, run in a sandbox: bubblewrap, a package of every Linux.

::

    chat = episode.chat(tools=[program("python"), program("bash", seconds=5)])

A program has the system's ``/usr`` and nothing else: no network, nothing that it can write but its
own ``/tmp``, no environment, no other process. Memory of each process, the number of processes,
time and output have limits, and it ends with everything that it has started: when it is too slow or
writes too much, when the episode ends, and when the worker does.

::

    setpriv (where the worker is root: to be nobody)
      bwrap (namespaces, files)  --ends with the worker
        prlimit (limits, which begin to count in the namespaces)
          python3 -I /program
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, Literal, cast

from rlinf_async.config.registry import UsageError
from rlinf_async.episodes.tools import (
    CANCELLED_SECONDS,
    OUTPUT,
    OnFailure,
    Tool,
    ToolBroken,
    ToolError,
)
from rlinf_async.processes import how_it_ended

Sandbox = Literal["bubblewrap", "none"]
MEMORY: Final = 512 * 1024 * 1024
PROCESSES: Final = 32
TMP: Final = 64 * 1024 * 1024
"""most bytes of files that a program can write"""
ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
"""All that a program, and whoever starts it, has: a process can read its parent's."""
LANGUAGES: Final = {
    "python": ("/usr/bin/python3", "-I"),
    "bash": ("/usr/bin/bash",),
}
_PROGRAM: Final = "/program"
_LEFT_SECONDS: Final = 0.2
"""time for what a program that has ended left in its pipe"""
_FILES: Final = (
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--proc", "/proc", "--dev", "/dev", "--size", str(TMP), "--tmpfs", "/dev/shm"),
    *("--remount-ro", "/dev", "--size", str(TMP), "--tmpfs", "/tmp"),
)
# The kernel kills a program before the worker, where memory runs out.
_FIRST_TO_GO: Final = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'


class NoSandbox(UsageError):
    """Programs cannot be run in a sandbox here."""


def sandboxed(
    command: Sequence[str],
    *,
    memory: int = MEMORY,
    processes: int = PROCESSES,
    program: int | None = None,
) -> list[str]:
    """Return a command that runs another one in a sandbox; give it `ENVIRONMENT`.

    Args:
        command: what is run, by its path under ``/usr``.
        memory: bytes of each process.
        processes: most processes and threads at once.
        program: descriptor of a file that it finds as ``/program``.
    """
    # For root, the kernel has no limit of processes.
    nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    given = () if program is None else ("--ro-bind-data", str(program), _PROGRAM)
    return [
        *(("setpriv", *nobody) if os.geteuid() == 0 else ()),
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
        *(part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)),
        *("--cap-drop", "ALL", *_FILES, *given, "--remount-ro", "/", "--chdir", "/tmp"),
        *_limited(command, memory, processes),
    ]


def _limited(command: Sequence[str], memory: int, processes: int) -> list[str]:
    limits = (f"--as={memory}", f"--nproc={processes}", f"--fsize={TMP}", "--core=0")
    return ["prlimit", *limits, "sh", "-c", _FIRST_TO_GO, "sh", *command]


@functools.cache
def check_sandbox() -> None:
    """Try the sandbox, once.

    Raises:
        NoSandbox: it cannot be made, and why.
    """
    needed = ("bwrap", "prlimit", *(("setpriv",) if os.geteuid() == 0 else ()))
    for name in needed:
        if shutil.which(name) is None:
            package = "bubblewrap" if name == "bwrap" else "util-linux"
            raise NoSandbox(
                f"programs run in a sandbox, which needs {name}: install the package {package}, or "
                "write sandbox='none' for programs that you trust with all that this worker may do"
            )
    try:
        tried = subprocess.run(
            sandboxed(["/usr/bin/true"]),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10.0,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSandbox(f"the sandbox cannot be made: {error}") from error
    if tried.returncode:
        raise NoSandbox(
            f"the sandbox cannot be made: {tried.stderr.strip()} (may unprivileged users make "
            "namespaces here?); or write sandbox='none' for programs that you trust with all that "
            "this worker may do"
        )


def program(
    language: str | Sequence[str] = "python",
    *,
    name: str = "",
    description: str = "",
    seconds: float = 10.0,
    output: int = OUTPUT,
    concurrent: int | None = None,
    memory: int = MEMORY,
    processes: int = PROCESSES,
    sandbox: Sandbox = "bubblewrap",
    on_failure: OnFailure | None = "tell",
) -> Tool:
    """Return a tool that runs a program which the model writes, and says what it printed.

    Args:
        language: ``"python"``, ``"bash"``, or a command that gets the path of the program as its
            last argument.
        name: what the model calls the tool; by default the language.
        description: what it is for.
        seconds: limit of one program.
        output: most characters that it may print; it is ended when it prints more.
        concurrent: programs at once in one worker; None: as many as there are cores.
        memory: bytes of each of its processes.
        processes: processes and threads that it may have at once.
        sandbox: ``"none"``: it may do what the worker may, has the limits alone, and what leaves
            its session is not ended with it.
        on_failure: what becomes of a program that is too slow or prints too much: it is the
            model's own, so the model is told unless this says otherwise.

    Raises:
        NoSandbox: the sandbox cannot be made here.
        ValueError: an unknown language.
    """
    if isinstance(language, str):
        if language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise ValueError(f"no language is called {language!r} (known: {known}, or a command)")
        name, command = name or language, LANGUAGES[language]
    else:
        command = tuple(language)
    if sandbox == "bubblewrap":
        check_sandbox()
    elif sandbox != "none":
        raise ValueError(f"sandbox is {sandbox!r}; it must be 'bubblewrap' or 'none'")

    async def run(code: str) -> str:
        opened = _sandboxed if sandbox == "bubblewrap" else _unprotected
        async with opened(command, code, memory, processes, 4 * output) as printed:
            return await _what_it_prints(printed)

    run.__doc__ = description or (
        f"Run a {name} program, and return what it prints (standard output and errors). Nothing is "
        "kept from one program to the next."
    )
    return Tool(
        run,
        name=name or Path(command[0]).name,
        seconds=seconds,
        output=output,
        concurrent=concurrent or os.cpu_count() or 1,
        on_failure=on_failure,
    )


class _Printed(asyncio.SubprocessProtocol):
    """What a process prints: at most ``most`` bytes, and some more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        """done when the process has ended, or printed more"""
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self.bytes = bytearray()
        self.code: int | None = None
        """exit code; None: it goes on"""
        self.transport: asyncio.SubprocessTransport

    @property
    def too_much(self) -> bool:
        """Whether it has printed more than it may."""
        return len(self.bytes) > self._most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # By annotation alone: uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep what is printed."""
        if not self.too_much:
            self.bytes += data
        if self.too_much:
            self._end()

    def process_exited(self) -> None:
        """Wait for what is still in the pipe, but for nobody who only holds it."""
        self.code = self.transport.get_returncode()
        self._loop.call_later(_LEFT_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, when the process has ended and nobody holds its pipe."""
        self._end()
        if not self._closed.done():
            self._closed.set_result(None)

    async def end(self) -> None:
        """Kill it, and wait until nobody holds its pipe: until all have ended that it started."""
        with contextlib.suppress(ProcessLookupError):
            self.transport.kill()
        await asyncio.wait({self._closed}, timeout=CANCELLED_SECONDS / 2)
        self.transport.close()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@contextlib.asynccontextmanager
async def _sandboxed(
    command: Sequence[str], code: str, memory: int, processes: int, most: int
) -> AsyncIterator[_Printed]:
    file = os.memfd_create("program")
    try:
        _write(file, _encoded(code))
        os.lseek(file, 0, os.SEEK_SET)
        whole = sandboxed((*command, _PROGRAM), memory=memory, processes=processes, program=file)
        printed = await _started(whole, ENVIRONMENT, most, files=(file,))
    finally:
        os.close(file)
    try:
        yield printed
    finally:
        await printed.end()


@contextlib.asynccontextmanager
async def _unprotected(
    command: Sequence[str], code: str, memory: int, processes: int, most: int
) -> AsyncIterator[_Printed]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = f"{folder}/program"
        with open(place, "wb") as file:  # noqa: ASYNC230 - short
            file.write(_encoded(code))
        whole = _limited((*command, place), memory, processes)
        printed = await _started(whole, {**os.environ, **ENVIRONMENT}, most, folder=folder)
        try:
            yield printed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(printed.transport.get_pid(), signal.SIGKILL)
            await printed.end()


async def _started(
    command: Sequence[str],
    environment: dict[str, str],
    most: int,
    *,
    files: Sequence[int] = (),
    folder: str | None = None,
) -> _Printed:
    try:
        _, printed = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Printed(most),
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=files,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise ToolBroken(f"the program cannot be started: {error}") from error
    return printed


async def _what_it_prints(printed: _Printed) -> str:
    """Return what a process prints until it ends, or has printed too much."""
    await printed.done
    text = printed.bytes.decode(errors="replace")
    code = printed.code
    if printed.too_much or not code:
        return text
    if text.startswith(("bwrap:", "setpriv:", "prlimit:")):
        raise ToolBroken(f"the sandbox cannot be made: {text.strip()}")
    if code > 128:  # how a shell and bubblewrap say that a signal has ended it
        code = 128 - code
    return f"{text.rstrip()}\n[{how_it_ended(code)}]".lstrip()


def _encoded(code: str) -> bytes:
    try:
        return code.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"the program is no text: {error}") from error


def _write(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
