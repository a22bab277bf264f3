"""Programs that a model writes, run in a sandbox: bubblewrap, a package of every Linux.

::

    TOOLS = [program("python"), program("bash", seconds=5)]  # the first one tries the sandbox

    async def run(episode: Episode) -> float:
        chat = episode.chat(tools=TOOLS)

A program has the system's ``/usr`` and nothing else: no network, nothing that it can write but its
own ``/tmp``, no environment, no other process, no namespaces of its own, no memory beside that of
files and processes. Memory of each process, the number of processes, time and output have limits,
and it ends with everything that it has started: when it is too slow or writes too much, when the
episode ends, and when the worker does. What has no limit is the memory of all its processes
together: as many times `MEMORY` as there are; where memory runs out they go first.

::

    setpriv (where the worker is root: to be nobody)
      bwrap (namespaces, files, filter of system calls)  --ends with the worker
        prlimit (limits, which begin to count in the namespaces)
          python3 -I /program
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, Literal

from rlinf_async.config.registry import UsageError
from rlinf_async.episodes.running import Program, environment, running
from rlinf_async.episodes.tools import (
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
"""most bytes of files that a program can write, in each of its two folders and of each file"""
FILES: Final = 256
"""files that a process can have open"""
ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
"""All that a program, and whoever starts it, has: a process can read its parent's."""
LANGUAGES: Final = {
    "python": ("/usr/bin/python3", "-I"),
    "bash": ("/usr/bin/bash",),
}
_PROGRAM: Final = "/program"
_FILES: Final = (
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
    *("--proc", "/proc", "--dev", "/dev", "--size", str(TMP), "--tmpfs", "/dev/shm"),
    *("--remount-ro", "/dev", "--size", str(TMP), "--tmpfs", "/tmp"),
)
# The kernel kills a program before the worker, where memory runs out. Outermost: what root has set
# (CAP_SYS_RESOURCE), a program cannot lower.
_FIRST_TO_GO: Final = (
    *("sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh"),
)
_NO_NAMESPACES: Final = ("--unshare-user", "--disable-userns")
_UNMAPPED: Final = {
    "x86_64": (0xC000003E, (29, 68, 319, 447)),
    "aarch64": (0xC00000B7, (194, 186, 279, 447)),
}
"""by machine: its number in the kernel, and those of shmget, msgget, memfd_create, memfd_secret"""


class NoSandbox(UsageError):
    """Programs cannot be run in a sandbox here."""


def sandboxed(
    command: Sequence[str],
    *,
    memory: int = MEMORY,
    processes: int = PROCESSES,
    options: Sequence[str] = (),
) -> list[str]:
    """Return a command that runs another one in a sandbox; give it `ENVIRONMENT`.

    Args:
        command: what is run, by its path under ``/usr``.
        memory: bytes of each process.
        processes: most processes and threads at once.
        options: further ones of bubblewrap.
    """
    # For root, the kernel has no limit of processes.
    nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    return [
        *_FIRST_TO_GO,
        *(("setpriv", *nobody) if os.geteuid() == 0 else ()),
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
        *(part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)),
        *("--cap-drop", "ALL", *_FILES, *options, "--remount-ro", "/", "--chdir", "/tmp"),
        *_limited(command, memory, processes),
    ]


def _limited(command: Sequence[str], memory: int, processes: int) -> list[str]:
    limits = (f"--as={memory}", f"--nproc={processes}", f"--fsize={TMP}", f"--nofile={FILES}")
    return ["prlimit", *limits, "--core=0", *command]


def _filter_of(machine: str) -> bytes:
    """Return a filter of system calls (seccomp) that refuses those which get memory that no process
    has mapped, and that no limit counts; empty: none is known for this machine."""
    if machine not in _UNMAPPED:
        return b""
    number, refused = _UNMAPPED[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    last = 5 + len(refused)  # each jump counts from the instruction after it
    steps = [
        (load, 0, 0, 4),
        (equal, 0, last - 2, number),  # calls of another machine, such as those of 32 bits
        (load, 0, 0, 0),
        (at_least, last - 4, 0, 0x4000_0000),  # the same
        *((equal, last - 5 - at, 0, call) for at, call in enumerate(refused)),
        (give, 0, 0, 0x7FFF_0000),  # allowed
        (give, 0, 0, 0x0005_0000 | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


@functools.cache
def check_sandbox() -> tuple[str, ...]:
    """Try the sandbox, once.

    Returns options of bubblewrap that keep programs from namespaces of their own, in which they
    could mount files without a limit; none where it or the kernel does not have them.

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
    if not _tried(_NO_NAMESPACES).returncode:
        return _NO_NAMESPACES
    tried = _tried(())
    if tried.returncode:
        raise NoSandbox(
            f"the sandbox cannot be made: {tried.stderr.strip()} (may unprivileged users make "
            "namespaces here?); or write sandbox='none' for programs that you trust with all that "
            "this worker may do"
        )
    return ()


def _tried(options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            sandboxed(["/usr/bin/true"], options=options),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10.0,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSandbox(f"the sandbox cannot be made: {error}") from error


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

    Make it once, in the module: the first one in a process tries the sandbox, and blocks meanwhile
    (some hundredths of a second; 10 s where the sandbox hangs).

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
            its group is not ended with it.
        on_failure: what becomes of a program that is too slow or prints too much: it is the
            model's own, so the model is told unless this says otherwise.

    Raises:
        NoSandbox: the sandbox cannot be made here.
        ValueError: an unknown language, or a limit that nothing could keep.
    """
    if isinstance(language, str):
        if language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise ValueError(f"no language is called {language!r} (known: {known}, or a command)")
        name, command = name or language, LANGUAGES[language]
    else:
        command = tuple(language)
        name = name or Path(command[0]).name
    if sandbox == "bubblewrap":
        check_sandbox()
    elif sandbox != "none":
        raise ValueError(f"sandbox is {sandbox!r}; it must be 'bubblewrap' or 'none'")

    async def run(code: str) -> str:
        opened = _sandboxed if sandbox == "bubblewrap" else _unprotected
        written = _encoded(code)
        try:
            async with opened(command, written, memory, processes, 4 * output) as program:
                return await _what_it_prints(program)
        except OSError as error:
            raise ToolBroken(f"the program cannot be started: {error}") from error

    run.__doc__ = description or (
        f"Run a {name} program, and return what it prints (standard output and errors). Nothing is "
        "kept from one program to the next."
    )
    return Tool(
        run,
        name=name,
        seconds=seconds,
        output=output,
        concurrent=(os.cpu_count() or 1) if concurrent is None else concurrent,
        on_failure=on_failure,
    )


@contextlib.asynccontextmanager
async def _sandboxed(
    command: Sequence[str], code: bytes, memory: int, processes: int, most: int
) -> AsyncIterator[Program]:
    with contextlib.ExitStack() as opened:
        program = _file_with(code, opened)
        files, options = [program], [*check_sandbox(), "--ro-bind-data", str(program), _PROGRAM]
        if refused := _filter_of(platform.machine()):
            files.append(_file_with(refused, opened))
            options += ["--seccomp", str(files[-1])]
        whole = sandboxed((*command, _PROGRAM), memory=memory, processes=processes, options=options)
        async with running(whole, ENVIRONMENT, most, files=files, watched=False) as started:
            yield started


@contextlib.asynccontextmanager
async def _unprotected(
    command: Sequence[str], code: bytes, memory: int, processes: int, most: int
) -> AsyncIterator[Program]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = f"{folder}/program"
        with open(place, "wb") as file:  # noqa: ASYNC230 - short
            file.write(code)
        whole = [*_FIRST_TO_GO, *_limited((*command, place), memory, processes)]
        variables = {**environment(), **ENVIRONMENT}
        async with running(whole, variables, most, folder=folder, leftover=folder) as program:
            yield program


async def _what_it_prints(program: Program) -> str:
    """Return what a program prints until it ends, or has printed too much."""
    await program.stopped()
    text = program.output.decode(errors="replace")
    code = program.code
    if program.too_much or not code:
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


def _file_with(content: bytes, opened: contextlib.ExitStack) -> int:
    """Return a descriptor of a file in memory, at its beginning."""
    file = os.memfd_create("program")
    opened.callback(os.close, file)
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file
