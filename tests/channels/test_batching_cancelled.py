"""A cancelled pull loses nothing, and has nothing done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels.batching import (
    BatchResizingIterator,
    HandlerFailed,
    PullCancelled,
)
from rlinf_async.channels.errors import EndOfChannel
from tests.channels.batching_kit import OPS, MaxOverRanks, Samples, cut, filled, flat, places

T = TypeVar("T")
turns = st.lists(st.integers(0, 6), max_size=40)
"""after so many turns of the loop the next pull is cancelled"""


class Handlers:
    """Handlers that take some turns of the loop, and count their calls."""

    def __init__(self, agree: Callable[[int], object] | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self.running = 0
        self._agree = agree or self._alone

    async def on_batch(self, batch: Samples) -> Samples:
        await self._take_turns("on_batch")
        return batch

    async def on_global_batch(self, batch: Samples) -> Samples:
        await self._take_turns("on_global_batch")
        return batch

    async def agree(self, count: int) -> int:
        self.calls["agree"] += 1
        found: int = await self._agree(count)  # type: ignore[misc]
        return found

    async def _alone(self, count: int) -> int:
        await self._take_turns("")
        return count

    async def _take_turns(self, name: str) -> None:
        self.calls[name] += 1
        self.running += 1
        assert self.running == 1, "two handlers of one iterator run at a time"
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1


async def pull_with_cancellations(
    batches: BatchResizingIterator[Samples], after: list[int]
) -> list[Samples]:
    """Everything, by pulls of which each is cancelled after some turns until none is left."""
    found: list[Samples] = []
    cancellations = list(after)
    while True:
        pull = asyncio.ensure_future(anext(batches))
        if cancellations:
            for _ in range(cancellations.pop()):
                await asyncio.sleep(0)
            pull.cancel()
        try:
            found.append(await pull)
        except asyncio.CancelledError:
            continue
        except StopAsyncIteration:
            return found


@given(places, turns, st.booleans())
def test_handlers_are_called_once_however_often_pulls_are_cancelled(
    arrival: list[int], after: list[int], whole: bool
) -> None:
    samples = [1 + number % 9 for number in range(12)]
    handlers = Handlers()
    arrived = cut(samples, arrival)

    async def main() -> list[Samples]:
        return await pull_with_cancellations(
            BatchResizingIterator(
                filled(arrived),
                OPS,
                total_batch_size=12,
                num_global_batches=2,
                max_tokens_per_micro_batch=20,
                balance_window=3,
                on_batch=handlers.on_batch,
                on_global_batch=handlers.on_global_batch if whole else None,
                agree=handlers.agree,
            ),
            after,
        )

    found = asyncio.run(main())
    assert sorted(flat(found)) == sorted(samples)
    assert handlers.calls["agree"] == 4
    assert handlers.calls["on_batch"] == sum(1 for batch in arrived if batch)
    assert handlers.calls["on_global_batch"] == (2 if whole else 0)


@given(st.lists(turns, min_size=3, max_size=3), st.data())
def test_ranks_whose_pulls_are_cancelled_at_different_times_stay_in_step(
    after: list[list[int]], data: st.DataObject
) -> None:
    lengths = st.lists(st.integers(1, 20), min_size=12, max_size=12)
    samples = [data.draw(lengths) for _ in after]

    async def main() -> tuple[list[list[Samples]], list[int]]:
        together = MaxOverRanks(len(after))
        handlers = [Handlers(together) for _ in after]
        found = await asyncio.gather(
            *(
                pull_with_cancellations(
                    BatchResizingIterator(
                        filled([samples[rank]]),
                        OPS,
                        total_batch_size=12,
                        max_tokens_per_micro_batch=30,
                        balance_window=4,
                        agree=handlers[rank].agree,
                    ),
                    after[rank],
                )
                for rank in range(len(after))
            )
        )
        return found, [one.calls["agree"] for one in handlers]

    found, calls = asyncio.run(asyncio.wait_for(main(), 60))
    assert calls == [3, 3, 3]
    assert len({len(one) for one in found}) == 1
    assert [sorted(flat(one)) for one in found] == [sorted(one) for one in samples]


async def test_a_thread_whose_pull_was_ended_goes_on_with_the_same_call() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    calls: list[int] = []

    async def agree(count: int) -> int:
        calls.append(count)
        begun.set()
        await go_on.wait()
        return count

    batches = BatchResizingIterator(
        filled([[1, 2, 3]]), OPS, total_batch_size=3, max_tokens_per_micro_batch=9, agree=agree
    )
    view = batches.blocking(asyncio.get_running_loop())
    pulling = asyncio.ensure_future(asyncio.to_thread(next, view))
    await begun.wait()
    view.close()
    with pytest.raises(PullCancelled):
        await pulling
    again = batches.blocking(asyncio.get_running_loop())
    pulling = asyncio.ensure_future(asyncio.to_thread(next, again))
    go_on.set()
    assert await pulling == [1, 2, 3]
    assert calls == [1]


async def test_a_handler_that_fails_after_its_pull_was_cancelled_is_called_again() -> None:
    go_on = asyncio.Event()
    calls: list[Samples] = []

    async def on_batch(batch: Samples) -> Samples:
        calls.append(batch)
        await go_on.wait()
        if len(calls) == 1:
            raise ValueError("no")
        return batch

    batches = BatchResizingIterator(
        filled([[1, 2]]), OPS, total_batch_size=2, micro_batch_size=2, on_batch=on_batch
    )
    pull = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    pull.cancel()
    await asyncio.wait([pull])
    go_on.set()
    with pytest.raises(HandlerFailed, match="ValueError: no"):
        await anext(batches)
    assert await anext(batches) == [1, 2]
    assert len(calls) == 2


async def test_a_call_of_a_cancelled_pull_ends_before_samples_are_cut_anew() -> None:
    go_on = asyncio.Event()
    order: list[str] = []

    async def agree(count: int) -> int:
        order.append(f"begin {len(order)}")
        await go_on.wait()
        order.append(f"end {len(order)}")
        return count

    batches = BatchResizingIterator(
        filled([[1, 2, 3, 4]]), OPS, total_batch_size=4, max_tokens_per_micro_batch=9, agree=agree
    )
    pull = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pull.cancel()
    await asyncio.wait([pull])
    assert order == ["begin 0"]
    batches.reset_total_batch_size(2)
    go_on.set()
    assert flat([await anext(batches), await anext(batches)]) == [1, 2, 3, 4]
    with pytest.raises(EndOfChannel):
        await batches.peek()
    assert order == ["begin 0", "end 1", "begin 2", "end 3", "begin 4", "end 5"]


async def test_a_received_batch_is_handled_once_though_samples_are_cut_anew_meanwhile() -> None:
    go_on = asyncio.Event()
    calls: list[Samples] = []

    async def on_batch(batch: Samples) -> Samples:
        calls.append(batch)
        await go_on.wait()
        return batch

    batches = BatchResizingIterator(
        filled([[1, 2]]), OPS, total_batch_size=2, micro_batch_size=1, on_batch=on_batch
    )
    pull = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    pull.cancel()
    await asyncio.wait([pull])
    batches.reset_total_batch_size(1)
    go_on.set()
    assert flat([await anext(batches), await anext(batches)]) == [1, 2]
    assert calls == [[1, 2]]
