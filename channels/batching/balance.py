"""Token-balanced micro-batches: which samples of a window share a micro-batch.

Longest-first list scheduling: samples are assigned, longest first, to the micro-batch with the
fewest tokens (Graham 1969, "Bounds on multiprocessing timing anomalies": the largest part is at
most 4/3 of the best possible). Two properties that the iterator relies on:

- no part is empty, as long as there are at least as many samples as parts;
- one part more never makes the largest part larger, so a count that was raised to agree with other
  ranks still keeps to the token limit. (By induction over the samples: with loads sorted
  downwards, the i-th of k + 1 parts is at most the i-th of k parts.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rlinf_async.channels.batching.errors import CountsDisagree, SampleTooLong


def balance(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the samples of each of ``count`` micro-batches.

    Samples keep their order inside a micro-batch; micro-batches are in the order of their first
    samples. Raises `CountsDisagree` when there are fewer samples than micro-batches.
    """
    if not 1 <= count <= len(lengths):
        raise CountsDisagree(
            f"{len(lengths)} samples cannot make {count} micro-batches without an empty one. "
            f"Every rank must have equally many samples per window; a larger balance_window or "
            f"max_tokens_per_micro_batch makes it less likely."
        )
    parts: list[list[int]] = [[] for _ in range(count)]
    # The number of samples breaks ties: samples of no tokens fill empty parts first.
    heap = [(0, 0, part) for part in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        tokens, samples, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], samples + 1, part))
    return sorted(sorted(part) for part in parts)


def fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """The smallest count for which `balance` keeps every micro-batch within ``max_tokens``.

    Raises `SampleTooLong` when a single sample exceeds ``max_tokens``.
    """
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[longest] > max_tokens:
        raise SampleTooLong(
            f"sample {longest} of the window has {lengths[longest]} tokens, over the "
            f"{max_tokens} of max_tokens_per_micro_batch. Set it to at least the longest sequence "
            f"that can occur, or shorten sequences in on_batch."
        )
    low, high = max(1, -(-sum(lengths) // max_tokens)), len(lengths)
    while low < high:
        middle = (low + high) // 2
        if _largest_part(lengths, middle) <= max_tokens:
            high = middle
        else:
            low = middle + 1
    return low


def _largest_part(lengths: Sequence[int], count: int) -> int:
    return max(sum(lengths[index] for index in part) for part in balance(lengths, count))
