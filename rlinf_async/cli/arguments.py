"""Splitting ``FILE.toml --section.field value ...`` into the file and the overrides."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import click


def split(
    tokens: Sequence[str], out: pathlib.Path | None = None
) -> tuple[str, dict[str, str | None]]:
    """The configuration file and ``{"section.field": "value"}``.

    ``--section.field=value`` is the same; a flag that another flag or the end follows has None.
    ``out`` is the run folder, if one was named: a file that is missing may be in there.
    Raises `click.UsageError` unless there is exactly one file.
    """
    files: list[str] = []
    overrides: dict[str, str | None] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            files.append(token)
            continue
        name, equals, value = token.removeprefix("--").partition("=")
        given = equals or (rest and not rest[0].startswith("--"))
        overrides[name] = (value if equals else rest.pop(0)) if given else None
    return _only(files, out), overrides


def _only(files: Sequence[str], out: pathlib.Path | None) -> str:
    if len(files) == 1:
        return files[0]
    if not files:
        kept = None if out is None else out / "config.toml"
        if kept is not None and kept.is_file():
            raise click.UsageError(
                f"which configuration? Give the FILE.toml of the run; {kept} is what it ran with."
            )
        raise click.UsageError("which configuration? Give a FILE.toml (see examples/).")
    raise click.UsageError(
        f"one configuration file at a time, found {len(files)}: {', '.join(files)}. "
        "A setting is written --section.field value."
    )
