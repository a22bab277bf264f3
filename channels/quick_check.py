"""A quick look whether a value is certainly one that a channel, a call or a result may carry.

Made once for each type, as a function of its own: whatever is exactly as the type says, plain all
through, passes it. What does not pass is not refused by that: `round_trip` looks at it closely.

Whether a value would arrive in another process as what it is: the one rule for everything that
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

import dataclasses
import enum
import keyword
import marshal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

from rlinf_async.channels.errors import MalformedFrame, WrongItemType
from rlinf_async.channels.untyped import (
    Encoded,
    Form,
    LookedAt,
    dtypes_of,
    packed,
    packer,
    parts_of,
    type_name,
)

Fits = Callable[[Any], bool]

_LEAST: Final = -(2**63)
_BEYOND: Final = 2**64
"""The whole numbers that MessagePack has: from the one to before the other."""
_SMALL: Final = 2**30 - 1
"""Between this and its opposite, CPython compares at once."""
EXACT: Final = 2**53
"""Each whole number up to it is one that a float has."""
NUMBERS: Final = "biuf"
"""Kinds of dtypes of numpy."""
MAX_DEPTH: Final = 40
"""What is nested deeper where the type says nothing is looked at closely."""


def quick_check(item_type: Any) -> Fits:
    """True for a value that certainly arrives as what it is."""
    try:
        return _cached(item_type)
    except TypeError:  # it cannot be hashed
        return _made(item_type)


@lru_cache(maxsize=1024)
def _cached(item_type: Any) -> Fits:
    return _made(item_type)


def _made(item_type: Any) -> Fits:
    writer = _Writer()
    if isinstance(item_type, type) and _is_message(item_type):
        return writer.of_message(item_type, ())
    return writer.function(f"if {writer.said_of(item_type, 'x', ())}: return True")


class _Writer:
    """Writes the functions; ``x`` is the value that each looks at."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {
            "int_list": _int_list,
            "only": _only,
            "text": _text,
            "plain": _plain,
            "tensor_fits": _tensor_fits,
        }

    def function(self, body: str, last: bool = False) -> Fits:
        """What returns ``last`` if the body does not return before."""
        exec(f"def made(x):\n {body}\n return {last}", self._names)
        made: Fits = self._names.pop("made")
        return made

    def named(self, what: object) -> str:
        """A name by which what is written refers to this."""
        name = f"n{len(self._names)}"
        self._names[name] = what
        return name

    def said_of(self, kind: Any, x: str, inside: tuple[type, ...]) -> str:
        """An expression that is true where the value called ``x`` certainly fits."""
        origin, args = get_origin(kind), get_args(kind)
        if kind is Any or kind is object:
            return f"plain({x})"
        if kind is None or kind is NoneType:
            return f"{x} is None"
        if kind is int:
            small = f"{x} < {_SMALL} and {x} > -{_SMALL}"  # in a chain it is not seen at once
            return f"({x}.__class__ is int and ({small} or {_LEAST} <= {x} < {_BEYOND}))"
        if kind is float:
            return (
                f"({x}.__class__ is float or ({x}.__class__ is int and {-EXACT} <= {x} <= {EXACT}))"
            )
        if kind is str:
            return f"({x}.__class__ is str and ({x}.isascii() or text({x})))"
        if kind is bool or kind is bytes or _is_enum(kind):
            return f"{x}.__class__ is {self.named(kind)}"
        if origin is Literal:
            return self._said_of_values(args, x)
        if isinstance(kind, NewType):
            return self.said_of(kind.__supertype__, x, inside)
        if origin in (Union, UnionType):
            return f"({' or '.join(self.said_of(one, x, inside) for one in args)})"
        if kind in (list, dict):
            return f"({x}.__class__ is {kind.__name__} and plain({x}))"
        if origin in (list, tuple, dict):
            said = self._said_of_parts(origin, args, x, inside)
            return f"({x}.__class__ is {origin.__name__} and {said})"
        if (origin or kind) is _class_in("numpy", "ndarray"):
            one_of = [_class_in("numpy", "dtype")(scalar) for scalar in dtypes_of(kind)]
            numbers = {dtype for dtype in one_of if dtype.kind in NUMBERS}
            said = f" in {self.named(numbers)}" if one_of else f".kind in {NUMBERS!r}"
            return f"({x}.__class__ is {self.named(origin or kind)} and {x}.dtype{said})"
        if kind is _class_in("torch", "Tensor"):
            return f"tensor_fits({x})"
        if isinstance(kind, type) and kind not in inside and _is_message(kind):
            return f"{self.named(self.of_message(kind, inside))}({x})"
        return "False"

    def _said_of_values(self, values: tuple[Any, ...], x: str) -> str:
        """Those of a ``Literal``. To Python 1, 1.0 and True are equal."""
        by_class: dict[type, set[Any]] = {}
        for value in values:
            by_class.setdefault(type(value), set()).add(value)
        one_of = [
            f"({x}.__class__ is {self.named(kind)} and {x} in {self.named(some)})"
            for kind, some in by_class.items()
        ]
        return f"({' or '.join(one_of)})"

    def _said_of_parts(
        self, origin: type, args: tuple[Any, ...], x: str, inside: tuple[type, ...]
    ) -> str:
        if origin is dict:
            key, value = (self.said_of(kind, f"p{at}", inside) for at, kind in enumerate(args))
            return self._said_of_each("p0, p1 in x.items()", f"{key} and {value}", x)
        if origin is tuple and args[-1:] != (...,):
            parts = [self.said_of(one, f"{x}[{at}]", inside) for at, one in enumerate(args)]
            return " and ".join([f"len({x}) == {len(args)}", *parts])
        if args[0] is int:
            return f"int_list({x})"
        if args[0] in (float, bool, bytes):
            return f"only({self.named({args[0]})}, {x})"
        return self._said_of_each("p in x", self.said_of(args[0], "p", inside), x)

    def _said_of_each(self, parts: str, said: str, x: str) -> str:
        each = self.function(f"for {parts}:\n  if not ({said}): return False", last=True)
        return f"{self.named(each)}({x})"

    def of_message(self, cls: type, inside: tuple[type, ...]) -> Fits:
        said = [f"x.__class__ is {self.named(cls)}"]
        for name, kind in get_type_hints(cls, include_extras=True).items():
            if name in _field_names(cls):
                of_field = self.said_of(kind, "v", (*inside, cls))
                said.append(of_field.replace("v", f"(v := {_attribute(name)})", 1))
        return self.function(
            f"try:\n  if {' and '.join(said)}: return True\n except AttributeError: pass"
        )


def _attribute(name: str) -> str:
    """A field of ``x``; one that is not named in a class statement may have any name."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return f"x.{name}"
    return f"getattr(x, {name!r})"


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _class_in(library: str, name: str) -> Any:
    """A class of a library that is loaded; no type is equal to what stands for one that is not."""
    return getattr(sys.modules.get(library), name, library)


def _field_names(cls: type) -> tuple[str, ...]:
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    message: Any = cls
    return tuple(field.name for field in dataclasses.fields(message) if field.init)


def _is_message(cls: type) -> bool:
    """Whether a class has fields, and nothing else happens when one is made of them."""
    if hasattr(cls, "__post_init__"):
        return False
    if issubclass(cls, msgspec.Struct):
        return True
    return dataclasses.is_dataclass(cls) and all(field.init for field in dataclasses.fields(cls))


# ---- called by what was written


def _int_list(values: Any) -> bool:
    try:
        written = marshal.dumps(values, 2)
    except ValueError:  # something in it is not plain
        return False
    if written[5::5] == b"i" * len(values):  # as all ints of 32 bits are written, and nothing else
        return True
    return _only({int}, values) and min(values) >= _LEAST and max(values) < _BEYOND


def _only(classes: set[type], values: Any) -> bool:
    return classes.issuperset(map(type, values))


def _text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _plain(value: Any, depth: int = 0) -> bool:
    kind = value.__class__
    if kind is float or kind is bool or kind is bytes or value is None:
        return True
    if kind is int:
        return bool(_LEAST <= value < _BEYOND)
    if kind is str:
        return _text(value)
    if depth > MAX_DEPTH:
        return False
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return all(_plain(one, depth + 1) for one in value)
    if kind is dict:
        return _only({str, int}, value) and all(
            _plain(key) and _plain(one, depth + 1) for key, one in value.items()
        )
    return _array_fits(value) or _tensor_fits(value)


def _array_fits(value: Any) -> bool:
    """Whether this is an array of numbers."""
    return value.__class__ is _class_in("numpy", "ndarray") and value.dtype.kind in NUMBERS


def _tensor_fits(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and value.__class__ is torch.Tensor
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
    )


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
    from rlinf_async.channels.wire.codec import ItemCodec  # its package imports this

    codec = ItemCodec(item_type, form)
    what = f"channel {channel!r} carries {type_name(item_type)}"
    return RoundTrip(item_type, what, codec.encode, codec.decode)


def value_check(value_type: Any, what: str) -> RoundTrip:
    """The check of an argument or a result.

    Raises:
        TypeError: values of this type cannot travel.
    """
    from rlinf_async.channels.wire.codec import Decoder, Encoder  # its package imports this

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
