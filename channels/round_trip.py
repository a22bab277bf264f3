"""Whether a value would arrive in another process as what it is: the one rule for everything that
is put or published, given to a call, or returned by one, the same wherever it goes.

A value may be sent if what arrives is equal to it and of the same classes, all through: as its type
says, and where that says nothing, as `untyped` says. Inside one process a value is handed over by
reference and nothing would change it; it is held to the same rule, so that what runs there runs
between processes and hosts too.

Most values are plain, and exactly as their type says: `quick_check` sees that in a moment. Any
other is encoded and decoded on the spot (its large arrays are not copied), and compared.

What docs/channels.md says of items stays allowed: an int where a float is due, a numpy scalar that
arrives as a number, a parameter or a memory map that arrives as a plain tensor or array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlinf_async.channels.encoded import Encoded, Form, LookedAt
from rlinf_async.channels.errors import MalformedFrame, WrongItemType
from rlinf_async.channels.itemtypes import parts_of, type_name
from rlinf_async.channels.quick_check import Fits, quick_check
from rlinf_async.channels.untyped import packed, packer


class RoundTrip:
    """Checks the values of one type.

    Args:
        what: begins each error: what is wrong if a value is refused.
        encode: the value as it travels; raises `WrongItemType`.
        decode: the value again; raises `MalformedFrame`.
    """

    def __init__(
        self,
        value_type: Any,
        what: str,
        encode: Callable[[Any], Encoded],
        decode: Callable[[Encoded], Any],
    ) -> None:
        self.fits: Fits = quick_check(value_type)
        """true for most values that `check` lets pass"""
        self._what = what
        self._encode = encode
        self._decode = decode

    def check(self, value: object) -> None:
        """Refuse a value that would not arrive as what it is.

        Raises:
            WrongItemType: naming what it is for, the place in the value, and what is there.
        """
        if self.fits(value):
            return
        name = type(value).__name__
        try:
            encoded = self._encode(value)
            arrived = self._decode(Encoded(encoded.data, LookedAt(encoded.buffers)))
        except WrongItemType as error:
            raise WrongItemType(f"{self._what}: {error}") from error
        except MalformedFrame as error:
            why = _explain(error.__cause__, name) or f"{name}: {error}"
            raise WrongItemType(f"{self._what}: {why}") from error
        change = _change(value, arrived, name)
        if change:
            raise WrongItemType(f"{self._what}: {change}")


def round_trip_check(item_type: Any, channel: str, form: Form | None = None) -> RoundTrip:
    """The check of a channel's items.

    Raises:
        TypeError: items of this type cannot travel.
    """
    from rlinf_async.channels.wire.items.item_codec import ItemCodec  # its package imports this

    codec = ItemCodec(item_type, form)
    what = f"channel {channel!r} carries {type_name(item_type)}"
    return RoundTrip(item_type, what, codec.encode, codec.decode)


def value_check(value_type: Any, what: str) -> RoundTrip:
    """The check of an argument or a result.

    Raises:
        TypeError: values of this type cannot travel.
    """
    from rlinf_async.channels.wire.items.codec import Decoder, Encoder  # its package imports this

    encoder, decoder, pack = Encoder(), Decoder(value_type), packer(value_type)

    def encode(value: Any) -> Encoded:
        return encoder.encode(value if pack is None else packed(value, pack))

    return RoundTrip(value_type, what, encode, decoder.decode)


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
    if kind is int and found is float:  # not all that are large have a float
        return "" if sent == arrived else f"{path}: {sent} would arrive as {arrived}"
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


def _stands_for(sent: Any, arrived: object) -> bool:
    """Whether a value may arrive as one of another class."""
    if _is_of("numpy", sent):
        plain = isinstance(arrived, bool | int | float | str | bytes)
        return _is_of("numpy", arrived) or (plain and sent.dtype.kind in "biufSU")
    return _is_of("torch", sent) and _is_of("torch", arrived)


def _is_of(library: str, value: object) -> bool:
    return type(value).__module__.partition(".")[0] == library
