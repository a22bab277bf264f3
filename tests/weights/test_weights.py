from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_async.messages.weights import (
    TensorSlot,
    WeightBucket,
    WeightsDamaged,
    WeightsError,
    WeightsMismatch,
    WeightUpdate,
)
from rlinf_async.weights.pack import load, pack, unpack, update_checksum, verify

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


state_dicts = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.builds(
        random_tensor,
        st.integers(0, 1000),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from(DTYPES),
    ),
    max_size=8,
)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


@given(state=state_dicts, version=st.integers(0, 2**40), bucket_bytes=st.integers(1, 400))
def test_what_was_packed_is_unpacked_bit_by_bit(
    state: dict[str, Tensor], version: int, bucket_bytes: int
) -> None:
    update = pack(state, version, bucket_bytes)
    verify(update)
    result = unpack(update)
    assert update.version == version
    assert list(result) == list(state)
    assert all(same(result[name], state[name]) for name in state)


@given(state=state_dicts, bucket_bytes=st.integers(1, 400))
def test_a_bucket_is_no_larger_than_asked_unless_one_tensor_is(
    state: dict[str, Tensor], bucket_bytes: int
) -> None:
    for bucket in pack(state, 0, bucket_bytes).buckets:
        assert len(bucket.data) <= bucket_bytes or len(bucket.slots) == 1


@given(state=state_dicts, place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_flipped_bit_is_found(state: dict[str, Tensor], place: int, bit: int) -> None:
    update = pack({**state, "last": torch.ones(3)}, 7, 64)
    bucket = update.buckets[place % len(update.buckets)]
    if len(bucket.data):
        bucket.data[place % len(bucket.data)] ^= 1 << bit
        with pytest.raises(WeightsDamaged):
            verify(update)


def test_the_error_names_the_bucket_its_tensors_and_both_checksums() -> None:
    update = pack({"a": torch.ones(4), "b.weight": torch.ones(4)}, 3, bucket_bytes=16)
    update.buckets[1].data[0] ^= 1
    with pytest.raises(
        WeightsDamaged,
        match=r"version 3, bucket 1 of 2 \(b\.weight\): checksum 0x\w{16} was sent, 0x\w{16} ",
    ):
        verify(update)


def test_a_swapped_version_is_found() -> None:
    update = msgspec.structs.replace(pack({"a": torch.ones(4)}, 3), version=4)
    with pytest.raises(WeightsDamaged, match="version 4, the list of buckets"):
        verify(update)


def test_a_lost_bucket_is_found() -> None:
    update = pack({"a": torch.ones(4), "b": torch.ones(4)}, 3, bucket_bytes=16)
    with pytest.raises(WeightsDamaged, match="the list of buckets"):
        verify(msgspec.structs.replace(update, buckets=update.buckets[:1]))


def test_packing_copies_so_that_training_may_go_on() -> None:
    weight = torch.ones(4)
    update = pack({"weight": weight}, 0)
    weight.zero_()
    assert unpack(update)["weight"].tolist() == [1.0] * 4


def test_unpacking_does_not_copy() -> None:
    update = pack({"weight": torch.ones(4)}, 0)
    view = unpack(update)["weight"]
    assert view.data_ptr() == update.buckets[0].data.ctypes.data


def test_read_only_and_misaligned_buckets_are_unpacked_too() -> None:
    bucket = pack({"weight": torch.arange(4.0)}, 0).buckets[0]
    frame = np.concatenate([np.zeros(3, np.uint8), bucket.data])
    arrived = frame[3:]
    arrived.flags.writeable = False
    update = WeightUpdate(0, (msgspec.structs.replace(bucket, data=arrived),), 0)
    assert unpack(update)["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_non_contiguous_tensor_keeps_its_order() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    state = {"weight": weight, "bias": weight[2:, 0].reshape(1), "scale": weight[0, 1:]}
    unpacked = unpack(pack(state, 0))
    assert all(torch.equal(unpacked[name], state[name]) for name in state)


def test_a_bucket_that_is_as_it_was_is_taken_over() -> None:
    state = {"frozen": torch.arange(1000.0), "odd": torch.ones(3), "trained": torch.ones(1000)}
    first = pack(state, 1, bucket_bytes=4100)
    state["trained"][500] = 2.0  # beyond what a glance sees
    second = pack(state, 2, bucket_bytes=4100, previous=first)
    assert second.buckets[0] is first.buckets[0]
    assert second.buckets[-1] is not first.buckets[-1]
    verify(second)
    assert same(unpack(second)["trained"], state["trained"])
    assert unpack(first)["trained"][500] == 1.0


@given(state=state_dicts, bucket_bytes=st.integers(1, 400))
def test_memory_that_was_used_before_gives_the_same_bytes(
    state: dict[str, Tensor], bucket_bytes: int
) -> None:
    used = pack(state, 3, bucket_bytes, allocate=lambda size: np.full(size, 0xA5, np.uint8))
    assert used.checksum == pack(state, 3, bucket_bytes).checksum
    verify(used)


def test_memory_that_cannot_be_had_is_replaced_by_ordinary_memory() -> None:
    update = pack({"a": torch.ones(4)}, 3, allocate=lambda size: None)
    assert unpack(update)["a"].tolist() == [1.0] * 4


def test_a_sharded_or_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'weight' is a Tensor of layout torch\.sparse_coo"):
        pack({"weight": torch.eye(3).to_sparse()}, 0)


def test_a_bucket_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        pack({}, 0, bucket_bytes=0)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (TensorSlot("w", "float32", (5,), 0), "20 bytes at offset 0 do not fit"),
        (TensorSlot("w", "float32", (1,), -16), "offset -16 do not fit"),
        (TensorSlot("w", "float32", (1,), 4), "alignment"),
        (TensorSlot("w", "float32", (-1,), 0), "do not fit"),
        (TensorSlot("w", "nn", (1,), 0), "no dtype 'nn'"),
    ],
)
def test_a_slot_outside_its_bucket_is_refused(slot: TensorSlot, message: str) -> None:
    bucket = WeightBucket((slot,), np.zeros(16, np.uint8), 0)
    with pytest.raises(WeightsDamaged, match=message):
        unpack(WeightUpdate(0, (bucket,), 0))


def test_a_name_that_comes_twice_is_refused() -> None:
    slot = TensorSlot("w", "uint8", (1,), 0)
    bucket = WeightBucket((slot, slot), np.zeros(1, np.uint8), 0)
    with pytest.raises(WeightsDamaged, match="'w': the name comes twice"):
        unpack(WeightUpdate(0, (bucket,), 0))


def test_loading_copies_into_the_module() -> None:
    sender, receiver = nn.Linear(3, 2), nn.Linear(3, 2)
    load(pack(sender.state_dict(), 1), receiver)
    assert torch.equal(sender.weight, receiver.weight)
    assert torch.equal(sender.bias, receiver.bias)


def expect_refusal(update: WeightUpdate, error: type[WeightsError], message: str) -> None:
    module = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(error, match=message):
        load(update, module)
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.ones(2, 3)}, "missing 'bias'"),
        ({**nn.Linear(3, 2).state_dict(), "extra": torch.ones(1)}, "unexpected 'extra'"),
        (nn.Linear(4, 2).state_dict(), r"'weight' is \[2, 4\], the model has \[2, 3\]"),
        (nn.Linear(3, 2).double().state_dict(), r"float64, the model has torch\.float32"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(
    state: dict[str, Tensor], message: str
) -> None:
    expect_refusal(pack(state, 1), WeightsMismatch, message)


def test_damaged_weights_are_refused_and_nothing_is_loaded() -> None:
    update = pack(nn.Linear(3, 2).state_dict(), 1, bucket_bytes=1)
    update.buckets[1].data[0] ^= 1
    expect_refusal(update, WeightsDamaged, "bucket 1 of 2")


def test_a_slot_that_was_changed_on_the_way_is_found() -> None:
    update = pack({"a": torch.ones(4)}, 3)
    slot = msgspec.structs.replace(update.buckets[0].slots[0], name="b")
    bucket = msgspec.structs.replace(update.buckets[0], slots=(slot,))
    assert update_checksum(3, (bucket,)) != update.checksum
    with pytest.raises(WeightsDamaged, match="the list of buckets"):
        verify(msgspec.structs.replace(update, buckets=(bucket,)))
