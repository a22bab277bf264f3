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

import functools
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

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
    last = next(reversed(ended.stdout.splitlines()), "")
    try:
        return msgspec.json.decode(last, type=dict[str, str])
    except msgspec.DecodeError:
        prints = f"{last[:80]!r} last" if last else "nothing"
        return f"it does not answer as a Python does: asked for its versions, it prints {prints}"


def what_is_wrong(python: str, env_vars: Mapping[str, str]) -> str:
    """Return why no worker can be started with an interpreter of this host; empty: it can be."""
    return _what_is_wrong(python, tuple(sorted(env_vars.items())))


@functools.cache
def _what_is_wrong(python: str, env_vars: tuple[tuple[str, str], ...]) -> str:
    # One argument, whatever is in it: a process is started with it, not by a shell.
    answer = answer_of(
        shlex.quote(python), dict(env_vars), setting_path() + QUESTION, "rlinf_async and msgspec"
    )
    if isinstance(answer, str):
        return answer
    wanted = versions()
    if answer != wanted:
        return f"it has {in_words(answer)}, and this process {in_words(wanted)}"
    return ""


def setting_path() -> str:
    """Return the program by which a new interpreter takes over the part of this process's path
    that is no part of its Python, and leaves out the folder that it runs in."""
    own = [one for one in sys.path if one and not is_of_this_python(one)]
    return f"import sys; sys.path[:] = [*filter(None, sys.path), *{own!r}]; "


def is_of_this_python(path: str) -> bool:
    """Whether a path is part of this process's Python, or of what is installed for one: its library
    and the programs beside it, not all that stands below its prefix, which may be ``/usr``."""
    place = Path(path)
    if {"site-packages", "dist-packages"} & {*place.parts}:
        return True
    library = Path(sysconfig.get_path("stdlib"))
    own = [
        library,
        library.with_name(f"python{sys.version_info.major}{sys.version_info.minor}.zip"),
        *(Path(sysconfig.get_path(name)) for name in ("platstdlib", "scripts")),
        Path(sys.executable).parent,
    ]
    within = {one for at in (place.absolute(), place.resolve()) for one in (at, *at.parents)}
    return any({one.absolute(), one.resolve()} & within for one in own)
