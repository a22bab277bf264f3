"""Any arrival in, exact micro-batches out, exactly once."""

from __future__ import annotations

import asyncio
from math import isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels import Channel, ChannelFailed, EndOfChannel
from rlinf_async.channels.batching import (
    BatchingError,
    BatchResizingIterator,
    BatchSizeError,
    IncompleteBatch,
    IteratorBusy,
    ListOps,
    UnfinishedGlobalBatch,
    alone,
)
from tests.channels.batching_kit import (
    OPS,
    Samples,
    channel_of,
    cut,
    filled,
    flat,
    places,
    steps,
    until,
)

pytestmark = pytest.mark.anyio

Sizes = tuple[int, int, int, int]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def fixed(sizes: Sizes) -> dict[str, Any]:
    micro, per_global, globals_, _ = sizes
    return {
        "total_batch_size": micro * per_global * globals_,
        "num_global_batches": globals_,
        "micro_batch_size": micro,
    }


def samples_of(sizes: Sizes) -> Samples:
    micro, per_global, globals_, count = sizes
    return list(range(micro * per_global * globals_ * count))


async def everything(batches: BatchResizingIterator[Samples]) -> list[Samples]:
    return [micro_batch async for micro_batch in batches]


@given(steps(), places, st.booleans())
def test_every_sample_comes_once_in_order_whatever_the_arrival(
    sizes: Sizes, arrival: list[int], gathered: bool
) -> None:
    samples, micro = samples_of(sizes), sizes[0]

    async def main() -> list[Samples]:
        receiver = filled(cut(samples, arrival))
        handler = (lambda batch: batch) if gathered else None
        return await everything(
            BatchResizingIterator(receiver, OPS, **fixed(sizes), on_global_batch=handler)
        )

    micro_batches = asyncio.run(main())
    assert flat(micro_batches) == samples
    assert {len(micro_batch) for micro_batch in micro_batches} == {micro}


@given(steps(), places)
def test_handlers_see_every_received_and_every_global_batch_once(
    sizes: Sizes, arrival: list[int]
) -> None:
    samples, received, globals_ = samples_of(sizes), list[Samples](), list[Samples]()
    micro, per_global, _, _ = sizes

    def advantages(batch: Samples) -> Samples:
        received.append(batch)
        return [sample * 10 for sample in batch]

    async def normalise(batch: Samples) -> Samples:
        globals_.append(batch)
        return [sample + 1 for sample in batch]

    async def main() -> list[Samples]:
        batches = BatchResizingIterator(
            filled(cut(samples, arrival)),
            OPS,
            **fixed(sizes),
            on_batch=advantages,
            on_global_batch=normalise,
        )
        return await everything(batches)

    assert flat(asyncio.run(main())) == [sample * 10 + 1 for sample in samples]
    assert received == [batch for batch in cut(samples, arrival) if batch]
    assert {len(batch) for batch in globals_} == {micro * per_global}
    assert flat(globals_) == [sample * 10 for sample in samples]


@given(st.integers(1, 3), st.integers(1, 12), st.booleans(), places, st.data())
def test_token_balanced_micro_batches_keep_the_limit_and_do_not_depend_on_the_arrival(
    windows: int, window: int, gathered: bool, arrival: list[int], data: st.DataObject
) -> None:
    size = windows * window
    samples = data.draw(st.lists(st.integers(0, 20), min_size=2 * size, max_size=2 * size))

    async def main(arriving: list[Samples]) -> list[Samples]:
        batches = BatchResizingIterator(
            filled(arriving),
            OPS,
            total_batch_size=size,
            max_tokens_per_micro_batch=25,
            balance_window=window,
            on_global_batch=(lambda batch: batch) if gathered else None,
            agree=alone,
        )
        return await everything(batches)

    micro_batches = asyncio.run(main(cut(samples, arrival)))
    assert micro_batches == asyncio.run(main([samples]))
    assert all(micro_batches)
    assert max(map(sum, micro_batches)) <= 25
    for start in range(0, 2 * size, size):  # global batch by global batch
        taken = flat(micro_batches)[start : start + size]
        assert sorted(taken) == sorted(samples[start : start + size])


async def test_a_micro_batch_goes_out_before_the_global_batch_is_there() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(
        channel.receiver, OPS, total_batch_size=100, micro_batch_size=2, num_global_batches=2
    )
    await channel.sender.put([1, 2, 3])
    assert await anext(batches) == [1, 2]
    assert batches.queued_samples == 1


async def test_a_balanced_window_goes_out_before_the_global_batch_is_there() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(
        channel.receiver,
        OPS,
        total_batch_size=8,
        max_tokens_per_micro_batch=10,
        balance_window=4,
        agree=alone,
    )
    await channel.sender.put([9, 1, 2, 7])
    assert [await anext(batches), await anext(batches)] == [[9, 1], [2, 7]]
    assert not batches.finished_global_batch


async def test_global_batch_stops_after_one_optimizer_step() -> None:
    batches = BatchResizingIterator(
        filled([list(range(8))]),
        OPS,
        total_batch_size=8,
        num_global_batches=2,
        micro_batch_size=2,
    )
    assert [batch async for batch in batches.global_batch()] == [[0, 1], [2, 3]]
    batches.check_finished_global_batch()
    assert [batch async for batch in batches.global_batch()] == [[4, 5], [6, 7]]
    assert batches.finished_global_batches == 2
    with pytest.raises(EndOfChannel):
        await anext(batches.global_batch())


async def test_prefetched_batches_stay_next_and_count_once() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2, 3, 4]]), OPS, total_batch_size=4, micro_batch_size=2, keep_batches=True
    )
    assert await batches.peek() == [1, 2]
    assert await batches.peek() == [1, 2]
    batches.check_finished_global_batch()  # peeking opens nothing
    assert batches.queued_samples == 4
    assert batches.get_all_batches() is None
    assert await everything(batches) == [[1, 2], [3, 4]]
    assert batches.get_all_batches() == [1, 2, 3, 4]


async def test_all_batches_are_those_taken_since_the_last_call() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2, 3]]), OPS, total_batch_size=3, micro_batch_size=1, keep_batches=True
    )
    await anext(batches)
    await anext(batches)
    assert batches.get_all_batches() == [1, 2]
    await anext(batches)
    assert batches.get_all_batches() == [3]
    assert batches.get_all_batches() is None


async def test_all_batches_of_an_iterator_that_keeps_none_are_refused() -> None:
    batches = BatchResizingIterator(
        channel_of().receiver, OPS, total_batch_size=1, micro_batch_size=1
    )
    with pytest.raises(BatchingError, match="keep_batches=True"):
        batches.get_all_batches()


async def test_an_open_global_batch_is_not_finished() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2, 3, 4]]), OPS, total_batch_size=4, micro_batch_size=1
    )
    await anext(batches)
    with pytest.raises(UnfinishedGlobalBatch, match="global batch 0 is open: 1 of its 4 samples"):
        batches.check_finished_global_batch()
    with pytest.raises(UnfinishedGlobalBatch):
        batches.reset_total_batch_size(8)
    assert batches.sizes.total_batch_size == 4


async def test_a_reset_cuts_anew_what_was_prefetched_and_handled() -> None:
    globals_: list[Samples] = []

    def normalise(batch: Samples) -> Samples:
        globals_.append(batch)
        return [sample * 100 for sample in batch]

    batches = BatchResizingIterator(
        filled([list(range(1, 13))]),
        OPS,
        total_batch_size=8,
        num_global_batches=2,
        micro_batch_size=2,
        on_global_batch=normalise,
    )
    assert [batch async for batch in batches.global_batch()] == [[100, 200], [300, 400]]
    await batches.peek()
    batches.reset_total_batch_size(16)
    assert flat([batch async for batch in batches.global_batch()]) == [
        sample * 100 for sample in range(5, 13)
    ]
    assert globals_ == [[1, 2, 3, 4], [5, 6, 7, 8], list(range(5, 13))]


@given(places, st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=5), st.booleans())
def test_resets_between_global_batches_lose_and_repeat_nothing(
    arrival: list[int], totals: list[int], peeked: bool
) -> None:
    samples = list(range(sum(totals)))

    async def main() -> list[Samples]:
        batches = BatchResizingIterator(
            filled(cut(samples, arrival)), OPS, total_batch_size=totals[0], micro_batch_size=2
        )
        taken: list[Samples] = []
        for total in totals:
            if peeked:
                await batches.peek()
            batches.reset_total_batch_size(total)
            taken.append(flat([batch async for batch in batches.global_batch()]))
        return taken

    taken = asyncio.run(main())
    assert flat(taken) == samples
    assert [len(batch) for batch in taken] == totals


async def test_a_reset_to_sizes_that_do_not_fit_changes_nothing() -> None:
    batches = BatchResizingIterator(filled([[1, 2]]), OPS, total_batch_size=2, micro_batch_size=2)
    await batches.peek()
    with pytest.raises(BatchSizeError, match="micro_batch_size=2 does not divide"):
        batches.reset_total_batch_size(3)
    assert await everything(batches) == [[1, 2]]


async def test_micro_batches_of_a_global_batch_can_be_counted_ahead() -> None:
    batches = BatchResizingIterator(
        channel_of().receiver, OPS, total_batch_size=12, num_global_batches=2, micro_batch_size=2
    )
    assert await batches.count() == 3


async def test_counting_under_a_token_limit_gathers_the_global_batch() -> None:
    batches = BatchResizingIterator(
        filled([[9, 1, 2, 7], [1, 1, 1, 1]]),
        OPS,
        total_batch_size=8,
        max_tokens_per_micro_batch=10,
        balance_window=4,
        agree=alone,
    )
    assert await batches.count() == 3
    await anext(batches)
    assert await batches.count() == 2
    assert await everything(batches) == [[2, 7], [1, 1, 1, 1]]


async def test_an_end_in_the_middle_of_a_batch_says_how_many_samples_are_missing() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2], [3, 4, 5]]),
        OPS,
        total_batch_size=12,
        num_global_batches=3,
        micro_batch_size=2,
    )
    assert [await anext(batches), await anext(batches)] == [[1, 2], [3, 4]]
    with pytest.raises(IncompleteBatch, match="1 of 4 samples of global batch 2 of 3") as caught:
        await anext(batches)
    assert (caught.value.missing, caught.value.missing_in_step) == (3, 7)
    assert not isinstance(caught.value, EndOfChannel)


async def test_an_end_between_the_global_batches_of_a_step_is_an_incomplete_step() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2]]), OPS, total_batch_size=4, num_global_batches=2, micro_batch_size=2
    )
    with pytest.raises(IncompleteBatch, match="0 of 2 samples of global batch 2 of 2"):
        await everything(batches)


async def test_a_failed_channel_passes_its_cause_on() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(channel.receiver, OPS, total_batch_size=4, micro_batch_size=2)
    channel.fail(ValueError("the simulator crashed"))
    with pytest.raises(ChannelFailed, match="the simulator crashed"):
        await anext(batches)


async def test_batches_without_samples_are_passed_over_and_counted() -> None:
    batches = BatchResizingIterator(
        filled([[], [1], [], [2], []]),
        OPS,
        total_batch_size=2,
        micro_batch_size=2,
        on_batch=lambda batch: [batch[0]],
    )
    assert await everything(batches) == [[1, 2]]
    assert batches.empty_batches == 3


async def test_nan_passes_through_untouched() -> None:
    channel = Channel(list[float], name="floats")
    channel.sender.put_nowait([nan, 1.0, nan])
    batches = BatchResizingIterator(
        channel.receiver, ListOps[float](), total_batch_size=3, micro_batch_size=3
    )
    assert [isnan(value) for value in await anext(batches)] == [True, False, True]


async def test_only_the_items_of_the_key_are_read() -> None:
    channel = channel_of()
    channel.sender.put_nowait([1], key=0)
    channel.sender.put_nowait([2], key=1)
    batches = BatchResizingIterator(
        channel.receiver, OPS, total_batch_size=1, micro_batch_size=1, key=1
    )
    assert await anext(batches) == [2]


async def test_a_second_puller_is_refused() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(channel.receiver, OPS, total_batch_size=1, micro_batch_size=1)
    first = asyncio.create_task(anext(batches))
    await until(channel.waits)
    with pytest.raises(IteratorBusy, match="own iterator"):
        await anext(batches)
    await channel.sender.put([1])
    assert await first == [1]


async def test_a_pull_cancelled_while_it_waits_keeps_what_it_had() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(channel.receiver, OPS, total_batch_size=4, micro_batch_size=4)
    await channel.sender.put([1, 2, 3])
    pull = asyncio.create_task(anext(batches))
    await until(channel.waits)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await channel.sender.put([4])
    assert await anext(batches) == [1, 2, 3, 4]


@given(places, st.lists(st.integers(0, 6), max_size=20))
def test_pulls_cancelled_anywhere_lose_and_repeat_nothing(
    arrival: list[int], patience: list[int]
) -> None:
    samples = list(range(24))

    async def slowly(batch: Samples) -> Samples:
        await asyncio.sleep(0)
        return batch

    async def agree(count: int) -> int:
        await asyncio.sleep(0)
        return count

    async def main() -> list[Samples]:
        channel = channel_of(capacity=1)

        async def produce() -> None:
            with channel.sender as sender:
                for batch in cut(samples, arrival):
                    await sender.put(batch)

        batches = BatchResizingIterator(
            channel.receiver,
            OPS,
            total_batch_size=12,
            num_global_batches=2,
            max_tokens_per_micro_batch=1000,
            balance_window=3,
            on_batch=slowly,
            on_global_batch=slowly,
            agree=agree,
        )
        taken: list[Samples] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            for ticks in patience:
                taken += await pull_for(ticks, batches)
            taken += await everything(batches)
        return taken

    assert flat(asyncio.run(main())) == samples


async def pull_for(ticks: int, batches: BatchResizingIterator[Samples]) -> list[Samples]:
    """A pull that is cancelled after some turns of the loop; what it got, if it was done."""
    pull = asyncio.create_task(anext(batches, None))
    for _ in range(ticks):
        await asyncio.sleep(0)
    pull.cancel()
    await asyncio.wait([pull])
    micro_batch = None if pull.cancelled() else pull.result()
    return [] if micro_batch is None else [micro_batch]
