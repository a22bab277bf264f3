"""What a channel can carry: the one rule for everything that is put or published, given to a call,
or returned by one.

A value may be sent if what arrives is equal to it and of the same classes, all through, under the
type that is declared. Anything else is refused, inside one process as between two: so what runs in
one runs between processes and hosts too. Where the type says nothing (``Any``, ``object``, a bare
``list``), MessagePack alone remains: ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``,
lists and dicts of these, arrays and tensors.

* A type of which no value could be sent is refused where the channel is made.
* A value that is plain, and exactly as its type says, is seen to be that in a moment, by a function
  that is written for its type (`quick_check`).
* Any other value is encoded and decoded on the spot (its large arrays are not copied), and compared
  (`ItemRule.check`).

What docs/channels.md says of items stays allowed: an int where a float is due, a numpy scalar that
arrives as a number, a parameter or a memory map that arrives as a plain tensor or array.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import marshal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    NewType,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import inspect as types

from rlinf_async.channels.encoded import (
    Encoded,
    Form,
    LookedAt,
    dtypes_of,
    members,
    parts_of,
    runtime_classes,
    type_name,
)
from rlinf_async.channels.errors import MalformedFrame, WrongItemType


def decodes_alike(item_type: Any) -> bool:
    """Whether items of this type arrive as the same where the reader only knows ``Any``."""
    try:
        infos = _infos(item_type)
    except (TypeError, NameError):
        return False
    return all(isinstance(part, _ALIKE) for info in infos for _, part in _all_parts(info))


_ALIKE: Final = (
    types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType,
    types.BytesType, types.ListType, types.DictType, types.CustomType, types.UnionType,
    types.Metadata, types.TypedDictType,
)  # fmt: skip


def _infos(item_type: Any) -> Sequence[types.Type]:
    """What msgspec knows of a type; of a union whose members it cannot tell apart, of each."""
    try:
        return [types.type_info(item_type)]
    except TypeError:
        return types.multi_type_info(members(item_type))


def _all_parts(info: types.Type) -> Iterator[tuple[str, types.Type]]:
    """A type and all types inside it, each once (a type may contain itself) and behind the steps
    that lead to it."""
    waiting, seen = [("", info)], {id(info)}
    for path, one in waiting:
        yield path, one
        for step, part in _inside(one):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append((path + step, part))


def _inside(info: Any) -> list[tuple[str, types.Type]]:
    if isinstance(info, types.UnionType):
        return [("", one) for one in info.types]
    if isinstance(info, types.TupleType):
        return [(f"[{at}]", one) for at, one in enumerate(info.item_types)]
    if isinstance(info, types.DictType):
        return [("[key]", info.key_type), ("[...]", info.value_type)]
    if isinstance(info, types.CollectionType):  # lists, sets, and tuples of any length
        return [("[...]", info.item_type)]
    if isinstance(info, types.Metadata):
        return [("", info.type)]
    return [(f".{field.name}", field.type) for field in getattr(info, "fields", ())]


def _refuse_type(item_type: Any, ends: tuple[type, ...]) -> None:
    """Refuse a type with a place of which no value could arrive."""
    name = type_name(item_type)
    for info in _infos(item_type):
        for path, part in _all_parts(info):
            if isinstance(part, types.CustomType) and not _arrives_as(part.cls, ends):
                raise TypeError(
                    f"{name} cannot travel between processes: at {name}{path}, "
                    f"a {type_name(part.cls)}: declare a msgspec.Struct, a dataclass, plain "
                    "values, numpy arrays or torch tensors there"
                )


def _arrives_as(cls: Any, ends: tuple[type, ...]) -> bool:
    """Whether some value that arrives is of a class that msgspec does not know."""
    arrays = [_class_in("numpy", "ndarray"), _class_in("torch", "Tensor")]
    known = [one for one in (*_PLAIN, *arrays, *ends) if isinstance(one, type)]
    try:
        return any(issubclass(one, cls) for one in known)
    except TypeError:  # a protocol that is not checked at run time
        return False


_PLAIN: Final = (type(None), bool, int, float, str, bytes, list, dict)


def _class_in(library: str, name: str) -> Any:
    """A class of a library that is loaded; no type is equal to what stands for one that is not."""
    return getattr(sys.modules.get(library), name, library)


# ---- values that certainly arrive as what they are

Fits = Callable[[Any], bool]

_LEAST: Final = -(2**63)
_BEYOND: Final = 2**64
"""The whole numbers that MessagePack has: from the one to before the other."""
_SMALL: Final = 2**30 - 1
"""largest int, up to sign, that CPython compares in one step"""
EXACT: Final = 2**53
"""Each whole number up to it is one that a float has."""
NUMBERS: Final = "biuf"
"""Kinds of dtypes of numpy."""
MAX_DEPTH: Final = 40
"""What is nested deeper where the type says nothing is looked at closely."""

_SAID: Final[dict[Any, str]] = {
    Any: "plain({x})",
    object: "plain({x})",
    None: "{x} is None",
    NoneType: "{x} is None",
    bool: "{x}.__class__ is bool",
    bytes: "{x}.__class__ is bytes",
    list: "({x}.__class__ is list and plain({x}))",
    dict: "({x}.__class__ is dict and plain({x}))",
    int: "({x}.__class__ is int and "  # in a chain a small number is not seen at once
    f"({{x}} < {_SMALL} and {{x}} > -{_SMALL} or {_LEAST} <= {{x}} < {_BEYOND}))",
    float: "({x}.__class__ is float or "
    f"({{x}}.__class__ is int and {-EXACT} <= {{x}} <= {EXACT}))",
    str: "({x}.__class__ is str and ({x}.isascii() or text({x})))",
}
"""what is true of a value ``x`` of a plain type that certainly fits"""


def quick_check(item_type: Any, ends: tuple[type, ...] = ()) -> Fits:
    """True for a value that certainly arrives as what it is. What does not pass is not refused by
    that: see `ItemRule.check`.

    Args:
        ends: classes of ends of channels, where they may be sent.

    Raises:
        TypeError: no value of this type could be sent.
    """
    try:
        return _cached(item_type, ends)
    except TypeError:  # it cannot be hashed, or is refused
        return _made(item_type, ends)


@lru_cache(maxsize=1024)
def _cached(item_type: Any, ends: tuple[type, ...]) -> Fits:
    return _made(item_type, ends)


def _made(item_type: Any, ends: tuple[type, ...]) -> Fits:
    _refuse_type(item_type, ends)
    writer = _Writer()
    if (names := _field_names(item_type)) is not None:
        return writer.of_message(item_type, names, ())
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
        """An expression that is true where the value called ``x`` certainly fits.

        ``inside``: messages in which it stands; one that contains itself is looked at closely.
        """
        origin, args = get_origin(kind), get_args(kind)
        if origin in (list, dict) and not args:  # `typing.List` without its parts
            return self.said_of(origin, x, inside)
        if origin is None and kind in _SAID:
            return _SAID[kind].format(x=x)
        if isinstance(kind, NewType):
            return self.said_of(kind.__supertype__, x, inside)
        if isinstance(kind, enum.EnumType):
            return f"{x}.__class__ is {self.named(kind)}"
        if origin is Literal:
            return self._said_of_values(args, x)
        if origin in (Union, UnionType):
            return f"({' or '.join(self.said_of(one, x, inside) for one in args)})"
        if origin in (list, tuple, dict):
            said = self._said_of_parts(origin, args, x, inside)
            return f"({x}.__class__ is {origin.__name__} and {said})"
        if (origin or kind) is _class_in("numpy", "ndarray"):
            return self._said_of_array(kind, x)
        if kind is _class_in("torch", "Tensor"):
            return f"tensor_fits({x})"
        names = None if kind in inside else _field_names(kind)
        if names is None:
            return "False"
        return f"{self.named(self.of_message(kind, names, inside))}({x})"

    def _said_of_values(self, values: tuple[Any, ...], x: str) -> str:
        """Return the condition for the values of a ``Literal``. To Python 1, 1.0 and True are
        equal."""
        by_class: dict[type, set[Any]] = {}
        for value in values:
            by_class.setdefault(type(value), set()).add(value)
        one_of = [
            f"({x}.__class__ is {self.named(kind)} and {x} in {self.named(some)})"
            for kind, some in by_class.items()
        ]
        return f"({' or '.join(one_of)})"

    def _said_of_array(self, kind: Any, x: str) -> str:
        one_of = [_class_in("numpy", "dtype")(scalar) for scalar in dtypes_of(kind)]
        numbers = {dtype for dtype in one_of if dtype.kind in NUMBERS}
        said = f" in {self.named(numbers)}" if one_of else f".kind in {NUMBERS!r}"
        return f"({x}.__class__ is {self.named(get_origin(kind) or kind)} and {x}.dtype{said})"

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

    def of_message(self, cls: type, names: tuple[str, ...], inside: tuple[type, ...]) -> Fits:
        said = [f"x.__class__ is {self.named(cls)}"]
        for name, kind in get_type_hints(cls, include_extras=True).items():
            if name in names:
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


def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Return the fields of a class whose instances are made of them and of nothing else; None of
    any other type."""
    if not isinstance(cls, type):
        return None
    if hasattr(cls, "__post_init__") and not _never_changes(cls):
        return None  # it would be checked again where it arrives
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else None
    if fields is None or not all(field.init for field in fields):
        return None
    return tuple(field.name for field in fields)


_CONSTANT: Final = (bool, int, float, str, bytes, None, NoneType)


def _never_changes(kind: Any, inside: tuple[type, ...] = ()) -> bool:
    """Whether values of a type stay as they were made, all through.

    ``inside``: messages in which it stands; in one that contains itself the other fields decide.
    """
    if kind in inside:
        return True
    parts = [one for one in get_args(kind) if one is not ...]
    if parts and get_origin(kind) in (Union, UnionType, tuple):
        return all(_never_changes(one, inside) for one in parts)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = get_type_hints(kind, include_extras=True).values()
        frozen = kind.__struct_config__.frozen
        return frozen and all(_never_changes(one, (*inside, kind)) for one in fields)
    return kind in _CONSTANT or get_origin(kind) is Literal or isinstance(kind, enum.EnumType)


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
    if kind is list:
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


# ---- values that are looked at closely


class ItemRule:
    """Checks the values of one type.

    Args:
        what: begins each error: where a value is refused, and what is declared there.
        encode: returns the value as it travels; raises `WrongItemType`.
        decode: returns the value again; raises `MalformedFrame`.
        ends: classes of ends of channels, where they may be sent.

    Raises:
        TypeError: no value of this type could be sent.
    """

    def __init__(
        self,
        item_type: Any,
        what: str,
        encode: Callable[[Any], Encoded],
        decode: Callable[[Encoded], Any],
        ends: tuple[type, ...] = (),
    ) -> None:
        self._classes = runtime_classes(item_type)
        self.fits: Fits = quick_check(item_type, ends)
        """true for most values that `check` lets pass"""
        self._what = what
        self._encode = encode
        self._decode = decode

    def check(self, value: object) -> None:
        """Refuse a value that would not arrive as what it is.

        Raises:
            WrongItemType: naming where it is refused, the place in the value, what is there, and
                what to do.
        """
        if self.fits(value):
            return
        name = type(value).__name__
        if not self._is_of_type(value):
            raise WrongItemType(f"{self._what}, not {name} (got {_short(value)})")
        try:
            encoded = self._encode(value)
            arrived = self._decode(Encoded(encoded.data, LookedAt(encoded.buffers)))
            change = _change(value, arrived, name)
        except WrongItemType as error:
            raise WrongItemType(f"{self._what}: {error}") from error
        except MalformedFrame as error:
            why = _explain(error.__cause__, name) or f"{name}: {error}"
            raise WrongItemType(f"{self._what}: {why}") from error
        except RecursionError:
            change = f"{name} is nested too deeply to travel, or contains itself"
        if change:
            raise WrongItemType(f"{self._what}: {change}")

    def _is_of_type(self, value: object) -> bool:
        # to Python a bool is an int, to MessagePack it is not
        if value.__class__ is bool and {bool, object}.isdisjoint(self._classes):
            return False
        return isinstance(value, self._classes)


def channel_rule(item_type: Any, channel: str, form: Form | None = None) -> ItemRule:
    """The rule for a channel's items.

    Raises:
        TypeError: items of this type cannot travel.
    """
    from rlinf_async.channels.wire.codec import ItemCodec  # its package imports this

    runtime_classes(item_type)  # what is no type is refused as that
    codec = ItemCodec(item_type, form)
    what = f"channel {channel!r} carries {type_name(item_type)}"
    return ItemRule(item_type, what, codec.encode, codec.decode)


def value_rule(value_type: Any, what: str, ends: tuple[type, ...] = ()) -> ItemRule:
    """The rule for an argument or a result.

    Raises:
        TypeError: values of this type cannot travel.
    """
    from rlinf_async.channels.wire.codec import Decoder, Encoder  # its package imports this

    def encode(value: Any) -> Encoded:
        return Encoder().encode(value)

    def decode(encoded: Encoded) -> Any:
        return Decoder(value_type).decode(encoded)

    # New ones for each value: a method is called from any thread, and they are for one.
    return ItemRule(value_type, what, encode, decode, ends)


def _explain(error: BaseException | None, name: str) -> str:
    """What msgspec says of a value, with the place as it is written in Python."""
    if not isinstance(error, msgspec.ValidationError):
        return ""
    said, found, path = str(error).rpartition(" - at `$")
    return f"{name}{path.rstrip('`')}: {_lower(said)}" if found else f"{name}: {_lower(path)}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _change(sent: Any, arrived: Any, path: str) -> str:
    """Where a value would change on its way, how, and what to do; empty if nowhere."""
    kind, found = type(sent), type(arrived)
    if kind is int and found is float:  # not all that are large have a float
        return "" if sent == arrived else f"{path}: {sent} would arrive as {arrived}"
    if kind is not found and not _stands_for(sent, arrived):
        return (
            f"{path}: {kind.__name__} would arrive as {found.__name__}: "
            f"let the type name {kind.__name__} there, or send {found.__name__}"
        )
    if isinstance(sent, Mapping):
        for key, other in zip(sent, arrived, strict=False):
            if change := _change(key, other, f"{path}: the key {key!r:.40}"):
                return change
    if isinstance(sent, set | frozenset):
        return _change_in_set(sent, arrived, path)
    parts, others = parts_of(sent), parts_of(arrived)
    if len(parts) != len(others):
        return f"{path}: {len(parts)} parts would arrive as {len(others)}"
    for (step, part), (_, other) in zip(parts, others, strict=True):
        if change := _change(part, other, f"{path}{step}"):
            return change
    return ""


def _change_in_set(sent: Iterable[Any], arrived: Iterable[Any], path: str) -> str:
    """Return the change, as `_change` does, of parts that have no order."""
    found = {part: part for part in arrived}
    for part in sent:
        if part not in found:
            return f"{path}: {part!r:.40} would not arrive as what it is"
        if change := _change(part, found[part], f"{path}: the member {part!r:.40}"):
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


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."
