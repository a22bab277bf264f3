"""Samples of one model's ranks travel as MessagePack: nothing that arrives is unpickled."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.megatron.feed import decode, encode
from rlinf_async.messages.language import TrainingSample


def sample(**fields: Any) -> TrainingSample:
    ids = np.arange(3, dtype=np.int32)
    made: dict[str, Any] = {
        "group": 1,
        "index": 2,
        "prompt_ids": ids,
        "response_ids": ids[:0],
        "loss_mask": np.array([True, False]),
        "log_prob": np.array([[-np.inf, 0.5]], np.float32).T,
        "version": ids[::-1],
        "temperature": 0.7,
        "reward": float("nan"),
        "scored": False,
    }
    return TrainingSample(**(made | fields))


def test_a_micro_batch_arrives_as_it_was_with_arrays_of_its_own() -> None:
    sent = MicroBatch([sample(), sample(value=np.ones(1, np.float32))], True, 3)
    found = decode(encode(sent), MicroBatch | None)
    assert (found.is_last, found.of, len(found.samples)) == (True, 3, 2)
    for one, other in zip(found.samples, sent.samples, strict=True):
        for field in one.__struct_fields__:
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
            if isinstance(getattr(one, field), np.ndarray):
                assert getattr(one, field).dtype == getattr(other, field).dtype
    found.samples[0].prompt_ids[0] = 9  # writable
    assert decode(encode(None), MicroBatch | None) is None


@pytest.mark.parametrize("value", [object(), np.array([object()]), {"a": lambda: 0}])
def test_what_is_no_data_does_not_travel(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize(
    "data", [b"", pickle.dumps(sample()), encode([1, 2]), encode({"group": 1})]
)
def test_what_is_no_sample_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data, TrainingSample)
