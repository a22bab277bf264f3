"""Somebody else's agent: a program that is started for each episode, and speaks to its endpoint.

::

    worker --stdin: {"messages": [...], "index": 17}--> program --HTTP--> endpoint of the worker
           <--stdout: its last line may be "score: 0.5"--
           <--stderr: told where it fails-------------
           --kill----> all processes of its group, when the episode ends or the worker dies

In its environment it finds

::

    OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY    the endpoint, and the key of the episode
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY               the same
    EPISODE_MESSAGES                                    the task's messages, as on stdin; not where
                                                        they are too long for a variable
    EPISODE_INDEX                                       position of the task in the data

Its score is the last line of what it prints, if that is ``score:`` and a number; else the verifier
of the data judges the last answer. (Not a number alone: agents print answers, too.) An exit code
other than 0 is a failure, with the end of stderr as its text, unless a limit of the episode was
reached: then the episode is judged as it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from rlinf_async import deadlines
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import FOLDER
from rlinf_async.config.registry import Path as SettingPath
from rlinf_async.episodes.episode import Episode, EpisodeError
from rlinf_async.processes import how_it_ended

PREFIX: Final = "command:"
"""what a setting begins with that names a program"""
SCORE: Final = "score:"
"""what the line begins with that has the score"""
KEPT: Final = 16_384
"""last bytes of stdout and stderr that are kept"""
SHOWN: Final = 1_000
"""last characters of stderr that an error shows"""
CLOSED_SECONDS: Final = 2.0
"""seconds for which the output of a program that has ended is waited for"""
LONGEST_VARIABLE: Final = 100_000
"""bytes of an environment variable; Linux takes 131,072 with its name"""
SECRETS: Final = ("RLINF_ASYNC_",)
"""what the names of our own variables begin with: no business of somebody else's program"""
GROUP: Final = '( read -r _; kill -KILL -"$$" ) < "$0" > /dev/null 2>&1 & exec "$@"'
"""shell program: it becomes the program, in a group with a process that kills the group once the
pipe ``$0`` is closed, also where the worker was killed"""


class CommandFailed(EpisodeError):
    """The program has failed; the text says how."""


def command(
    line: str, folder: Path | None = None, path: SettingPath = ()
) -> Callable[[Episode], Coroutine[Any, Any, Any]]:
    """Return the coroutine function of an episode that a program carries out.

    Args:
        line: program and arguments, as a shell reads them; no shell runs it.
        folder: working directory; by default that of the command that started the run.
        path: the setting, for the error.

    Raises:
        ConfigError: there is no such program.
    """
    if folder is None and FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
    arguments = _arguments(line, folder, path)

    async def run(episode: Episode) -> float | None:
        """Run the program; return its score.

        Raises:
            CommandFailed: it cannot be started, or has failed.
            LimitReached: it has failed after a limit of the episode was reached.
        """
        program = await _run(arguments, folder, environment_of(episode), task_of(episode))
        if program.code == 0:
            return score_of(bytes(program.written[1]))
        if episode.reached is not None:
            raise episode.reached
        end = program.written[2].decode(errors="replace").strip()[-SHOWN:]
        told = f"; its stderr ends with:\n{end}" if end else ", and says nothing on stderr"
        raise CommandFailed(f"{line!r}: {how_it_ended(program.code)}{told}")

    return run


def score_of(said: bytes) -> float | None:
    """Return the score that the last line says; None: it says none.

    Raises:
        CommandFailed: it is no finite number.
    """
    lines = said.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith(SCORE):
        return None
    written = lines[-1].removeprefix(SCORE).strip()
    try:
        score = float(written)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise CommandFailed(f"the program's score is {written[:80]!r}: it must be a finite number")
    return score


def task_of(episode: Episode) -> bytes:
    """Return what a program reads on stdin, JSON in one line."""
    task = episode.task
    return msgspec.json.encode({"messages": task.messages, "index": task.index}) + b"\n"


def environment_of(episode: Episode) -> dict[str, str]:
    """Return the environment of a program: this process's, and how it finds its episode."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    url, key = episode.base_url, episode.key
    found = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "EPISODE_INDEX": str(episode.task.index),
    }
    for name in ("NO_PROXY", "no_proxy"):  # none stands between a program and this worker
        found[name] = ",".join(filter(None, (own.get(name), urlsplit(url).hostname)))
    messages = msgspec.json.encode(episode.task.messages)
    if len(messages) <= LONGEST_VARIABLE:
        found["EPISODE_MESSAGES"] = messages.decode()
    return {**own, **found}


def _arguments(line: str, folder: Path | None, path: SettingPath) -> list[str]:
    try:
        arguments = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"command {line!r}: {error}", path=path) from error
    if not arguments:
        raise ConfigError(
            f"write a program behind {PREFIX!r}, as in 'command: python agent.py'", path=path
        )
    name = arguments[0]
    place = str((folder or Path()) / name) if os.sep in name else name
    if shutil.which(place) is None:
        raise ConfigError(
            f"command {line!r}: there is no program {name!r} that can be started", path=path
        )
    return arguments


class _Program(asyncio.SubprocessProtocol):
    """A program: the ends of what it writes, and its end.

    Not `asyncio.subprocess.Process`: that one has not ended as long as anything that it has started
    holds its output open.
    """

    def __init__(self) -> None:
        self.written = {1: bytearray(), 2: bytearray()}
        """last bytes, by descriptor"""
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        """set once it has exited and nobody holds its output open"""
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.written[fd]
        kept += data
        del kept[:-KEPT]

    def process_exited(self) -> None:
        self.kill()  # what it has started
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def kill(self) -> None:
        """Kill all processes of its group, whose number is no other's while one is there."""
        if self._transport is not None and not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    @property
    def code(self) -> int:
        """Exit code; below 0: number of a signal."""
        code = None if self._transport is None else self._transport.get_returncode()
        return 0 if code is None else code


async def _run(
    arguments: list[str], folder: Path | None, environment: Mapping[str, str], given: bytes
) -> _Program:
    """Run a program to its end, in a group of its own, which is killed with it."""
    watched, held = os.pipe()
    loop = asyncio.get_running_loop()
    starting = loop.create_task(
        loop.subprocess_exec(
            _Program,
            *("/bin/sh", "-c", GROUP, f"/dev/fd/{watched}", *arguments),
            cwd=folder,
            env=dict(environment),
            pass_fds=[watched],
            start_new_session=True,
        )
    )
    try:
        await asyncio.wait([starting])
        transport, program = starting.result()
        try:
            # By annotation alone: uvloop's transports are no subclasses of asyncio's.
            stdin: Any = transport.get_pipe_transport(0)
            stdin.write(given)
            stdin.close()
            await program.exited.wait()
            with contextlib.suppress(TimeoutError):  # by what has left its group
                async with deadlines.timeout(CLOSED_SECONDS):
                    await program.closed.wait()
            return program
        finally:
            program.kill()
            await program.exited.wait()
            transport.close()
    except OSError as error:
        raise CommandFailed(f"{arguments[0]!r} cannot be started: {error}") from error
    finally:
        os.close(held)
        if not starting.done():  # it is killed by whoever watches the pipe
            transport, program = await starting
            program.kill()
            transport.close()
        os.close(watched)
