"""``rlinf-async init``: the beginning of a project, which trains as it is.

What it writes is in ``rlinf_async/templates/KIND``: these files, with the name of the project and
the interpreter put in.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import click

from rlinf_async.config.registry import UsageError, nearest

NEEDS: Final = {
    "agent": ("tokenizers", "llm"),
    "embodied": ("gymnasium", "embodied"),
    "language": ("tokenizers", "llm"),
    "worker": ("", ""),
}
"""kinds of projects: the module that each needs beyond the package's own, and the extra with it"""


@click.command()
@click.argument("kind", metavar="embodied|language|agent|worker")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
def init(kind: str, folder: Path) -> None:
    """Write a small project into FOLDER, which trains within a minute: change it to yours.

    \b
    embodied   an environment of your own, PPO
    language   a task and a verifier of your own, GRPO
    agent      an agent with a tool of your own, GRPO over episodes
    worker     workers and channels of your own, without a job
    """
    if kind not in NEEDS:
        listed = ", ".join(NEEDS)
        raise UsageError(f"no project is called {kind!r}{nearest(kind, NEEDS)}; there are {listed}")
    written = write_project(kind, folder)
    for path in written:
        click.echo(path)
    module, extra = NEEDS[kind]
    if module and importlib.util.find_spec(module) is None:
        click.echo(f"\nIt needs {module}: pip install 'rlinf-async[{extra}]'")
    click.echo(f"\nNext: cd {shlex.quote(str(folder))} && make train")


def write_project(kind: str, folder: Path) -> list[Path]:
    """Write the project of this kind; return its files.

    Raises:
        UsageError: the folder is not empty, or no folder, or cannot be written.
    """
    template = files("rlinf_async") / "templates" / kind
    put = {"@NAME@": _name_of(folder, kind), "@PYTHON@": _interpreter()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(one.name for one in folder.iterdir())
        if there:
            raise UsageError(
                f"{folder} is not empty ({', '.join(there[:3])}{', ...' if there[3:] else ''}): "
                "name a new folder, or an empty one"
            )
        return [_write(one, folder, put) for one in _sources(template)]
    except FileExistsError:
        raise UsageError(f"{folder} is a file: name a new folder, or an empty one") from None
    except OSError as error:
        raise UsageError(f"the project cannot be written to {folder}: {error}") from error


def _sources(template: Traversable) -> list[Traversable]:
    return sorted((one for one in template.iterdir() if one.is_file()), key=lambda one: one.name)


def _write(source: Traversable, folder: Path, put: dict[str, str]) -> Path:
    text = source.read_text(encoding="utf-8")
    for mark, value in put.items():
        text = text.replace(mark, value)
    path = folder / source.name
    path.write_text(text, encoding="utf-8")
    return path


def _name_of(folder: Path, kind: str) -> str:
    """A name for runs, from the folder's."""
    return re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.") or kind


def _interpreter() -> str:
    """What the project's Makefile calls: ``python`` where that is this interpreter."""
    found = shutil.which("python")
    return "python" if found == sys.executable else shlex.quote(sys.executable).replace("$", "$$")
