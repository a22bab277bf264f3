"""Parts that a setting names: one way for advantages, losses, verifiers, policies, environments,
jobs, engines, trainers, scaling policies and metrics sinks. See docs/parts.md.

::

    "grpo"             built in, or registered by this process
    "mine"             of an installed package: an entry point of the registry's group
    "file.py:name"     a file as seen from the folder that the command runs in
    "module:name"      anything that can be imported

What a process registers, its workers find as well: they are told where it stands
(`names_for_workers`), in a variable of their environment, which their own children inherit.

A setting that is wrong ends a command with exit code 2 before any worker starts::

    UsageError            the user asked for something that cannot be done as asked
    +-- ConfigError       one setting is wrong: names its path, its place, and what would be right
    +-- MissingExtra      an optional dependency is not installed
    +-- MissingDevice     a device that the configuration names is not there
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path as FilePath
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import msgspec

Path = tuple[str, ...]
"""Where a setting is: ``("actor", "optimizer", "lr")``; list items go by their number."""


class UsageError(Exception):
    """The command was asked for something that cannot be done; the text says what and why."""


class ConfigError(UsageError):
    """One setting is wrong.

    The text reads ``origin: path: problem``: for example
    ``run.toml:7: actor.optimizer.lr: expected a number, found the string 'fast'``.
    """

    def __init__(self, problem: str, *, path: Path = (), origin: str = "") -> None:
        super().__init__(": ".join(part for part in (origin, dotted(path), problem) if part))
        self.problem = problem
        self.path = path
        self.origin = origin

    def at(self, origin: str) -> Self:
        """Return the error as one that comes from ``origin`` (a file and line, or a flag)."""
        return type(self)(self.problem, path=self.path, origin=origin)


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the module {module!r}, which is not installed: "
            f"pip install 'rlinf-async[{extra}]'"
        )
        self.module = module
        self.extra = extra


def needed(module: str, *, extra: str, needed_for: str) -> Any:
    """Import a module of an optional dependency.

    Raises:
        MissingExtra: it, or a module that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise MissingExtra(missing, extra=extra, needed_for=needed_for) from error


class MissingDevice(UsageError):
    """A device that the configuration names is not there."""


def raised(error: BaseException) -> str:
    """Type and text of what somebody else's code raised, whose text may be impossible to make."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be made)"


def dotted(path: Path) -> str:
    """``("envs", "0", "id")`` as a person writes it: ``envs[0].id``."""
    text = ""
    for part in path:
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no candidate is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


imported_now: list[str] = []
"""files and modules whose import by `load_entry_point` goes on, the innermost last"""
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
    imported_now.append(where)
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
    finally:
        imported_now.pop()
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
    name = f"{_FILE}{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    _loaded[name] = place, _digest(place)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_FILE = "rlinf_async_file_"
"""what the names of modules begin with that are loaded from files"""
_loaded: dict[str, tuple[FilePath, bytes]] = {}
"""file, and digest of what was loaded, by the module's name"""


def _digest(place: FilePath) -> bytes:
    try:
        return hashlib.sha256(place.read_bytes()).digest()
    except OSError:  # whoever loads it says more
        return b""


def forget_changed_files() -> None:
    """Have files whose content is another than when they were loaded, loaded anew when they are
    next asked for. What was made of them goes on as it is."""
    for name, (place, digest) in list(_loaded.items()):
        if _digest(place) != digest:
            sys.modules.pop(name, None)
            del _loaded[name]
    for registry in Registry._by_kind.values():
        registry.named.cache_clear()


class Part:
    """Description of an engine or a trainer, before and without its library.

    It stands in a module of its own that imports nothing slow; `make` does. A plain factory (a
    class or function with the arguments of `make`) is a part, too: its class attributes of the
    names that stand here count as said, the rest is as the defaults have it.
    """

    Config: ClassVar[Any] = None
    """Struct of its settings, read from the section ``options``; None: it has none"""
    library: ClassVar[str] = ""
    """module that has to be installed"""
    extra: ClassVar[str] = ""
    """extra of rlinf-async by which ``library`` is installed"""
    slow_imports: ClassVar[tuple[str, ...]] = ()
    """modules that take seconds to import and start no threads: forked workers share them"""
    factory: ClassVar[str] = ""
    """``"module:name"`` of what `make` calls"""

    def by_factory(self, *arguments: Any) -> Any:
        """Return what ``factory`` makes; the `make` of each kind says of what."""
        return load_entry_point(self.factory)(*arguments)

    @classmethod
    def of(cls, factory: Callable[..., Any]) -> Self:
        """Return the part that a plain factory is."""
        said = {name for one in cls.__mro__ for name in getattr(one, "__annotations__", ())}
        found = {name: getattr(factory, name) for name in said if hasattr(factory, name)}
        kind: Any = type(cls.__name__, (cls,), {**found, "make": staticmethod(factory)})
        part: Self = kind()
        return part

    def check_installed(self, needed_for: str) -> None:
        """Raise `MissingExtra` where the library is not there. Nothing is imported."""
        if self.library and importlib.util.find_spec(self.library) is None:
            raise MissingExtra(self.library, extra=self.extra, needed_for=needed_for)


T = TypeVar("T")

NAMES = "RLINF_ASYNC_NAMES"
"""variable with what was registered elsewhere: kind -> name -> import path"""


class UnknownName(LookupError):
    """No part has this name; the message has the nearest name and all others."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        listed = ", ".join(repr(entry) for entry in known) or "none"
        super().__init__(f"no {kind} is called {name!r}{hint} (known: {listed})")
        self.kind = kind
        self.name = name
        self.known = known


class Registry(Generic[T]):
    """Parts of one kind.

    Args:
        kind: noun, for errors.
        built_in: modules that register when they are imported, which the first look-up does.
        entries: name -> ``"module:name"``, imported when it is asked for.
        group: entry points by which packages add names; none are looked for without.
        called_with: what a part is called with, one word for each argument. One that takes others
            is refused.
        described_by: class of the parts, where these say more than how they are made.
    """

    _by_kind: dict[str, Registry[Any]] = {}  # noqa: RUF012 - every registry of this process

    def __init__(
        self,
        kind: str,
        built_in: tuple[str, ...] = (),
        *,
        entries: Mapping[str, str] | None = None,
        group: str = "",
        called_with: tuple[str, ...] | None = None,
        described_by: type[Part] | None = None,
    ) -> None:
        self.kind = kind
        self._built_in = built_in
        self.paths: dict[str, str] = dict(entries or {})
        """import paths of names that are imported when they are asked for"""
        self._group = group
        self._called_with = called_with
        self._described_by = described_by
        self._entries: dict[str, T] = {}
        self.named = functools.cache(self.load)
        """finds a part by name as `load` does, and remembers it: for what is asked at every step"""
        self._by_kind[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters its function under ``name``.

        Raises `ValueError` for a name that is taken.
        """

        def enter(entry: T) -> T:
            known = self._entries.get(name, entry)
            built_in = name in self.paths and self.paths[name] != _where(entry)
            if built_in or (known is not entry and not _same(known, entry)):
                raise ValueError(
                    f"a {self.kind} called {name!r} is registered already; choose another name"
                )
            self._entries[name] = entry
            self.named.cache_clear()  # a module that was loaded anew registers what it has now
            return entry

        return enter

    def load(self, name: str, path: Path = ()) -> T:
        """Return the part that a setting names; ``path`` is the setting, for the error.

        Raises:
            UnknownName: nothing is called so.
            ConfigError: an import path that leads to nothing, or to what takes other arguments; or
                its module raises when it is imported.
        """
        self._import_built_in()
        if name in self._entries and self._described_by is None:
            return self._entries[name]
        found: Any
        if name in self._entries:
            found = self._entries[name]
        elif name in self.paths:
            found = load_entry_point(self.paths[name], path)
        elif ":" in name or name.endswith(".py"):
            found = load_entry_point(name, path)
        elif (elsewhere := self._given_names().get(name)) is not None:
            found = load_entry_point(elsewhere, path)
            found = self._entries.get(name, found)  # its module has registered it, if it does so
        elif (installed := self._installed().get(name)) is not None:
            try:
                found = installed.load()
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"{self.kind} {name!r} of an installed package ({installed.value}) cannot be "
                    f"imported: {raised(error)}",
                    path=path,
                ) from error
        else:
            raise UnknownName(self.kind, name, self.names())
        described_by = self._described_by
        if described_by and isinstance(found, type) and issubclass(found, described_by):
            described: Any = found()
            return cast(T, described)
        if self._called_with is not None:
            check_arguments(found, name, self.kind, self._called_with, path)
        part: Any = found if described_by is None else described_by.of(found)
        return cast(T, part)

    def check(self, name: str, path: Path, *, apart: bool = False) -> T:
        """Return what `load` does; an unknown name is a `ConfigError`, too.

        ``apart``: workers in processes of their own load it: they have to find it.
        """
        try:
            part = self.load(name, path)
        except UnknownName as error:
            raise ConfigError(str(error), path=path) from error
        if apart and name in self._entries and not _imported_from(self._entries[name]):
            raise ConfigError(
                f"{self.kind} {name!r} was registered in this process, and other processes cannot "
                "import it: define it at the top of a module or file, not in a function and not "
                "under `if __name__ == '__main__'`",
                path=path,
            )
        return part

    def __getitem__(self, name: str) -> T:
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def names(self) -> list[str]:
        """Return all names that are known here, sorted."""
        self._import_built_in()
        return sorted({*self._entries, *self.paths, *self._given_names(), *self._installed()})

    def import_paths(self) -> dict[str, str]:
        """Return where parts stand that this process, or one above it, has registered."""
        own = {
            name: where
            for name, entry in self._entries.items()
            if not _module(entry).startswith("rlinf_async.") and (where := _imported_from(entry))
        }
        return self._given_names() | own

    def _import_built_in(self) -> None:
        for module in self._built_in:
            importlib.import_module(module)

    def _installed(self) -> dict[str, Any]:
        return {one.name: one for one in entry_points(group=self._group)} if self._group else {}

    def _given_names(self) -> dict[str, str]:
        text = os.environ.get(NAMES)
        if not text:
            return {}
        return msgspec.json.decode(text, type=dict[str, dict[str, str]]).get(self.kind, {})


def names_for_workers() -> dict[str, str]:
    """Return the variables by which a worker finds what this process has registered."""
    found = {kind: one.import_paths() for kind, one in Registry._by_kind.items()}
    found = {kind: paths for kind, paths in found.items() if paths}
    return {NAMES: msgspec.json.encode(found).decode()} if found else {}


def check_arguments(
    part: Any, name: str, kind: str, called_with: tuple[str, ...], path: Path = ()
) -> None:
    """Raise `ConfigError` where a part cannot be called with these arguments."""
    try:
        inspect.signature(part).bind(*called_with)
    except TypeError as error:
        with_what = ", ".join(called_with) or "nothing"
        raise ConfigError(
            f"{name!r} takes other arguments ({error}): a {kind} is called with {with_what}",
            path=path,
        ) from error
    except ValueError:  # the signature of something written in C cannot be read
        pass


def import_path(entry: object) -> str:
    """Return where a class or function is imported from, ``"module:name"``; empty if nowhere."""
    return _imported_from(entry)


def _module(entry: object) -> str:
    return str(getattr(entry, "__module__", ""))


def _same(left: object, right: object) -> bool:
    """Whether both are of one place in a file: run twice, it has made two of them."""
    return bool(where := _where(left)) and where == _where(right)


def _imported_from(entry: object) -> str:
    """Where another process imports this from; empty where it has to be defined elsewhere."""
    where = _where(entry)
    file, _, name = where.rpartition(":")
    return "" if file.endswith(".py") and _only_in_main(FilePath(file), name) else where


def _only_in_main(file: FilePath, name: str) -> bool:
    """Whether a script defines this where it is the program that was started, and only there."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # it was changed since it began
        return False
    main = [one for one in body if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    return _defines(main, name) and not _defines([one for one in body if one not in main], name)


def _defines(code: list[Any], name: str) -> bool:
    return any(getattr(one, "name", "") == name for part in code for one in ast.walk(part))


def _where(entry: object) -> str:
    """The import path of a function or class; empty if it has none."""
    name, module = getattr(entry, "__qualname__", ""), sys.modules.get(_module(entry))
    if not name.isidentifier() or module is None:
        return ""
    own = module.__name__
    if own in ("__main__", "__mp_main__") or own.startswith("rlinf_async_file_"):
        file = getattr(module, "__file__", None)
        return f"{os.path.abspath(file)}:{name}" if file else ""
    return f"{own}:{name}"
