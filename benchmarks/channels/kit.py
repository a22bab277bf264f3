"""What every side of the two-process cases shares: the items, the clock, how a figure is taken.

It runs in each peer's virtualenv, so it needs msgspec and numpy and nothing of ours. A case is one
command; it prints one line of JSON::

    items     64-byte messages, put and got one by one       items_per_s
    echo      a message there and back                       p50_us, p99_us
    arrays    float32 arrays of 4 and 64 MiB                 gb_per_s_4mb, gb_per_s_64mb

The consumer measures. An array counts when its first and last element have been read: nobody
has to copy it out of where it arrived.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np

SECONDS = 1.5
"""that a rate is taken over"""
WARM_UP = 0.4
"""seconds before that, which do not count"""
CALLS = 3_000
"""round trips of which the percentiles are taken"""
IN_FLIGHT = 1_000
"""calls that are in flight together"""
CAPACITY = 1_024
"""of a channel of small items, where it can be chosen"""
ARRAYS = {"4mb": 1 << 20, "64mb": 1 << 24}
"""elements of the arrays: 4 and 64 MiB of float32"""
ARRAY_CAPACITY = 8
"""of a channel of arrays, where it can be chosen"""
SOURCES = 256 << 20
"""bytes of arrays that a producer sends in turn, so that they do not stay in its caches"""


class Item(msgspec.Struct):
    """A small message: 64 bytes as MessagePack."""

    number: int
    body: bytes


class Block(msgspec.Struct):
    """A message with a large array."""

    number: int
    values: np.ndarray[Any, np.dtype[np.float32]]


ITEM = Item(1, b"x" * 48)


def sources(elements: int) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """Arrays of this many elements, in turn, for ever."""
    count = max(2, SOURCES // (4 * elements))
    return itertools.cycle([np.full(elements, number, np.float32) for number in range(count)])


def touch(values: Any) -> None:
    """Read the first and the last element of what arrived."""
    if float(values[0]) != float(values[-1]):
        raise ValueError("an array arrived torn")


async def rate(
    take: Callable[[], Awaitable[object]],
    *,
    every: int = 16,
    warm_up: float = WARM_UP,
    seconds: float = SECONDS,
) -> float:
    """How often a second this succeeds; the clock is read once for so many."""
    await _taken_for(take, warm_up, every)
    count, taken = await _taken_for(take, seconds, every)
    return count / taken


def blocking_rate(take: Callable[[], object], *, every: int = 16) -> float:
    """The same for what blocks."""
    _blocked_for(take, WARM_UP, every)
    count, seconds = _blocked_for(take, SECONDS, every)
    return count / seconds


async def latencies(call: Callable[[], Awaitable[object]], calls: int = CALLS) -> dict[str, float]:
    """Median and 99th percentile of calls that are made one after the other, in microseconds."""
    for _ in range(calls // 10):
        await call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - start)
    return percentiles(seconds)


def blocking_latencies(call: Callable[[], object]) -> dict[str, float]:
    """The same for what blocks."""
    for _ in range(CALLS // 10):
        call()
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return percentiles(seconds)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """``p50_us`` and ``p99_us``."""
    seconds = sorted(seconds)
    p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    return {"p50_us": p50 * 1e6, "p99_us": p99 * 1e6}


def gb_per_s(arrays_per_s: float, elements: int) -> float:
    """Gigabytes (1e9) per second."""
    return arrays_per_s * elements * 4 / 1e9


def own_core(number: int) -> None:
    """Keep this thread to one of the cores that the case was given.

    What goes there and back is measured between two cores: left to itself, the kernel puts both
    sides on one as soon as the machine is busy, and wakes neither from sleep.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def done(**measured: float) -> None:
    """Print what was measured, as the bench reads it."""
    print(json.dumps(measured), flush=True)


async def _taken_for(
    take: Callable[[], Awaitable[object]], seconds: float, every: int
) -> tuple[int, float]:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(every):
            await take()
        count += every
    return count, elapsed


def _blocked_for(take: Callable[[], object], seconds: float, every: int) -> tuple[int, float]:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(every):
            take()
        count += every
    return count, elapsed
