"""Whether an item would arrive in another process as what it is.

Inside one process an item is handed over by reference, and nothing looks into its fields: a Struct
with a wrong value there passes, and would fail between two processes, at the receiver. With
``RLINF_ASYNC_CHECK_ITEMS=1`` in the environment every item that is put or published is encoded and
decoded on the spot, and refused if its receiver could not read it, or would read something else.

What docs/channels.md says of items stays allowed: an int where a float is due, a numpy scalar that
arrives as a number, a parameter or a memory map that arrives as a plain tensor or array.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rlinf_async.channels.encoded import Form
from rlinf_async.channels.errors import MalformedFrame, WrongItemType
from rlinf_async.channels.itemtypes import parts_of, type_name

VARIABLE: Final = "RLINF_ASYNC_CHECK_ITEMS"


class RoundTrip:
    """Checks the items of one channel. See `round_trip_check`."""

    def __init__(self, item_type: Any, channel: str, form: Form | None) -> None:
        from rlinf_async.channels.wire.items.item_codec import ItemCodec  # its package imports this

        self._codec = ItemCodec(item_type, form)
        self._carries = f"channel {channel!r} carries {type_name(item_type)}"

    def check(self, item: object) -> None:
        """Refuse an item that would not arrive as what it is.

        Raises:
            WrongItemType: naming the channel, its type, the place in the item, and what is there.
        """
        name = type(item).__name__
        try:
            arrived = self._codec.decode(self._codec.encode(item))
        except WrongItemType as error:
            raise WrongItemType(f"{self._carries}: {error}") from error
        except MalformedFrame as error:
            why = _explain(error.__cause__, name) or f"{name}: {error}"
            raise WrongItemType(f"{self._carries}: {why}") from error
        change = _change(item, arrived, name)
        if change:
            raise WrongItemType(f"{self._carries}: {change}")


def round_trip_check(item_type: Any, channel: str, form: Form | None = None) -> RoundTrip | None:
    """The check of this channel's items; None where it is not turned on.

    Raises:
        TypeError: items of this type cannot travel.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return None
    return RoundTrip(item_type, channel, form)


def _explain(error: BaseException | None, name: str) -> str:
    """What msgspec says of a value, with the place as it is written in Python."""
    if not isinstance(error, msgspec.ValidationError):
        return ""
    said, found, path = str(error).rpartition(" - at `$")
    return f"{name}{path.rstrip('`')}: {_lower(said)}" if found else f"{name}: {_lower(path)}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _change(sent: object, arrived: object, path: str) -> str:
    """Where an item would change on its way, and how; empty if nowhere."""
    kind, found = type(sent), type(arrived)
    if kind is not found and not _stands_for(sent, arrived):
        return f"{path}: {kind.__name__} would arrive as {found.__name__}"
    if isinstance(sent, Mapping) and isinstance(arrived, Mapping):
        for key, other in zip(sent, arrived, strict=False):
            if change := _change(key, other, f"{path}: the key {key!r:.40}"):
                return change
    parts, others = parts_of(sent), parts_of(arrived)
    if len(parts) != len(others):
        return f"{path}: {len(parts)} parts would arrive as {len(others)}"
    for (step, part), (_, other) in zip(parts, others, strict=True):
        if change := _change(part, other, f"{path}{step}"):
            return change
    return ""


def _stands_for(sent: object, arrived: object) -> bool:
    """Whether a value may arrive as one of another class."""
    if isinstance(arrived, float):
        return type(sent) is int or _is_of("numpy", sent)
    return _is_of("numpy", sent) or _is_of("torch", sent)


def _is_of(library: str, value: object) -> bool:
    return type(value).__module__.partition(".")[0] == library
