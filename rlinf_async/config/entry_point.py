"""A user's function, named in a setting as ``"module:function"`` or ``"file.py:function"``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

from rlinf_async.config.errors import ConfigError, Path, UsageError, raised

FOLDER = "RLINF_ASYNC_FOLDER"
"""variable with the folder that the command runs in, for workers that run in another one"""


def load_entry_point(entry_point: str, path: Path = ()) -> Callable[..., Any]:
    """The function; a file runs once a process. ``path`` is the setting, for the error.

    A file is looked for from this process's folder, and from that of the command.

    Raises:
        ConfigError: there is no such module, file or function, or it raises when it is imported.
    """
    where, _, name = entry_point.rpartition(":")
    if not (where and name):
        raise ConfigError(
            f"{entry_point!r} must be 'module:function' or 'file.py:function'", path=path
        )
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{entry_point!r}: {where!r} cannot be imported: {error}", path=path
        ) from error
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a user's own code may raise anything
        raise ConfigError(
            f"{entry_point!r}: {where!r} raised when it was imported: {raised(error)}",
            path=path,
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{entry_point!r}: {where!r} has no function {name!r}", path=path)
    return found  # type: ignore[no-any-return]


def _from_file(where: str) -> Any:
    place = FilePath(where).resolve()
    if not place.exists() and FOLDER in os.environ:
        place = FilePath(os.environ[FOLDER], where).resolve()
    name = f"rlinf_async_file_{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
