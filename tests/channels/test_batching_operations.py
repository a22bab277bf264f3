"""Batches of lists, dicts and Structs are measured, cut and joined."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels.batching import BadBatch, DictOps, ListOps, StructOps
from rlinf_async.channels.batching.operations import sample_lengths, select


class Rollout(msgspec.Struct):
    tokens: NDArray[np.int64]
    """``[samples, width]``"""
    reward: NDArray[np.float32]
    lengths: list[int]
    prompt: list[str]
    version: int
    temperature: float = 1.0
    notes: tuple[str, ...] = ()


def rollout(first: int, size: int) -> Rollout:
    return Rollout(
        tokens=np.arange(first * 3, (first + size) * 3).reshape(size, 3),
        reward=np.arange(first, first + size, dtype=np.float32),
        lengths=list(range(first, first + size)),
        prompt=[f"p{index}" for index in range(first, first + size)],
        version=7,
    )


STRUCTS: StructOps[Rollout] = StructOps(lengths="lengths", shared={"notes"})


def test_struct_columns_are_cut_and_joined_and_the_rest_goes_along() -> None:
    one, other = STRUCTS.slice(rollout(0, 5), 1, 3), rollout(5, 2)
    joined = STRUCTS.concat([one, other])
    assert STRUCTS.size(joined) == 4
    assert joined.prompt == ["p1", "p2", "p5", "p6"]
    assert joined.reward.tolist() == [1, 2, 5, 6]
    assert joined.reward.dtype == np.float32
    assert joined.tokens[:, 0].tolist() == [3, 6, 15, 18]
    assert (joined.version, joined.notes) == (7, ())


def test_a_slice_of_arrays_shares_their_memory() -> None:
    batch = rollout(0, 5)
    assert np.shares_memory(STRUCTS.slice(batch, 1, 3).tokens, batch.tokens)


def test_dict_columns_may_be_nested() -> None:
    ops = DictOps()
    batch = {"obs": {"image": np.zeros((4, 2, 2)), "state": np.arange(4)}, "reward": [1, 2, 3, 4]}
    part = ops.slice(batch, 1, 3)
    joined = ops.concat([part, batch])
    assert (ops.size(part), ops.size(joined)) == (2, 6)
    assert joined["obs"]["state"].tolist() == [1, 2, 0, 1, 2, 3]
    assert joined["reward"] == [2, 3, 1, 2, 3, 4]


def test_torch_tensors_are_joined_by_torch() -> None:
    import torch

    ops = DictOps()
    joined = ops.concat([{"x": torch.ones(2, 3)}, {"x": torch.zeros(1, 3)}])
    assert joined["x"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_nan_in_what_a_batch_shares_equals_itself() -> None:
    ops = DictOps(shared={"stats"})
    nan = float("nan")
    batches: list[dict[str, Any]] = [
        {"x": [1], "score": nan, "stats": np.array([1.0, nan])},
        {"x": [2], "score": float("nan"), "stats": np.array([1.0, nan])},
    ]
    assert ops.concat(batches)["x"] == [1, 2]


@pytest.mark.parametrize("stats", [[1.0], [1.0, 1.0, 1.0]])
def test_arrays_of_another_shape_are_not_the_same(stats: list[float]) -> None:
    ops = DictOps(shared={"stats"})
    batches: list[dict[str, Any]] = [
        {"x": [1], "stats": np.array([1.0, 1.0])},
        {"x": [2], "stats": np.array(stats)},
    ]
    with pytest.raises(BadBatch, match="'stats' belongs to the batch as a whole and differs"):
        ops.concat(batches)


def test_select_keeps_order_and_takes_neighbours_as_one_slice() -> None:
    slices: list[tuple[int, int]] = []

    class Watched(ListOps[int]):
        def slice(self, batch: list[int], start: int, stop: int, /) -> list[int]:
            slices.append((start, stop))
            return super().slice(batch, start, stop)

    assert select(Watched(), [10, 11, 12, 13, 14], [0, 1, 3, 4]) == [10, 11, 13, 14]
    assert slices == [(0, 2), (3, 5)]


def test_columns_that_differ_in_size_are_named() -> None:
    with pytest.raises(BadBatch, match=r"x: 2, obs\.y: 3.*shared="):
        DictOps().size({"x": [1, 2], "obs": {"y": np.arange(3)}})


def test_a_batch_without_columns_cannot_be_counted() -> None:
    with pytest.raises(BadBatch, match="no columns"):
        DictOps().size({"version": 3, "scale": np.float32(2), "name": "abc"})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"x": [1], "version": 2}, "'version' belongs to the batch as a whole and differs"),
        ({"x": [1], "version": [1]}, "'version' belongs to the batch as a whole and differs"),
        ({"x": [1]}, "not all of them have version"),
    ],
)
def test_batches_that_do_not_fit_are_not_joined(other: dict[str, Any], why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        DictOps().concat([{"x": [1], "version": 1}, other])


class Rows:
    """A column of a type that no library joins."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.rows[rows])


def test_columns_of_an_unknown_type_need_a_joining_function() -> None:
    batches = [{"x": Rows([1])}, {"x": Rows([2, 3])}]
    with pytest.raises(BadBatch, match="type Rows need concatenate="):
        DictOps().concat(batches)
    ops = DictOps(concatenate=lambda rows: Rows([row for part in rows for row in part.rows]))
    assert ops.concat(batches)["x"].rows == [1, 2, 3]


def test_lengths_come_from_the_named_column_or_function() -> None:
    assert sample_lengths(STRUCTS, rollout(3, 2)) == [3, 4]
    assert sample_lengths(DictOps(lengths="n"), {"n": np.array([4, 5])}) == [4, 5]
    assert sample_lengths(ListOps[str](length=len), ["ab", "c"]) == [2, 1]


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (np.array([1.0, np.nan]), "whole numbers"),
        ([1, -2], "length of sample 1 is negative: -2"),
        ([1, 2, 3], "3 lengths were given for 2 samples"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(column: Any, why: str) -> None:
    ops = DictOps(lengths="n", shared={"n"})
    with pytest.raises(BadBatch, match=why):
        sample_lengths(ops, {"x": [1, 2], "n": column})


def test_unknown_lengths_say_what_to_give() -> None:
    with pytest.raises(BadBatch, match=r"no column was named.*\(x, y\)"):
        DictOps().lengths({"x": [1], "y": [1]})
    with pytest.raises(BadBatch, match="there is no column 'tokens'"):
        DictOps(lengths="tokens").lengths({"x": [1]})
    with pytest.raises(BadBatch, match=r"ListOps\(length=...\)"):
        ListOps[int]().lengths([1])
