"""A compute thread pulls with ``next()`` while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlinf_async.channels import EndOfChannel
from rlinf_async.channels.batching import (
    BatchResizingIterator,
    HandlerFailed,
    PullCancelled,
    alone,
)
from tests.channels.batching_kit import OPS, Samples, channel_of, filled, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_thread_takes_every_micro_batch_in_order() -> None:
    channel = channel_of(capacity=1)
    batches = BatchResizingIterator(channel.receiver, OPS, total_batch_size=6, micro_batch_size=3)
    view = batches.blocking(asyncio.get_running_loop())
    training = asyncio.create_task(asyncio.to_thread(lambda: list(view)))
    with channel.sender as sender:
        for first in range(0, 12, 2):
            await sender.put([first, first + 1])
    assert await training == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


async def test_the_view_and_the_iterator_share_their_state() -> None:
    batches = BatchResizingIterator(
        filled([list(range(8))]), OPS, total_batch_size=8, num_global_batches=2, micro_batch_size=2
    )
    view = batches.blocking(asyncio.get_running_loop())
    assert await asyncio.to_thread(view.count) == 2
    assert await asyncio.to_thread(view.peek) == [0, 1]
    assert await asyncio.to_thread(lambda: list(view.global_batch())) == [[0, 1], [2, 3]]
    batches.check_finished_global_batch()
    assert await anext(batches) == [4, 5]
    assert await asyncio.to_thread(next, view) == [6, 7]
    assert await asyncio.to_thread(next, view, None) is None
    with pytest.raises(EndOfChannel):
        await asyncio.to_thread(lambda: list(view.global_batch()))


async def test_plain_handlers_run_in_the_pulling_thread_and_async_ones_on_the_loop() -> None:
    ran: dict[str, int] = {}

    def advantages(batch: Samples) -> Samples:
        ran["advantages"] = threading.get_ident()
        return batch

    async def normalise(batch: Samples) -> Samples:
        ran["normalise"] = threading.get_ident()
        return batch

    def agree(count: int) -> int:
        ran["agree"] = threading.get_ident()
        return count

    batches = BatchResizingIterator(
        filled([[1, 2]]),
        OPS,
        total_batch_size=2,
        max_tokens_per_micro_batch=9,
        on_batch=advantages,
        on_global_batch=normalise,
        agree=agree,
    )
    view = batches.blocking(asyncio.get_running_loop())

    def train() -> int:
        assert next(view) == [1, 2]
        return threading.get_ident()

    thread = await asyncio.to_thread(train)
    assert ran == {"advantages": thread, "agree": thread, "normalise": threading.get_ident()}


async def test_a_handler_that_fails_in_the_thread_raises_there() -> None:
    def advantages(batch: Samples) -> Samples:
        raise ArithmeticError("overflow")

    batches = BatchResizingIterator(
        filled([[1]]), OPS, total_batch_size=1, micro_batch_size=1, on_batch=advantages
    )
    view = batches.blocking(asyncio.get_running_loop())
    with pytest.raises(HandlerFailed, match="received batch 0: ArithmeticError: overflow"):
        await asyncio.to_thread(next, view)


async def test_closing_ends_a_waiting_pull_and_loses_nothing() -> None:
    channel = channel_of()
    batches = BatchResizingIterator(channel.receiver, OPS, total_batch_size=2, micro_batch_size=2)
    view = batches.blocking(asyncio.get_running_loop())
    await channel.sender.put([1])
    pull = asyncio.create_task(asyncio.to_thread(next, view))
    await until(channel.waits)
    view.close()
    with pytest.raises(PullCancelled, match="wait for the next batch was cancelled"):
        await pull
    with pytest.raises(PullCancelled, match="the blocking view was closed"):
        await asyncio.to_thread(next, view)
    await channel.sender.put([2])
    assert await anext(batches) == [1, 2]


async def test_closing_during_an_async_handler_is_no_failure_of_the_handler() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def normalise(batch: Samples) -> Samples:
        started.set()
        await go_on.wait()
        return batch

    batches = BatchResizingIterator(
        filled([[1]]),
        OPS,
        total_batch_size=1,
        max_tokens_per_micro_batch=1,
        on_global_batch=normalise,
        agree=alone,
    )
    view = batches.blocking(asyncio.get_running_loop())
    pull = asyncio.create_task(asyncio.to_thread(next, view))
    await started.wait()
    view.close()
    with pytest.raises(PullCancelled):
        await pull
    go_on.set()
    assert await anext(batches) == [1]


async def test_a_blocking_pull_on_its_own_loop_is_refused() -> None:
    batches = BatchResizingIterator(filled([[1]]), OPS, total_batch_size=1, micro_batch_size=1)
    with pytest.raises(RuntimeError, match="would wait for itself"):
        next(batches.blocking(asyncio.get_running_loop()))


def test_a_loop_that_stops_frees_the_waiting_thread() -> None:
    ended: list[BaseException] = []

    async def main() -> threading.Thread:
        channel = channel_of()
        batches = BatchResizingIterator(
            channel.receiver, OPS, total_batch_size=1, micro_batch_size=1
        )
        view = batches.blocking(asyncio.get_running_loop())

        def train() -> None:
            try:
                next(view)
            except PullCancelled as error:
                ended.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        await until(channel.waits)
        return thread

    asyncio.run(main()).join()
    assert len(ended) == 1


def test_a_pull_on_a_closed_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    batches = BatchResizingIterator(
        channel_of().receiver, OPS, total_batch_size=1, micro_batch_size=1
    )
    view = batches.blocking(loop)
    loop.close()
    with pytest.raises(PullCancelled, match="its event loop was closed"):
        next(view)
