"""Items as bytes and back, by the channel's type. No pickle, in neither direction.

MessagePack does what msgspec can do; beyond that, by extension types:

====  =====================================================================================
code  is
====  =====================================================================================
1     an array (see `arrays`): large ones stand beside the MessagePack, as buffers
2     the end of a channel, where encoder and decoder are given functions for ends
====  =====================================================================================

A received array is writable. It lies in the bytes that arrived, or in shared memory whose pages are
copied when they are written; decoding takes them over. Bytes that may have to be decoded again are
decoded from a copy (`Decoder.decode_copy`). numpy scalars arrive as plain numbers.

How the items of one channel travel: by its type, which both sides know.

Almost every type is MessagePack that msgspec reads by itself. A union of which it could not tell
the members apart (two dataclasses, two Structs without tags) is preceded by the number of the
member, among the names that the owner of the channel sent with its end:

::

    owner of Channel(Left | Right)         worker with a Sender[Left]
      Form(("Left", "Right"), numbered) ---> put(Left())
      0, item <------------------------------- 0, item

So an end may be annotated with fewer members than the channel has (a sender) or more (a receiver).
"""

from __future__ import annotations

import contextlib
import struct
import types
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from threading import get_ident
from typing import Any, Final, get_args, get_origin

import msgspec

from rlinf_async.channels.encoded import (
    Encoded,
    EncodeList,
    Form,
    LookedAt,
    dtypes_of,
    members,
    parts_of,
    runtime_classes,
    type_name,
)
from rlinf_async.channels.ends import LatestReceiver, LatestSender, Receiver, Sender
from rlinf_async.channels.errors import MalformedFrame, WrongItemType, fit, text_of
from rlinf_async.channels.wire import arrays
from rlinf_async.channels.wire.arrays import is_reserved
from rlinf_async.channels.wire.frames import MAX_BUFFERS
from rlinf_async.channels.wire.protocol import EndRef
from rlinf_async.channels.wire.slab import is_private

ARRAY: Final = 1
END: Final = 2

AnyEnd = Sender[Any] | Receiver[Any] | LatestSender[Any] | LatestReceiver[Any]
END_CLASSES: Final = {
    "sender": Sender,
    "receiver": Receiver,
    "latest_sender": LatestSender,
    "latest_receiver": LatestReceiver,
}
EncodeEnd = Callable[[AnyEnd], EndRef]
DecodeEnd = Callable[[EndRef, Any], AnyEnd]
"""Makes an end of an `EndRef` and the item type that it is annotated with."""

_ARRAY_32: Final = 0xDD
_ARRAY_HEAD: Final = struct.Struct(">BI")
"""head of a MessagePack array of any length: its type, and how many values follow"""
_encode_plain = msgspec.msgpack.Encoder().encode
_decode_raw = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_head = msgspec.msgpack.Decoder(arrays.Head).decode
_decode_ref = msgspec.msgpack.Decoder(EndRef).decode


class Encoder:
    """Turns items into bytes. May be used in any thread."""

    def __init__(self, ends: EncodeEnd | None = None) -> None:
        self._ends = ends
        encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._encode, self._append = encoder.encode, encoder.encode_into
        # By thread: while one copies an array out of a GPU, another may encode its own item.
        self._buffers: dict[int, list[memoryview]] = {}

    def encode(self, item: object) -> Encoded:
        """The item as it travels. Large contiguous arrays are not copied: do not change them
        before the item was sent.

        Raises:
            WrongItemType: a part of it cannot travel; the message says which and why.
        """
        if self._buffers:  # of one that failed
            self._buffers.pop(get_ident(), None)
        try:
            data = self._encode(item)
        except RecursionError:
            raise WrongItemType(
                f"{type(item).__name__} is nested too deeply to travel, or contains itself"
            ) from None
        except Exception as error:  # of numpy, torch, or the item's own code: all say the same
            raise WrongItemType(fit(self._explain(item, error))) from error
        if not self._buffers:
            return Encoded(data)
        return Encoded(data, self._buffers.pop(get_ident(), ()))

    def encode_list(
        self, items: Iterable[object], most: int, each: int
    ) -> tuple[int, bytes] | None:
        """The first of these items as one MessagePack array, and how many they are: up to ``most``
        bytes in all, or one that takes more than ``each``, or cannot travel. None if one has large
        arrays, which travel beside it."""
        encoded, append, buffers = bytearray(_ARRAY_HEAD.size), self._append, self._buffers
        count, end = 0, _ARRAY_HEAD.size
        for item in items:
            try:
                append(item, encoded, -1)
            except Exception:  # whoever asks for that one hears of it
                break
            size = len(encoded)
            if buffers and buffers.pop(get_ident(), []):
                return None
            if size - end > each:
                break
            count, end = count + 1, size
            if end >= most:
                break
        if buffers:  # of one that failed
            buffers.pop(get_ident(), [])
        _ARRAY_HEAD.pack_into(encoded, 0, _ARRAY_32, count)
        return count, bytes(encoded[:end])

    def _hook(self, value: object) -> Any:
        if arrays.is_array(value):
            return self._array("numpy", value, *arrays.array_elements(_as_any(value)))
        if arrays.is_number(value):
            return _as_any(value).item()
        if arrays.is_tensor(value):
            return self._array("torch", value, *arrays.tensor_elements(_as_any(value)))
        if isinstance(value, Sender | Receiver | LatestSender | LatestReceiver):
            return self._end(value)
        raise arrays.CannotTravel(
            f"{type(value).__name__} cannot travel: use a msgspec.Struct, a dataclass, plain "
            "values, numpy arrays or torch tensors"
        )

    def _array(
        self, kind: Any, array: Any, dtype: Any, elements: memoryview
    ) -> msgspec.msgpack.Ext:
        buffers = self._buffers.setdefault(get_ident(), [])
        inline = len(elements) <= arrays.INLINE_BYTES or len(buffers) >= MAX_BUFFERS
        where = bytes(elements) if inline else len(buffers)
        if not inline:
            buffers.append(elements)
        head = arrays.Head(kind, dtype, tuple(array.shape), where)
        return msgspec.msgpack.Ext(ARRAY, _encode_plain(head))

    def _end(self, end: AnyEnd) -> msgspec.msgpack.Ext:
        if self._ends is None:
            raise arrays.CannotTravel(
                "the end of a channel travels only as an argument of a worker's call"
            )
        return msgspec.msgpack.Ext(END, _encode_plain(self._ends(end)))

    def _explain(self, item: object, error: Exception) -> str:
        said = text_of(error)
        with contextlib.suppress(Exception):  # the item's own code may raise where it is looked at
            for path, value in _parts(item, type(item).__name__):
                if not parts_of(value) and self._refusal(value) == said:
                    return f"{path}: {said}"
        return f"{type(item).__name__}: {said}"

    def _refusal(self, value: object) -> str | None:
        """Why this value cannot travel by itself."""
        try:
            self._encode(value)
        except Exception as error:
            return text_of(error)
        return None


class Decoder:
    """Turns bytes into items of one type.

    Raises:
        TypeError: no item of this type could travel.
    """

    def __init__(self, item_type: Any, ends: DecodeEnd | None = None) -> None:
        self.item_type = item_type
        self._ends = ends
        self._buffers: Sequence[memoryview | bytearray] = ()
        self._decode_list: Callable[[bytes], list[Any]] | None = None
        try:
            self._decode = msgspec.msgpack.Decoder(
                item_type, dec_hook=self._check, ext_hook=self._extend
            ).decode
        except TypeError as error:
            raise TypeError(_explain_type(item_type, error)) from error

    def decode(self, encoded: Encoded) -> Any:
        """The item. Its large arrays lie in the buffers that were given: see `decode_copy`.

        Raises:
            MalformedFrame: the bytes are not an item of this type.
        """
        self._buffers = encoded.buffers
        try:
            return self._decode(encoded.data)
        except Exception as error:  # of msgspec, numpy, torch, or the type's own checks
            raise MalformedFrame(
                f"what arrived is not a {type_name(self.item_type)}: {fit(text_of(error))}"
            ) from error
        finally:
            self._buffers = ()

    def decode_list(self, data: bytes) -> list[Any]:
        """The items that `Encoder.encode_list` made one array of. Where one of them is not an item
        of this type, all are as they came: `Encoded`.

        Raises:
            MalformedFrame: it is no array.
        """
        if self._decode_list is None:
            several: Any = types.GenericAlias(list, (self.item_type,))
            self._decode_list = msgspec.msgpack.Decoder(
                several, dec_hook=self._check, ext_hook=self._extend
            ).decode
        try:
            return self._decode_list(data)
        except Exception:  # as of `decode`; which item it was, decoding one by one tells
            try:
                return [Encoded(bytes(item)) for item in _decode_raw(data)]
            except msgspec.DecodeError as error:
                raise MalformedFrame(f"a list of items cannot be read: {error}") from error

    def decode_copy(self, encoded: Encoded) -> Any:
        """The item, with arrays of its own: what is done to it does not change what arrived.

        Raises:
            MalformedFrame: as `decode`.
        """
        return self.decode(Encoded(encoded.data, [bytearray(buffer) for buffer in encoded.buffers]))

    def _extend(self, code: int, data: memoryview) -> Any:
        if code == ARRAY:
            head = _decode_head(data)
            return arrays.restore(head, self._elements(head.elements))
        if code == END:
            return _decode_ref(data)
        raise ValueError(f"unknown extension {code}")

    def _elements(self, where: int | bytes) -> bytearray | memoryview:
        if isinstance(where, bytes):
            return bytearray(where)
        if not 0 <= where < len(self._buffers):
            raise ValueError(f"buffer {where} of {len(self._buffers)}")
        buffer = self._buffers[where]
        own = (
            isinstance(buffer, bytearray)
            or is_reserved(buffer)
            or is_private(buffer)
            or isinstance(self._buffers, LookedAt)
        )
        return buffer if own else bytearray(buffer)

    def _check(self, expected: Any, value: Any) -> Any:
        """msgspec found a type that it does not know: an array, a tensor, or the end of a
        channel."""
        if isinstance(value, EndRef):
            return self._attach(expected, value)
        kind = get_origin(expected) or expected
        if isinstance(kind, type) and not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        allowed = dtypes_of(expected)
        if allowed and value.dtype.type not in allowed:
            names = " or ".join(sorted(dtype.__name__ for dtype in allowed))
            raise TypeError(f"expected an array of {names}, got {value.dtype}")
        return value

    def _attach(self, expected: Any, ref: EndRef) -> AnyEnd:
        kind = get_origin(expected) or expected
        if kind is not END_CLASSES[ref.kind]:
            raise TypeError(
                f"channel {ref.channel!r}: a {ref.kind.replace('_', ' ')} was given where "
                f"{type_name(expected)} is declared"
            )
        if self._ends is None:
            raise TypeError(
                f"channel {ref.channel!r}: an end travels only as an argument of a worker's call"
            )
        item_type = get_args(expected)
        return self._ends(ref, item_type[0] if item_type else Any)


def encode(item: object) -> Encoded:
    """The item as it travels. See `Encoder`."""
    return Encoder().encode(item)


def join(parts: Sequence[Encoded]) -> tuple[list[tuple[int, int]], Encoded]:
    """Several encoded items as one body, and what `split` needs to part them."""
    if len(parts) == 1:
        return [(len(parts[0].data), len(parts[0].buffers))], parts[0]
    sizes = [(len(part.data), len(part.buffers)) for part in parts]
    buffers = [buffer for part in parts for buffer in part.buffers]
    return sizes, Encoded(b"".join([part.data for part in parts]), buffers)


def split(sizes: Sequence[tuple[int, int]], body: Encoded | None) -> list[Encoded]:
    """The encoded items of a body that `join` made.

    Raises:
        MalformedFrame: the sizes do not fit the body.
    """
    whole = body if body is not None else Encoded(b"")
    if len(sizes) == 1 and sizes[0] == (len(whole.data), len(whole.buffers)):
        return [whole]
    data, buffers = whole.data, whole.buffers
    parts: list[Encoded] = []
    start = first = 0
    for length, count in sizes:
        stop, last = start + length, first + count
        parts.append(Encoded(data[start:stop], buffers[first:last] if count else ()))
        start, first = stop, last
    if start != len(data) or first != len(buffers):
        raise MalformedFrame(
            f"{len(sizes)} items of {start} bytes and {first} buffers were announced, "
            f"{len(whole.data)} bytes and {len(whole.buffers)} buffers arrived"
        )
    return parts


def _as_any(value: object) -> Any:
    return value


def _explain_type(item_type: Any, error: TypeError) -> str:
    hint = ""
    if "custom type" in str(error):
        hint = (
            ". For arrays of several dtypes write NDArray[np.float32 | np.int64], and no other "
            "type but None beside an array"
        )
    return f"{type_name(item_type)} cannot travel between processes: {error}{hint}"


def _parts(item: object, path: str) -> list[tuple[str, object]]:
    """Every part of an item with the path that leads there, at most a few thousand."""
    found = [(path, item)]
    for at, value in found:
        if len(found) > 5000:
            break
        found += [(f"{at}{step}", part) for step, part in parts_of(value)]
    return found


DecodeList = Callable[[bytes], list[Any]]
MAX_MEMBERS: Final = 128
"""Each number takes one byte, which is MessagePack too."""


class ItemCodec:
    """Turns the items of one channel into bytes and back. For one thread.

    Args:
        item_type: what this side declares.
        form: what the channel's owner said; None where this is the owner.

    Raises:
        TypeError: items of this type cannot travel.
    """

    def __init__(self, item_type: Any, form: Form | None = None) -> None:
        self._type = item_type
        self._encoder = Encoder()
        self.encode: Callable[[Any], Encoded] = self._encoder.encode
        """the item as it travels; raises `WrongItemType`"""
        self.encode_list: EncodeList | None = self._encoder.encode_list
        """encodes several items at once, as `Encoder.encode_list`; None where items are numbered,
        one by one"""
        self.decode_list: DecodeList | None = None
        """the reverse"""
        whole = _decoder(item_type)
        self.form = _form_of(item_type, whole) if form is None else form
        if self.form.numbered:
            parts = {_name(part): part for part in members(item_type)}
            self._numbers = {
                cls: number
                for number, name in enumerate(self.form.members)
                if name in parts
                for cls in runtime_classes(parts[name])
            }
            self._decoders = [
                Decoder(parts[name]) if name in parts else whole for name in self.form.members
            ]
            self.decode: Callable[[Encoded], Any] = self._decode_numbered
            """the item; raises `MalformedFrame`"""
            self.encode, self.encode_list = self._encode_numbered, None
        else:
            whole = whole or Decoder(_only(item_type, self.form.members))
            self.decode, self.decode_list = whole.decode, whole.decode_list

    def decode_copy(self, encoded: Encoded) -> Any:
        """Decode with arrays of its own: what is done to the item does not change what arrived."""
        return self.decode(Encoded(encoded.data, [bytearray(part) for part in encoded.buffers]))

    def _encode_numbered(self, item: Any) -> Encoded:
        classes = type(item).__mro__
        number = next((self._numbers[cls] for cls in classes if cls in self._numbers), None)
        if number is None:
            raise WrongItemType(
                f"{type(item).__name__} is none of {', '.join(self.form.members)}, of which the "
                "channel is a union"
            )
        body = self._encoder.encode(item)
        return Encoded(bytes((number,)) + body.data, body.buffers)

    def _decode_numbered(self, encoded: Encoded) -> Any:
        number = encoded.data[0] if encoded.data else len(self._decoders)
        decoder = self._decoders[number] if number < len(self._decoders) else None
        if decoder is None:
            known = self.form.members
            what = known[number] if number < len(known) else f"member {number} of {len(known)}"
            raise MalformedFrame(f"what arrived is a {what}, not a {type_name(self._type)}")
        return decoder.decode(Encoded(encoded.data[1:], encoded.buffers))


def _decoder(item_type: Any) -> Decoder | None:
    """None for a union that msgspec cannot tell apart."""
    try:
        return Decoder(item_type)
    except TypeError:
        if len(members(item_type)) == 1:
            raise
        return None


def _form_of(item_type: Any, whole: Decoder | None) -> Form:
    """How the items of a channel of this type travel.

    Raises:
        TypeError: nothing would tell the members of a union apart.
    """
    parts = members(item_type)
    names = tuple(map(_name, parts))
    if whole is not None:
        return Form(names)
    classes = [cls for part in parts for cls in runtime_classes(part)]
    if len(set(names)) < len(names) or len(set(classes)) < len(classes) or len(names) > MAX_MEMBERS:
        raise TypeError(
            f"{type_name(item_type)} cannot travel between processes: nothing tells its members "
            "apart; give each a class, and each class a name, of its own"
        )
    for part in parts:
        Decoder(part)
    return Form(names, numbered=True)


def _only(item_type: Any, names: Iterable[str]) -> Any:
    """The members with these names: all that will come.

    Raises:
        TypeError: none has one of them.
    """
    found = [part for part in members(item_type) if _name(part) in names]
    if not found:
        raise TypeError(f"{type_name(item_type)} has no member of {', '.join(names)}")
    return reduce(or_, found)


def _name(part: Any) -> str:
    """A type's name, the same in every process: the module of a script is not."""
    origin, inside = get_origin(part), get_args(part)
    if isinstance(origin, type) and inside:
        return f"{origin.__qualname__}[{', '.join(map(_name, inside))}]"
    return part.__qualname__ if isinstance(part, type) else str(part)
