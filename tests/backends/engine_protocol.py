"""What every `GenerationEngine` must do, whatever it is made of. Each engine's tests run it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlinf_async.backends.language import GenerationEngine
from rlinf_async.messages.language import Generated
from rlinf_async.messages.weights import WeightsOutdated, WeightUpdate
from tests.backends.requests import request


async def until_made(engine: GenerationEngine, tokens: int, *running: asyncio.Future[Any]) -> None:
    """Wait until a request under way has at least so many tokens; not all may end before that."""
    made = 0
    while made < tokens:
        assert not all(one.done() for one in running), f"all have ended: {made} tokens were seen"
        await asyncio.sleep(0.001)
        made = max((len(one.token_ids) for one in (await engine.so_far()).values()), default=0)


async def until_made_under(
    engine: GenerationEngine, version: int, *running: asyncio.Future[Any]
) -> None:
    """Wait until all requests under way have tokens of this version; not all may end before."""
    under_way: list[Generated] = []
    while not under_way or not all((one.version == version).any() for one in under_way):
        assert not all(one.done() for one in running), f"all have ended before version {version}"
        await asyncio.sleep(0.001)
        under_way = list((await engine.so_far()).values())


async def carries_a_cancelled_load_to_its_end(
    engine: GenerationEngine, update: WeightUpdate, max_tokens: int = 350
) -> list[Generated]:
    """What runs goes on under the weights whose load was cancelled.

    Returns two responses, which are aborted after that: one that runs meanwhile, and one that came
    after the cancellation. ``max_tokens``: more than are made in all that time.
    """
    running = asyncio.create_task(engine.generate(request(0, max_tokens=max_tokens)))
    await until_made(engine, 5, running)
    loading = asyncio.create_task(engine.load(update))
    await asyncio.sleep(0)  # it has begun
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    after = asyncio.create_task(engine.generate(request(1, max_tokens=max_tokens)))
    await until_made_under(engine, update.version, running, after)
    assert engine.version == update.version
    await engine.abort()
    return [await running, await after]


async def refuses_older_weights(
    engine: GenerationEngine, older: WeightUpdate, newer: WeightUpdate
) -> None:
    """An older version than the one served changes nothing; the same one again is welcome."""
    assert await engine.load(newer) == newer.checksum
    before = await engine.generate(request())
    said = f"version {older.version} came while version {newer.version} is served"
    with pytest.raises(WeightsOutdated, match=said):
        await engine.load(older)
    assert engine.version == newer.version
    after = await engine.generate(request())
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    np.testing.assert_array_equal(after.log_prob, before.log_prob)
    assert set(after.version.tolist()) == {newer.version}
    assert await engine.load(newer) == newer.checksum
