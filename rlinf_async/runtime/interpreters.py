"""Another Python for the workers of a role, on this host or another one: what it has to have.

::

    python = "/opt/envs/bin/python"
          |
          |--asked for its versions, before a worker is started--> the same Python (3.11), the same
          |                                                        rlinf_async; msgspec
          `--a new interpreter, with its own packages; of this process's path only what is no part
             of this process's Python: the script's folder, PYTHONPATH, checkouts
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 300.0
"""time in which it answers; a command such as ``uv run`` may install packages first"""
QUESTION: Final = (
    "import json, msgspec; from rlinf_async.runtime.interpreters import versions; "
    "print(json.dumps(versions()))"
)


def versions() -> dict[str, str]:
    """Versions that have to be the same in all processes."""
    python = ".".join(platform.python_version_tuple()[:2])
    package: Any = sys.modules[__name__.partition(".")[0]]
    return {"Python": python, "rlinf_async": package.__version__}


def in_words(named: Mapping[str, str]) -> str:
    """Versions by name, in words."""
    return " and ".join(f"{name} {version}" for name, version in named.items())


def answer_of(
    command: str, env_vars: Mapping[str, str], question: str, needs: str
) -> dict[str, str] | str:
    """Return what an interpreter of this host answers, or what is wrong with it.

    Args:
        command: the interpreter, with arguments as a shell reads them.
        env_vars: variables that it gets beside this process's.
        question: program that prints an object of JSON.
        needs: packages that the program imports, in words.
    """
    try:
        ended = subprocess.run(
            [*shlex.split(command), "-c", question],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | env_vars,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {SECONDS:g} s"
    except (OSError, ValueError) as error:
        return f"it cannot be run: {error}"
    if ended.returncode:
        said = [*ended.stderr.strip().splitlines(), f"exit code {ended.returncode}"]
        return f"it cannot import {needs}: {said[-2] if said[:-1] else said[-1]}"
    answer: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def what_is_wrong(python: str, env_vars: Mapping[str, str]) -> str:
    """Return why no worker can be started with an interpreter of this host; empty: it can be."""
    return _what_is_wrong(python, tuple(sorted(env_vars.items())))


@functools.cache
def _what_is_wrong(python: str, env_vars: tuple[tuple[str, str], ...]) -> str:
    # One argument, whatever is in it: a process is started with it, not by a shell.
    answer = answer_of(
        shlex.quote(python), dict(env_vars), _setting_path() + QUESTION, "rlinf_async and msgspec"
    )
    if isinstance(answer, str):
        return answer
    wanted = versions()
    if answer != wanted:
        return f"it has {in_words(answer)}, and this process {in_words(wanted)}"
    return ""


def _setting_path() -> str:
    """Return the program by which a new interpreter takes over the part of this process's path
    that is no part of its Python, and leaves out the folder that it runs in."""
    own = [one for one in sys.path if one and not _is_of_this_python(one)]
    return f"import sys; sys.path[:] = [*filter(None, sys.path), *{own!r}]; "


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


class _Started(popen_spawn_posix.Popen):
    """A new interpreter: as multiprocessing's own, but for which one it is, and its path."""

    _fds: list[int]
    """what the process is handed, by `DupFd`"""

    def _launch(self, process_obj: OtherPython) -> None:
        told = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process_obj.name), told)
            reduction.dump(process_obj, told)
        finally:
            set_spawning_popen(None)
        tracker = resource_tracker.getfd() or 0
        self.sentinel, write_status = os.pipe()
        read_told, write_told = os.pipe()
        # The process sees by its end of this pipe that this one is gone.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, write_told))
        program = (
            f"{_setting_path()}from multiprocessing.spawn import spawn_main; "
            f"spawn_main(tracker_fd={tracker}, pipe_handle={read_told})"
        )
        flags: list[str] = getattr(util, "_args_from_interpreter_flags")()  # noqa: B009
        command = [process_obj.python, *flags, "-c", program, "--multiprocessing-fork"]
        handed = [tracker, read_told, write_status, *self._fds]
        try:
            self.pid = util.spawnv_passfds(os.fsencode(command[0]), command, handed)
        finally:
            _close(read_told, write_status)
        with contextlib.suppress(BrokenPipeError), open(write_told, "wb", closefd=False) as pipe:
            pipe.write(told.getbuffer())


def _preparation(name: str) -> dict[str, Any]:
    """Return what the process sets up before it reads its worker: the path is its own, and so are
    programs that stand beside this process's Python."""
    found = spawn.get_preparation_data(name)
    del found["sys_path"]
    script = found.get("init_main_from_path")
    if script is not None and _is_of_this_python(script):
        del found["init_main_from_path"]
    return found


def _is_of_this_python(path: str) -> bool:
    place = Path(path)
    parents = {*place.absolute().parents, *place.resolve().parents}
    if {"site-packages", "dist-packages"} & {*place.parts}:
        return True
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return any({Path(one).absolute(), Path(one).resolve()} & parents for one in own)


def _close(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)
