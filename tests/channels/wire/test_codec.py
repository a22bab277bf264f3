"""Items come back as they went, or an error says which part cannot travel."""

from __future__ import annotations

import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    MalformedFrame,
    Receiver,
    Sender,
    WrongItemType,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import EndRef, arrays
from rlinf_async.channels.wire.codec import ARRAY, END, Decoder, Encoder, encode, join, split

T = TypeVar("T")
DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", ">f4", ">i8", "U3", "S5", "M8[s]", "m8[ms]", "V7",
]  # fmt: skip
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (3,), (2, 0, 3), (4, 5), (3, 700), (1, 2, 3, 4)]


class Sample(msgspec.Struct):
    """Arrays wherever they may stand."""

    array: NDArray[np.float32]
    maybe: NDArray[np.int64] | None
    listed: list[NDArray[np.float32]]
    named: dict[str, torch.Tensor]
    either: NDArray[np.float32 | np.int64]
    anything: Any = None


class OddTensor(torch.Tensor):
    """Means more than its elements."""


class Box(msgspec.Struct, Generic[T]):
    """A generic Struct."""

    inside: T


@dataclass
class Plain:
    """A dataclass is fine too."""

    values: np.ndarray[Any, Any]


def through(item: Any, kind: Any) -> Any:
    """The item after a journey: its bytes are copied as a socket copies them."""
    sent = encode(item)
    arrived = Encoded(bytes(sent.data), [bytearray(buffer) for buffer in sent.buffers])
    return Decoder(kind).decode(arrived)


def filled(dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of this dtype with bytes that tell its elements apart."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    noise = bytes(index * 7 % 2 if dtype == "bool" else index * 7 % 120 for index in range(size))
    if dtype == "U3":
        return np.array([f"{index}" for index in range(int(np.prod(shape)))], dtype).reshape(shape)
    return np.frombuffer(bytearray(noise), dtype).reshape(shape) if size else np.empty(shape, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_of_any_dtype_and_shape_arrive_as_they_left(
    dtype: str, shape: tuple[int, ...]
) -> None:
    sent = filled(dtype, shape)
    found = through(sent, np.ndarray)
    assert (found.dtype, found.shape) == (sent.dtype, shape)
    assert found.tobytes() == sent.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_tensors_of_any_dtype_and_shape_arrive_as_they_left(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = (torch.rand(shape) * 100).to(dtype)
    found = through(sent, torch.Tensor)
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert found.reshape(-1).view(torch.uint8).equal(sent.reshape(-1).view(torch.uint8))


@given(st.lists(st.slices(9), min_size=2, max_size=2), st.booleans(), st.sampled_from(["C", "F"]))
def test_any_strides_arrive_with_the_same_elements(
    cuts: list[slice], transposed: bool, order: Any
) -> None:
    whole = np.array(np.arange(81.0).reshape(9, 9), order=order)
    view = whole[cuts[0], cuts[1]]
    view = view.T if transposed else view
    assert np.array_equal(through(view, np.ndarray), view)
    assert through(torch.from_numpy(whole).T, torch.Tensor).equal(torch.from_numpy(whole).T)
    if all(stride >= 0 for stride in view.strides):  # torch has no others
        tensor = torch.from_numpy(view)
        assert through(tensor, torch.Tensor).equal(tensor)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_the_last_value_of_a_batch_of_one_arrives(dtype: torch.dtype) -> None:
    """It counts as contiguous, and its stride is the length of the row."""
    sent = torch.arange(12).reshape(1, 12).to(dtype)[:, -1]
    assert sent.stride() == (12,)
    assert through(sent, torch.Tensor).tolist() == sent.tolist()


def test_structured_dtypes_arrive_with_their_fields() -> None:
    dtype = np.dtype([("a", "<i4"), ("b", [("x", "<f8"), ("y", "u1", (2, 3))])], align=True)
    sent = np.zeros(3, dtype)
    sent["b"]["y"] = 7
    found = through(sent, np.ndarray)
    assert found.dtype.fields is not None
    assert (found["b"]["y"] == 7).all()


def test_large_arrays_stand_apart_and_small_ones_do_not() -> None:
    large = np.zeros(arrays.INLINE_BYTES + 1, np.uint8)
    small = np.zeros(arrays.INLINE_BYTES, np.uint8)
    assert [len(buffer) for buffer in encode([large, small]).buffers] == [len(large)]


def test_a_large_contiguous_array_is_not_copied_to_be_sent() -> None:
    array = np.zeros(100_000, np.float32)
    [buffer] = encode(array).buffers
    array[0] = 1.0
    assert bytes(buffer[:4]) == np.float32(1).tobytes()


def test_a_decoded_array_owns_what_arrived_without_another_copy() -> None:
    buffer = bytearray(np.arange(5000, dtype=np.float32).tobytes())
    sent = encode(np.arange(5000, dtype=np.float32))
    found = Decoder(np.ndarray).decode(Encoded(sent.data, [buffer]))
    found[0] = 42.0
    assert np.frombuffer(buffer, np.float32)[0] == 42.0


@pytest.mark.parametrize("size", [3, 5000])
def test_arrays_are_found_wherever_they_stand(size: int) -> None:
    floats, ints = np.arange(size, dtype=np.float32), np.arange(size)
    tensor = torch.arange(size, dtype=torch.bfloat16)
    sample = Sample(floats, None, [floats, floats + 1], {"w": tensor}, ints, {"deep": [ints]})
    found = through(sample, Sample)
    assert np.array_equal(found.array, floats)
    assert found.maybe is None
    assert np.array_equal(found.listed[1], floats + 1)
    assert found.named["w"].equal(tensor)
    assert np.array_equal(found.anything["deep"][0], ints)


def test_generics_dataclasses_unions_and_plain_values_travel() -> None:
    assert through(Box([1, 2]), Box[list[int]]) == Box([1, 2])
    assert through(Plain(np.ones(2)), Plain).values.sum() == 2
    assert through(None, int | None) is None
    assert through(np.float32(1.5), float) == 1.5
    assert through(3, float) == 3.0


def test_an_array_of_another_dtype_than_declared_is_refused() -> None:
    sample = Sample(np.zeros(1, np.float64), None, [], {}, np.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(MalformedFrame, match=r"expected an array of float32, got float64.*\.array"):
        through(sample, Sample)


def test_an_item_of_another_type_than_declared_is_refused_with_its_path() -> None:
    with pytest.raises(MalformedFrame, match=r"not a .*Box.*Expected `int`, got `str`.*inside"):
        Decoder(Box[int]).decode(encode(Box("text")))


masked: Any = np.ma  # some releases of numpy have no annotations here


def test_python_objects_in_an_array_are_refused_with_the_path_of_the_field() -> None:
    good, bad = np.zeros(1, np.float32), np.array([object()])
    with pytest.raises(WrongItemType, match=r"Sample\.listed\[1\]: .*holds Python objects"):
        encode(Sample(good, None, [good, bad], {}, good))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "object cannot travel"),
        (masked.array([1.0], mask=[True]), "a MaskedArray cannot travel"),
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo cannot travel"),
        (torch.empty(2, device="meta"), "a tensor on meta has no elements"),
        (torch.ones(2).as_subclass(OddTensor), "a OddTensor cannot travel without losing"),
        (lambda: None, "function cannot travel"),
    ],
    ids=["object", "masked", "sparse", "meta", "subclass", "function"],
)
def test_what_cannot_travel_is_named(value: object, said: str) -> None:
    with pytest.raises(WrongItemType, match=rf"dict\['here'\]\[0\]: {said}"):
        encode({"here": [value]})


def test_a_structure_nested_too_deeply_is_refused_on_both_sides() -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(WrongItemType, match="nested too deeply"):
        encode(nested)
    with pytest.raises(MalformedFrame):
        Decoder(Any).decode(Encoded(b"\x91" * 100_000 + b"\xc0"))


def test_a_channel_of_a_type_that_cannot_travel_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write NDArray\[np.float32 \| np.int64\]"):
        Decoder(NDArray[np.float32] | NDArray[np.int64])


def array_item(head: Any, buffers: tuple[bytearray, ...] = ()) -> Encoded:
    """An item that claims to be this array."""
    packed = msgspec.msgpack.encode(head)
    return Encoded(msgspec.msgpack.encode(msgspec.msgpack.Ext(ARRAY, packed)), buffers)


@pytest.mark.parametrize(
    "head",
    [
        ["numpy", "<f4", [2], b"1234"],
        ["numpy", "<f4", [-1], b""],
        ["numpy", "<f4", [5], b""],
        ["torch", "float32", [5], b""],
        ["numpy", "|O", [1], b"12345678"],
        ["numpy", [["a", "|O"]], [1], b"12345678"],
        ["numpy", "no dtype", [1], b"1"],
        ["numpy", {"no": 1}, [1], b"1"],
        ["numpy", "<f4", [1], 0],
        ["numpy", "<f4", [2**40, 2**40], b""],
        ["numpy", "<f4", [1] * 40, b"1234"],
        ["torch", "load", [1], b"1"],
        ["torch", "float32", [1], b"1"],
        ["torch", 5, [1], b"1"],
        ["pickle", "<f4", [1], b"1234"],
        ["numpy", "S0", [2**40], b""],
        ["numpy", "V0", [2**40], b""],
        ["numpy", "U0", [2**40], b""],
        ["numpy", [], [2**40], b""],
        ["numpy", "(2,", [0], b""],
        ["numpy", "<f4", [0, 2**63], b""],
        ["torch", "float32", [0, 2**63], b""],
        ["torch", "float32", [0, 2**62, 4], b""],
        [],
        7,
    ],
    ids=str,
)
def test_an_array_that_does_not_add_up_is_refused(head: Any) -> None:
    with pytest.raises(MalformedFrame):
        Decoder(Any).decode(array_item(head))


@given(st.binary(max_size=200))
def test_random_bytes_are_an_item_or_refused_but_never_crash(noise: bytes) -> None:
    decoder = Decoder(Sample | None)
    try:
        found = decoder.decode(Encoded(noise))
    except MalformedFrame:
        return
    assert isinstance(found, Sample | None)


def test_no_pickle_is_read() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was read",))

    noise = pickle.dumps(Bomb())
    for code in range(-1, 12):
        item = Encoded(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, noise)))
        with pytest.raises(MalformedFrame):
            Decoder(Any).decode(item) if code != -1 else Decoder(int).decode(item)
    with pytest.raises(MalformedFrame):
        Decoder(Any).decode(array_item(["numpy", "|O", [len(noise) // 8], noise[:8]]))


def test_items_are_joined_and_parted_again() -> None:
    items = [encode(np.arange(size)) for size in (3, 3000, 4000)]
    sizes, body = join(items)
    parts = split(sizes, body)
    assert [Decoder(np.ndarray).decode(part).size for part in parts] == [3, 3000, 4000]
    with pytest.raises(MalformedFrame, match="2 items"):
        split(sizes[:2], body)


async def test_channel_ends_travel_by_reference_where_that_is_wanted() -> None:
    channel = Channel(int, name="numbers")
    ref = EndRef(5, "receiver", "numbers")
    sent = Encoder(lambda end: ref).encode([channel.receiver])
    seen: list[tuple[EndRef, Any]] = []

    def attach(ref: EndRef, item_type: Any) -> Receiver[int]:
        seen.append((ref, item_type))
        return channel.receiver

    assert Decoder(list[Receiver[int]], attach).decode(sent) == [channel.receiver]
    assert seen == [(ref, int)]
    with pytest.raises(MalformedFrame, match=r"a receiver was given where .*Sender.* is declared"):
        Decoder(list[Sender[int]], attach).decode(sent)
    with pytest.raises(MalformedFrame, match="only as an argument of a worker's call"):
        Decoder(list[Receiver[int]]).decode(sent)


def test_a_channel_end_inside_an_item_is_refused() -> None:
    with pytest.raises(WrongItemType, match="only as an argument of a worker's call"):
        encode([Channel(int, name="numbers").sender])
    bad = Encoded(msgspec.msgpack.encode(msgspec.msgpack.Ext(END, b"\x00")))
    with pytest.raises(MalformedFrame):
        Decoder(Any).decode(bad)


def test_a_dtype_is_looked_up_without_importing_what_it_names() -> None:
    had = set(sys.modules)
    with pytest.raises(MalformedFrame, match="torch has no dtype 'testing_of_imports'"):
        Decoder(Any).decode(array_item(["torch", "testing_of_imports", [0], b""]))
    with pytest.raises(MalformedFrame, match="torch has no dtype '_dynamo'"):
        Decoder(Any).decode(array_item(["torch", "_dynamo", [0], b""]))
    assert set(sys.modules) == had


def test_an_array_whose_elements_take_no_bytes_is_refused_on_both_sides() -> None:
    with pytest.raises(WrongItemType, match="elements take no bytes"):
        encode(np.zeros(3, np.dtype([])))


def moody() -> object:
    """Something that fails to be looked at in a way of its own."""

    def mood(self: object) -> type:
        raise LookupError("a mood")

    return type("Moody", (), {"__class__": property(mood)})()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"name": "a\udcff"}, r"dict\['name'\]: .*surrogates not allowed"),
        (Box("a\udcff"), r"Box\.inside: .*surrogates not allowed"),
        ([1, moody()], "a mood"),
    ],
    ids=["text", "field", "hook"],
)
def test_whatever_keeps_an_item_from_being_encoded_is_explained(value: Any, said: str) -> None:
    with pytest.raises(WrongItemType, match=said):
        encode(value)


class Checked(msgspec.Struct):
    """Its own check raises what msgspec does not know."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise LookupError(f"no {self.value} here")


def test_what_the_types_own_check_raises_is_a_malformed_item() -> None:
    sent = Encoded(msgspec.msgpack.encode({"value": -1}))
    with pytest.raises(MalformedFrame, match="not a Checked: no -1 here"):
        Decoder(Checked).decode(sent)


def test_a_decoded_copy_leaves_what_arrived_as_it_was() -> None:
    sent = encode(np.zeros(10_000, np.uint8))
    arrived = Encoded(sent.data, [bytearray(sent.buffers[0])])
    decoder = Decoder(np.ndarray)
    first = decoder.decode_copy(arrived)
    first += 1
    assert decoder.decode_copy(arrived).sum() == 0


def test_two_threads_that_encode_at_once_do_not_mix_their_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Encoder()
    halfway, done = threading.Event(), threading.Event()
    elements, thread = arrays.array_elements, threading.Thread(target=lambda: None)

    def slow(array: NDArray[Any]) -> tuple[Any, memoryview]:
        if threading.current_thread() is thread and array[0] == 2:
            halfway.set()
            assert done.wait(60)
        return elements(array)

    def full(value: float) -> NDArray[np.float32]:
        return np.full(5000, value, np.float32)

    monkeypatch.setattr(arrays, "array_elements", slow)
    found: list[Encoded] = []
    thread = threading.Thread(target=lambda: found.append(encoder.encode([full(1), full(2)])))
    thread.start()
    assert halfway.wait(60)
    found.append(encoder.encode([full(3)]))
    with pytest.raises(WrongItemType):
        encoder.encode([full(4), object()])
    found.append(encoder.encode([full(5)]))
    assert encoder.encode([6]).buffers == ()
    done.set()
    thread.join()
    arrived = [
        [part[0] for part in Decoder(list[NDArray[np.float32]]).decode(one)] for one in found
    ]
    assert arrived == [[3], [5], [1, 2]]
