"""A user's function, named in a setting as ``"module:function"`` or ``"file.py:function"``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

from rlinf_async.config.errors import ConfigError, Path


def load_entry_point(entry_point: str, path: Path = ()) -> Callable[..., Any]:
    """The function; a file runs once a process. ``path`` is the setting, for the error.

    Raises:
        ConfigError: there is no such module, file or function. What the module itself raises while
            it is imported passes through, but for ImportError and OSError.
    """
    where, _, name = entry_point.rpartition(":")
    if not (where and name):
        raise ConfigError(
            f"{entry_point!r} must be 'module:function' or 'file.py:function'", path=path
        )
    try:
        module = (
            _from_file(FilePath(where)) if where.endswith(".py") else importlib.import_module(where)
        )
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{entry_point!r}: {where!r} cannot be imported: {error}", path=path
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{entry_point!r}: {where!r} has no function {name!r}", path=path)
    return function  # type: ignore[no-any-return]


def _from_file(path: FilePath) -> Any:
    place = path.resolve()
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
