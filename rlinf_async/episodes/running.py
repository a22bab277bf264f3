"""Programs that run for an episode: somebody else's agents, and what a model writes.

::

    sh, which becomes the program, leader of a group      ends with the block
       `- reads a pipe of this process                    where this process was killed: the pipe is
                                                          closed; it removes what is left behind,
                                                          and kills the group
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, cast

from rlinf_async import deadlines

CLOSED_SECONDS: Final = 0.5
"""seconds for which the output of a program that has ended is waited for, where something that has
left its group holds it open"""
OWN_VARIABLES: Final = "RLINF_ASYNC_"
"""what the names of our own variables begin with"""
_GROUP: Final = (
    '( read -r _; [ -z "$1" ] || rm -rf -- "$1"; kill -KILL -"$$" ) < "$0" > /dev/null 2>&1 & '
    'shift; exec "$@"'
)


def environment() -> dict[str, str]:
    """Return this process's environment, without our own variables: they are no business of
    somebody else's program, nor of a model's."""
    return {name: one for name, one in os.environ.items() if not name.startswith(OWN_VARIABLES)}


def allow_files(count: int) -> None:
    """Let this process have so many files open, pipes and connections included, or as many as it
    may allow itself: the limit that most systems begin with is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Program(asyncio.SubprocessProtocol):
    """A program that runs: what it writes, and its end. Made by `running`.

    Not `asyncio.subprocess.Process`: that one has not ended as long as anything that it has started
    holds its output open.
    """

    def __init__(self, most: int, *, last: bool) -> None:
        self._most = most
        self._last = last
        self.output = bytearray()
        """what it has written"""
        self._exited = False
        self._stopped = asyncio.Event()
        """set once it has exited, or has written too much"""
        self._closed = asyncio.Event()
        """set once it has exited and nobody holds its output open"""
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # By annotation alone: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep what is written."""
        if self._last:
            self.output += data
            del self.output[: -self._most]
        elif not self.too_much:
            self.output += data
            if self.too_much:
                self._stopped.set()

    def process_exited(self) -> None:
        """Kill what it has started."""
        self._kill()
        self._exited = True
        self._stopped.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nobody holds its output open."""
        self._closed.set()

    @property
    def too_much(self) -> bool:
        """Whether it has written more than it may."""
        return len(self.output) > self._most

    @property
    def code(self) -> int | None:
        """Exit code; below 0: number of a signal; None: it goes on."""
        return None if self._transport is None else self._transport.get_returncode()

    async def stopped(self) -> None:
        """Wait until it has exited and its output is read, or it has written too much."""
        await self._stopped.wait()
        if not self.too_much:
            await self._output_closed()

    async def end(self) -> None:
        """Kill all processes of its group, and wait until they have ended."""
        self._kill()
        await self._output_closed()

    def _kill(self) -> None:
        # The number of the group is no other's while its leader was not waited for.
        if self._transport is not None and not self._exited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def _output_closed(self) -> None:
        if self._transport is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with deadlines.timeout(CLOSED_SECONDS):
                    await self._closed.wait()
        finally:
            self._transport.close()


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str],
    variables: Mapping[str, str],
    most: int,
    *,
    given: bytes = b"",
    last: bool = False,
    files: Sequence[int] = (),
    folder: str | os.PathLike[str] | None = None,
    watched: bool = True,
    leftover: str = "",
) -> AsyncIterator[Program]:
    """Run a program, which ends with the block, as do all processes of its group.

    Args:
        command: the program and its arguments.
        variables: its environment.
        most: bytes of its output that are kept: the first ones of all, and some more where there
            are more.
        given: what it reads on stdin.
        last: keep the last ones instead, of stderr alone; stdout is dropped.
        files: descriptors that it gets.
        folder: its working directory; None: this process's.
        watched: have its group also end where this process is killed; else it sees to that itself.
        leftover: a file or folder that is removed where this process is killed, if the group is
            watched; else it is the caller's.

    Raises:
        OSError: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    program = Program(most, last=last)
    with contextlib.ExitStack() as pipe:
        if watched:
            read, held = os.pipe()
            pipe.callback(os.close, read)
            pipe.callback(os.close, held)
            command = ("/bin/sh", "-c", _GROUP, f"/dev/fd/{read}", leftover, *command)
            files = (*files, read)
        try:
            transport, _ = await loop.subprocess_exec(
                lambda: program,
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if last else subprocess.PIPE,
                stderr=subprocess.PIPE if last else subprocess.STDOUT,
                env=dict(variables),
                pass_fds=files,
                cwd=folder,
                start_new_session=True,
            )
            stdin: Any = transport.get_pipe_transport(0)
            if not stdin.is_closing():  # it may have ended already
                stdin.write(given)
            stdin.close()
            yield program
        finally:
            await program.end()
