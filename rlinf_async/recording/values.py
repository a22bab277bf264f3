"""Arguments and results of workers as plain data, and back: what a recording holds of a launch or
a call. No pickle: a class or a function is named by where it can be imported.

Plain values and arrays are themselves; everything else is a list that begins with what it is::

    ["list", [...]]   ["tuple", [...]]   ["dict", [[key, value], ...]]   ["set", [...]]
    ["object", "module:Name", {field: value}]     a Struct or a dataclass
    ["member", "module:Name", "NAME"]             of an enum
    ["name", "module:Name"]                       a class or a function
    ["partial", function, [...], {...}]           ["int", "123..."]   ["path", "a/b"]
    ["end", "receiver", "channel"]                the end of a channel
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import msgspec

from rlinf_async.channels import LatestReceiver, LatestSender, Receiver, Sender

END_KINDS: Final[dict[str, type]] = {
    "sender": Sender,
    "receiver": Receiver,
    "latest sender": LatestSender,
    "latest receiver": LatestReceiver,
}
"""ends of channels among the arguments of a call, by the word that a recording has for each"""
SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""whole numbers that MessagePack can hold"""
MakeEnd = Callable[[str, str], Any]
"""Makes the end of a channel from its kind and the channel's name."""


class NotPlain(TypeError):
    """A value cannot be recorded: nothing would say what it was."""


class NotFound(LookupError):
    """Something that a recording names is not here, or is not what it was: a module, a class, a
    field."""


def path_of(named: Any) -> str:
    """Where a class or a function can be imported: ``"module:Name"``.

    What a script defines is ``"/folder/script.py:Name"``, what was run by ``python -m`` has the
    name of its module.

    Raises:
        NotPlain: it cannot be imported from anywhere.
    """
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", "")
    if not module or "<" in name or not name:
        raise NotPlain(f"{named!r} has no name by which it could be imported")
    if module in ("__main__", "__mp_main__"):
        main = sys.modules[module]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        found = spec.name if spec is not None and module == "__main__" else file
        if found is None:
            raise NotPlain(f"{name} was defined at a prompt, not in a file")
        module = str(Path(found).resolve()) if found == file else found
    return f"{module}:{name}"


def found_at(path: str, folder: Path | None = None) -> Any:
    """The class or function of a path.

    Args:
        path: as of `path_of`.
        folder: where files of code lie that came with the recording.

    Raises:
        NotFound: naming the module or the file, and why.
    """
    module, _, name = path.rpartition(":")
    try:
        found: Any = _script(module, folder) if module.endswith(".py") else _module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except ImportError as error:
        raise NotFound(
            f"{path} cannot be imported: {error}; install it, or put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise NotFound(f"{path} is not there any more: {error}") from error
    return found


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _script(file: str, folder: Path | None) -> Any:
    """A script as a module; its own copy beside the recording goes before the file itself."""
    copy = None if folder is None else folder / Path(file).name
    path = copy if copy is not None and copy.is_file() else Path(file)
    main = sys.modules.get("__main__")
    own = getattr(main, "__file__", None)
    if own is not None and Path(own).resolve() == path.resolve():
        return main
    name = f"_recorded_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---- to plain values


def plain(value: Any, where: str = "the value") -> Any:
    """The value as plain data.

    Raises:
        NotPlain: naming the place in it, and the type that stands there.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes) or _is_array(value):
        return value
    if kind is int:
        return value if SMALLEST <= value <= LARGEST else ["int", hex(value)]
    for name, cls in END_KINDS.items():
        if isinstance(value, cls):
            end: Any = value
            return ["end", name, end.channel_name]
    if kind in (list, tuple, set, frozenset):
        parts = sorted(value, key=repr) if kind in (set, frozenset) else value
        return [kind.__name__, [plain(one, f"{where}[{at}]") for at, one in enumerate(parts)]]
    if isinstance(value, Mapping):
        pairs = [[plain(key, where), plain(one, f"{where}[{key!r}]")] for key, one in value.items()]
        return ["dict", pairs]
    return _plain_object(value, where)


def _plain_object(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        return ["member", path_of(type(value)), value.name]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return ["name", path_of(value)]
    if isinstance(value, functools.partial):
        parts = [plain(one, f"{where}.args[{at}]") for at, one in enumerate(value.args)]
        named = {name: plain(one, f"{where}.{name}") for name, one in value.keywords.items()}
        return ["partial", plain(value.func, where), parts, named]
    names = _fields(value)
    if names is None:
        raise NotPlain(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a recording "
            "cannot hold: a Struct, a dataclass, plain values, arrays and what can be imported by "
            "its name can be"
        )
    fields = {name: plain(getattr(value, name), f"{where}.{name}") for name in names}
    return ["object", path_of(type(value)), fields]


def _fields(value: Any) -> list[str] | None:
    if isinstance(value, msgspec.Struct):
        return [name for name in value.__struct_fields__ if hasattr(value, name)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [one.name for one in dataclasses.fields(value)]
    return None


def _is_array(value: Any) -> bool:
    """Whether a numpy array, a scalar of numpy or a tensor: the channels' codec takes these."""
    for library, names in (("numpy", ("ndarray", "generic")), ("torch", ("Tensor",))):
        module = sys.modules.get(library)
        if module is not None and isinstance(value, tuple(getattr(module, one) for one in names)):
            return True
    return False


# ---- and back


def restored(data: Any, make_end: MakeEnd | None = None, folder: Path | None = None) -> Any:
    """The value of plain data.

    Args:
        data: what `plain` has made, as it was decoded.
        make_end: makes the ends of channels.
        folder: see `found_at`.

    Raises:
        NotFound: a class that it names is not here, or has other fields.
    """
    if not isinstance(data, (list, tuple)):
        return data
    kind, *rest = data

    def inside(one: Any) -> Any:
        return restored(one, make_end, folder)

    match kind:
        case "list":
            return [inside(one) for one in rest[0]]
        case "tuple" | "set" | "frozenset":
            of = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return of(inside(one) for one in rest[0])
        case "dict":
            return {inside(key): inside(one) for key, one in rest[0]}
        case "int":
            return int(rest[0], 16)
        case "path":
            return Path(rest[0])
        case "name":
            return found_at(rest[0], folder)
        case "member":
            return _member(found_at(rest[0], folder), *rest)
        case "partial":
            named = {name: inside(one) for name, one in rest[2].items()}
            return functools.partial(inside(rest[0]), *map(inside, rest[1]), **named)
        case "end" if make_end is not None:
            return make_end(rest[0], rest[1])
        case "object":
            return _object(rest[0], {name: inside(one) for name, one in rest[1].items()}, folder)
    raise NotFound(f"a recorded value is a {kind!r}, which this version does not know")


def _member(cls: Any, path: str, name: str) -> Any:
    try:
        return cls[name]
    except KeyError:
        raise NotFound(f"{path} has no {name} any more") from None


def _object(path: str, fields: dict[str, Any], folder: Path | None) -> Any:
    cls = found_at(path, folder)
    known = getattr(cls, "__struct_fields__", None)
    if known is None:
        known = getattr(cls, "__dataclass_fields__", None)
    if known is None:
        raise NotFound(f"{path} is no Struct and no dataclass any more")
    if lost := sorted(set(fields) - set(known)):
        raise NotFound(
            f"{path} has no field {', '.join(lost)}, which the recording has: it was made by "
            "another version"
        )
    try:
        return cls(**fields)
    except (TypeError, ValueError) as error:
        raise NotFound(f"{path} cannot be made from what was recorded: {error}") from error


def paths_in(data: Any) -> set[str]:
    """Where everything that plain data names can be imported: ``"module:Name"``."""
    if isinstance(data, dict):
        return set[str]().union(*map(paths_in, data.values()))
    if not isinstance(data, (list, tuple)):
        return set()
    found = set[str]().union(*map(paths_in, data))
    kind, path = data[:2] if len(data) > 1 else (None, None)
    if isinstance(kind, str) and kind in ("object", "member", "name") and isinstance(path, str):
        found.add(path)
    return found
