"""A handler that fails says which batch it failed on, and the next pull tries again."""

from __future__ import annotations

import pytest

from rlinf_async.channels.batching import (
    BadBatch,
    BatchResizingIterator,
    CountsDisagree,
    HandlerFailed,
    SampleTooLong,
    alone,
)
from tests.channels.batching_kit import OPS, Samples, channel_of, filled

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FailsOnce:
    """A handler that raises on one of its calls and passes the others through."""

    def __init__(self, call: int) -> None:
        self.calls = 0
        self._fails_on = call

    def __call__(self, batch: Samples) -> Samples:
        self.calls += 1
        if self.calls == self._fails_on:
            raise ZeroDivisionError("standard deviation of one sample")
        return batch


async def test_a_failing_batch_handler_names_the_batch_and_can_be_retried() -> None:
    handler = FailsOnce(call=2)
    batches = BatchResizingIterator(
        filled([[1, 2], [3, 4]]), OPS, total_batch_size=4, micro_batch_size=4, on_batch=handler
    )
    with pytest.raises(HandlerFailed, match="on received batch 1: ZeroDivisionError: stand") as at:
        await anext(batches)
    assert (at.value.kind, at.value.index) == ("on_batch", 1)
    assert isinstance(at.value.__cause__, ZeroDivisionError)
    assert await anext(batches) == [1, 2, 3, 4]
    assert handler.calls == 3


async def test_a_failing_global_handler_names_the_global_batch_and_can_be_retried() -> None:
    handler = FailsOnce(call=2)
    batches = BatchResizingIterator(
        filled([[1, 2, 3, 4]]),
        OPS,
        total_batch_size=4,
        num_global_batches=2,
        micro_batch_size=2,
        on_global_batch=handler,
    )
    assert await anext(batches) == [1, 2]
    with pytest.raises(HandlerFailed, match="on_global_batch failed on global batch 1") as caught:
        await anext(batches)
    assert (caught.value.kind, caught.value.index) == ("on_global_batch", 1)
    assert await anext(batches) == [3, 4]


async def test_a_handler_that_forgets_to_return_is_told_so() -> None:
    def in_place(batch: Samples) -> None:
        batch.sort()

    batches = BatchResizingIterator(
        filled([[2, 1]]),
        OPS,
        total_batch_size=2,
        micro_batch_size=2,
        on_batch=in_place,  # type: ignore[arg-type]
    )
    with pytest.raises(HandlerFailed, match="it returned None; return the batch"):
        await anext(batches)


async def test_a_batch_handler_may_filter_samples() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2], [3, 5], [4, 6]]),
        OPS,
        total_batch_size=3,
        micro_batch_size=3,
        on_batch=lambda batch: [sample for sample in batch if sample % 2 == 0],
    )
    assert await anext(batches) == [2, 4, 6]


async def test_a_global_handler_may_not_change_the_number_of_samples() -> None:
    batches = BatchResizingIterator(
        filled([[1, 2]]),
        OPS,
        total_batch_size=2,
        micro_batch_size=2,
        on_global_batch=lambda batch: batch[:1],
    )
    with pytest.raises(BadBatch, match="returned 1 samples for the 2 of global batch 0"):
        await anext(batches)


async def test_a_sample_over_the_token_limit_is_an_error_and_nothing_is_lost() -> None:
    batches = BatchResizingIterator(
        filled([[1, 9]]), OPS, total_batch_size=2, max_tokens_per_micro_batch=8, agree=alone
    )
    for _ in range(2):
        with pytest.raises(SampleTooLong, match="sample 1 of the window has 9 tokens"):
            await anext(batches)
    assert batches.queued_samples == 2


@pytest.mark.parametrize(
    ("agreed", "why"),
    [(1, r"agree\(2\) gave 1.*maximum over ranks"), (4, "3 samples cannot make 4 micro-batches")],
)
async def test_a_count_that_cannot_be_made_is_an_error(agreed: int, why: str) -> None:
    batches = BatchResizingIterator(
        filled([[5, 5, 5]]),
        OPS,
        total_batch_size=3,
        max_tokens_per_micro_batch=10,
        agree=lambda count: agreed,
    )
    with pytest.raises(CountsDisagree, match=why):
        await anext(batches)


async def test_an_agreement_that_fails_passes_through_and_can_be_retried() -> None:
    attempts: list[int] = []

    async def agree(count: int) -> int:
        attempts.append(count)
        if len(attempts) == 1:
            raise ConnectionError("rank 3 is gone")
        return count

    channel = channel_of()
    await channel.sender.put([5, 5])
    batches = BatchResizingIterator(
        channel.receiver, OPS, total_batch_size=2, max_tokens_per_micro_batch=5, agree=agree
    )
    with pytest.raises(ConnectionError, match="rank 3 is gone"):
        await anext(batches)
    assert await anext(batches) == [5]
    assert attempts == [2, 2]
