"""Checksums of buckets: what they must see, and that they do not depend on how bytes are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlinf_async.backends.reshard.buckets import Digest, sum_by_place


def by_bytes(data: Tensor) -> int:
    return Digest(data).value()


def by_words(data: Tensor) -> int:
    return int(sum_by_place(data).item())


ways = pytest.mark.parametrize("checksum", [by_bytes, by_words])


@ways
@pytest.mark.parametrize("words", [1, 511, 512, 513, 5000, (1 << 18) + 700])
def test_one_changed_bit_changes_the_checksum(
    checksum: Callable[[Tensor], int], words: int
) -> None:
    numbers = torch.Generator().manual_seed(words)
    data = torch.randint(0, 255, (words * 8,), dtype=torch.uint8, generator=numbers)
    sound = checksum(data)
    for place in torch.randint(0, len(data), (50,), generator=numbers).tolist():
        for bit in (1, 128):
            data[place] ^= bit
            assert checksum(data) != sound
            data[place] ^= bit
    assert checksum(data) == sound


@ways
def test_words_in_another_order_change_the_checksum(checksum: Callable[[Tensor], int]) -> None:
    data = torch.randint(0, 255, (8 * 2000,), dtype=torch.uint8)
    sound = checksum(data)
    for shift in (8, 8 * 7, 8 * 512, 8 * 1025):
        assert checksum(data.roll(shift)) != sound


def test_the_checksum_does_not_depend_on_where_the_blocks_end() -> None:
    data = torch.randint(0, 255, (8 * 3000,), dtype=torch.uint8)
    sound = by_bytes(data)
    digest = Digest(data)
    for end in (8, 8, 0, 5000, 23_992):
        digest.reach(end)
    assert digest.value() == digest.value() == sound
    assert -(1 << 63) <= sound < 1 << 63


def test_a_block_that_changes_after_it_was_read_is_not_the_one_that_was_summed() -> None:
    data = torch.zeros(64, dtype=torch.uint8)
    digest = Digest(data)
    digest.reach(32)
    data[0] = 1
    assert digest.value() != by_bytes(data)
