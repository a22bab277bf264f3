"""Splitting ``FILE.toml --section.field value ...`` into the file and the overrides."""

from __future__ import annotations

from collections.abc import Sequence

import click


def split(tokens: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The configuration file and ``{"section.field": "value"}``.

    ``--section.field=value`` is the same; a flag that another flag or the end follows means true.
    Raises `click.UsageError` unless there is exactly one file.
    """
    files: list[str] = []
    overrides: dict[str, str] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            files.append(token)
            continue
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        overrides[name] = value
    return _only(files), overrides


def _only(files: Sequence[str]) -> str:
    if len(files) == 1:
        return files[0]
    if not files:
        raise click.UsageError("which configuration? Give a FILE.toml (see examples/).")
    raise click.UsageError(
        f"one configuration file at a time, found {len(files)}: {', '.join(files)}. "
        "A setting is written --section.field value."
    )
