"""Somebody else's agent: a program that is started for each episode, and speaks to its endpoint.

::

    worker --stdin: {"messages": [...], "index": 17}--> program --HTTP--> endpoint of the worker
           <--a file: 0.5----------------------------
           <--stderr: told where it fails------------
           --kill----> all processes of its group, when the episode ends or the worker dies

In its environment it finds

::

    OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY    the endpoint, and the key of the episode
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY               the same
    EPISODE_MESSAGES                                    the task's messages, as on stdin; not where
                                                        they are too long for a variable
    EPISODE_INDEX                                       position of the task in the data
    EPISODE_SCORE_FILE                                  an empty file, for its score

Its score is the number that it writes into that file; where it writes none, the verifier of the
data judges the last answer. (Nothing that it prints is a score: agents print what the model says.)
An exit code other than 0 is a failure, with the end of stderr as its text, unless a limit of the
episode was reached: then the episode is judged as it stands.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import FOLDER
from rlinf_async.config.registry import Path as SettingPath
from rlinf_async.episodes.endpoint.config import check_installed
from rlinf_async.episodes.episode import Episode, EpisodeError
from rlinf_async.episodes.running import environment, running
from rlinf_async.processes import how_it_ended

PREFIX: Final = "command:"
"""what a setting begins with that names a program"""
SCORE_FILE: Final = "EPISODE_SCORE_FILE"
"""variable that names the file for the score"""
LONGEST_SCORE: Final = 80
"""bytes of that file that are read"""
KEPT: Final = 16_384
"""last bytes of stderr that are kept"""
SHOWN: Final = 1_000
"""last characters of stderr that an error shows"""
SCRIPTS: Final = (".py", ".sh", ".js", ".ts")
"""how the name of a script ends that is a program's first argument"""
LONGEST_VARIABLE: Final = 100_000
"""bytes of an environment variable; Linux takes 131,072 with its name"""


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
        ConfigError: there is no such program, or not the script that it is to run.
        MissingExtra: what serves episodes over HTTP is not installed.
    """
    check_installed()
    if folder is None and FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
    arguments = _arguments(line, folder, path)

    async def run(episode: Episode) -> float | None:
        """Run the program; return its score.

        Raises:
            CommandFailed: it cannot be started, or has failed.
            LimitReached: it has failed after a limit of the episode was reached.
        """
        with _score_file() as file:
            variables = {**environment_of(episode), SCORE_FILE: file}
            given = task_of(episode)
            try:
                async with running(
                    arguments, variables, KEPT, given=given, last=True, folder=folder, leftover=file
                ) as program:
                    await program.stopped()
            except OSError as error:
                files = "; lower episode.concurrent, or raise the hard limit (ulimit -Hn)"
                more = files if error.errno == errno.EMFILE else ""
                raise CommandFailed(f"{arguments[0]!r} cannot be started: {error}{more}") from error
            code = program.code or 0
            if not code:
                return score_of(file)
        if episode.reached is not None:
            raise episode.reached
        end = program.output.decode(errors="replace").strip()[-SHOWN:]
        told = f"; its stderr ends with:\n{end}" if end else ", and says nothing on stderr"
        raise CommandFailed(f"{line!r}: {how_it_ended(code)}{told}")

    return run


@contextlib.contextmanager
def _score_file() -> Iterator[str]:
    """Make an empty file that nobody but this user can read; it is gone after the block (where
    this process is killed in it, whoever watches over the program removes it)."""
    opened, name = tempfile.mkstemp(prefix="rlinf-async-score-")
    os.close(opened)
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):  # the program may have put anything there
            os.unlink(name)


def score_of(file: str) -> float | None:
    """Return the score that a file has; None: it is empty, or not there.

    Raises:
        CommandFailed: it has no finite number.
    """
    try:  # whatever is there: a link is not followed, and a pipe not waited for
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandFailed(f"{SCORE_FILE} cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise CommandFailed(f"{SCORE_FILE} is no file any more: write a number into it")
        written = os.read(opened, LONGEST_SCORE + 1).decode(errors="replace").strip()
    finally:
        os.close(opened)
    if not written:
        return None
    try:
        score = float(written) if len(written) <= LONGEST_SCORE else math.nan
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise CommandFailed(
            f"the program's score in {SCORE_FILE} is {written[:LONGEST_SCORE]!r}: it must be a "
            "finite number"
        )
    return score


def task_of(episode: Episode) -> bytes:
    """Return what a program reads on stdin, JSON in one line."""
    task = episode.task
    return msgspec.json.encode({"messages": task.messages, "index": task.index}) + b"\n"


def environment_of(episode: Episode) -> dict[str, str]:
    """Return the environment of a program: this process's, and how it finds its episode."""
    own = environment()
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
    folder = folder or Path.cwd()
    place = str(folder / name) if os.sep in name else name
    if shutil.which(place) is None:
        raise ConfigError(
            f"command {line!r}: there is no program {name!r} that can be started", path=path
        )
    script = next(iter(arguments[1:]), "")
    if script.endswith(SCRIPTS) and not (folder / script).is_file():
        raise ConfigError(f"command {line!r}: there is no file {script!r} in {folder}", path=path)
    return arguments
