"""How the items of one channel travel: by its type, which both sides know.

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

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import or_
from typing import Any, Final, get_args, get_origin

from rlinf_async.channels.encoded import Encoded, EncodeList, Form
from rlinf_async.channels.errors import MalformedFrame, WrongItemType
from rlinf_async.channels.itemtypes import members, runtime_class, type_name
from rlinf_async.channels.untyped import Refused, packed, packer
from rlinf_async.channels.wire.items.codec import Decoder, Encoder

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
        self._pack = packer(item_type)
        self.encode: Callable[[Any], Encoded] = self._encoder.encode
        """the item as it travels; raises `WrongItemType`"""
        self.encode_list: EncodeList | None = self._encoder.encode_list
        """as `Encoder.encode_list`; None where items are numbered, which is one by one"""
        self.decode_list: DecodeList | None = None
        """the reverse"""
        if self._pack is not None:
            self.encode = self._encode_packed
            self.encode_list = self._encode_packed_list
        whole = _decoder(item_type)
        if form is None:
            form = _form_of(item_type, whole)
        self.form = form
        if form.numbered:
            self._parts = {_name(part): part for part in members(item_type)}
            self._numbers = self._number_classes()
            self._decoders = [self._decoder_of(name, whole) for name in form.members]
            self.decode: Callable[[Encoded], Any] = self._decode_numbered
            """the item; raises `MalformedFrame`"""
            self.encode = self._encode_numbered
            self.encode_list = None
        else:
            if whole is None:
                whole = Decoder(_only(item_type, form.members))
            self.decode = whole.decode
            self.decode_list = whole.decode_list

    def decode_copy(self, encoded: Encoded) -> Any:
        """As `decode`, with arrays of its own: what is done to it does not change what arrived."""
        return self.decode(Encoded(encoded.data, [bytearray(part) for part in encoded.buffers]))

    def _encode_packed(self, item: Any) -> Encoded:
        assert self._pack is not None
        return self._encoder.encode(packed(item, self._pack))

    def _encode_packed_list(
        self, items: Iterable[Any], most: int, each: int
    ) -> tuple[int, bytes] | None:
        return self._encoder.encode_list(self._packed(items), most, each)

    def _packed(self, items: Iterable[Any]) -> Iterator[Any]:
        """Those that stand before one that is refused."""
        assert self._pack is not None
        for item in items:
            try:
                yield self._pack(item)
            except Refused:
                return

    def _encode_numbered(self, item: Any) -> Encoded:
        for cls in type(item).__mro__:
            number = self._numbers.get(cls)
            if number is not None:
                break
        else:
            raise WrongItemType(
                f"{type(item).__name__} is none of {', '.join(self.form.members)}, of which the "
                "channel is a union"
            )
        body = self._encode_packed(item) if self._pack is not None else self._encoder.encode(item)
        return Encoded(bytes((number,)) + body.data, body.buffers)

    def _decode_numbered(self, encoded: Encoded) -> Any:
        number = encoded.data[0] if encoded.data else len(self._decoders)
        decoder = self._decoders[number] if number < len(self._decoders) else None
        if decoder is None:
            known = self.form.members
            what = known[number] if number < len(known) else f"member {number} of {len(known)}"
            raise MalformedFrame(f"what arrived is a {what}, not a {type_name(self._type)}")
        return decoder.decode(Encoded(encoded.data[1:], encoded.buffers))

    def _decoder_of(self, name: str, whole: Decoder | None) -> Decoder | None:
        part = self._parts.get(name)
        return whole if part is None else Decoder(part)

    def _number_classes(self) -> dict[type, int]:
        """The member that an item of a class is. A sender may put what the channel knows as a
        class that it derives from."""
        numbers: dict[type, int] = {}
        for part in self._parts.values():
            for cls in _classes(part):
                bases = (_name(part), *(base.__qualname__ for base in cls.__mro__))
                known = [name for name in bases if name in self.form.members]
                if known:
                    numbers.setdefault(cls, self.form.members.index(known[0]))
        return numbers


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
    classes = [cls for part in parts for cls in _classes(part)]
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


def _classes(part: Any) -> tuple[type, ...]:
    found = runtime_class(part)
    return found if isinstance(found, tuple) else (found,)


def _name(part: Any) -> str:
    """A type's name, the same in every process: the module of a script is not."""
    origin, inside = get_origin(part), get_args(part)
    if isinstance(origin, type) and inside:
        return f"{origin.__qualname__}[{', '.join(map(_name, inside))}]"
    return part.__qualname__ if isinstance(part, type) else str(part)
