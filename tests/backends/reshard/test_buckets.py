"""Runs into a bucket and out of it, a block at a time, wherever the blocks end."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlinf_async.backends.reshard import allocate, buckets
from rlinf_async.backends.reshard.executor import by_peer, copy_runs
from rlinf_async.parallel import BufferRun, Plan, plan
from tests.backends.reshard.test_executor import filled, ring

CPU = torch.device("cpu")
RANKS = range(4)


def carried_out(made: Plan, dtype: torch.dtype, *, damaged: bool = False) -> list[bool]:
    """Carry a plan out by buckets of one process; whether each bucket was found sound."""

    def as_(_: BufferRun) -> torch.dtype:
        return dtype

    old = {rank: filled(made.old, rank, 0) for rank in RANKS}
    new = {rank: allocate(made.new, rank, device=CPU, dtype=dtype) for rank in RANKS}
    sound: list[bool] = []
    for rank in RANKS:
        mine = made.of_rank(rank)
        copy_runs(mine.copies, old[rank], new[rank])
        for peer, runs in by_peer(mine.sends, "target_rank").items():
            bucket = torch.empty(buckets.bucket_bytes(runs, as_), dtype=torch.uint8)
            buckets.seal(bucket, buckets.pack(bucket, runs, old[rank], as_), 3)
            if damaged:
                bucket[len(bucket) // 2] ^= 1
            sound.append(buckets.unpack(bucket, runs, new[peer], as_, 3))
    if not damaged:
        assert all(right(made, rank, new[rank], dtype) for rank in RANKS)
    return sound


def right(made: Plan, rank: int, new: dict[str, Tensor], dtype: torch.dtype) -> bool:
    expected = filled(made.new, rank, 0)
    return all(torch.equal(new[name], one.to(dtype)) for name, one in expected.items())


@pytest.mark.parametrize("block", [16, 100, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_unpacked_is_what_was_packed_for_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(buckets, "BLOCK", block)
    for old, new in pairwise(ring()):
        assert all(carried_out(plan(old, new), dtype))


@pytest.mark.parametrize("block", [16, 1 << 19])
def test_one_changed_bit_is_seen_wherever_the_blocks_end(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(buckets, "BLOCK", block)
    for old, new in pairwise(ring()):
        assert not any(carried_out(plan(old, new), torch.float32, damaged=True))


def test_a_bucket_of_another_round_is_not_sound() -> None:
    bucket = torch.zeros(buckets.SEAL, dtype=torch.uint8)

    def as_(_: BufferRun) -> torch.dtype:
        return torch.float32

    buckets.seal(bucket, buckets.pack(bucket, [], {}, as_), 3)
    assert buckets.unpack(bucket, [], {}, as_, 3)
    assert not buckets.unpack(bucket, [], {}, as_, 4)
