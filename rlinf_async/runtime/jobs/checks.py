"""What of any configuration can be held against this host and against what is registered here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from rlinf_async.config import ConfigError, MissingDevice
from rlinf_async.observe.errors import MetricsError
from rlinf_async.observe.metrics import find_sink
from rlinf_async.runtime.placement import host_devices


class Table(Protocol):
    """A registry, as far as it is asked here."""

    kind: str

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> list[str]: ...


def check_device(wanted: str, *, actors: int, path: tuple[str, ...]) -> None:
    """Raise where the actors' device cannot be, or is not on this host.

    Args:
        wanted: as torch names it.
        actors: ranks that take one each.
        path: of the setting that names it.

    Raises:
        ConfigError: it is not a device's name.
        MissingDevice: there is none of it.
    """
    setting = ".".join(path)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ConfigError(f"{wanted!r} is no device: write 'cpu', 'cuda' or 'cuda:1'", path=path)
    if wanted == "cpu":
        return
    if ":" in wanted and actors > 1:
        raise ConfigError(
            f"{actors} actors cannot share {wanted!r}: write 'cuda', and each takes one of its own",
            path=path,
        )
    there = [device for device in host_devices() if device.kind == "cuda"]
    if not there:
        raise MissingDevice(
            f"{setting}: {wanted!r} is asked for, but this host has no accelerator: use 'cpu'"
        )
    if ":" in wanted and wanted not in map(str, there):
        raise MissingDevice(
            f"{setting}: {wanted!r} is asked for, but this host has {', '.join(map(str, there))}"
        )
    if actors > len(there):
        raise MissingDevice(
            f"cluster.actors: {actors} actors need an accelerator each, but this host has "
            f"{', '.join(map(str, there))}"
        )


def check_sinks(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a metrics sink that is not installed."""
    for name in names:
        try:
            find_sink(name)
        except MetricsError as error:
            raise ConfigError(str(error), path=("training", "metrics")) from error


def refuse_unknown(table: Table, name: str, path: tuple[str, ...]) -> None:
    """Raise `ConfigError` for a name that is not in the registry; says the nearest."""
    from rlinf_async.algorithms.registry import UnknownName

    if name not in table:
        raise ConfigError(str(UnknownName(table.kind, name, table.names())), path=path)
