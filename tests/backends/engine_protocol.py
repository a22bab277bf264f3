"""What every `GenerationEngine` must do, whatever it is made of. Each engine's tests run it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rlinf_async.backends.language import GenerationEngine
from rlinf_async.messages.language import Generated, Request
from rlinf_async.messages.stopping import ended, written
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


async def stops_where_it_is_told(engine: GenerationEngine) -> None:
    """A response ends with the token that completes a stop text, or that is a stop token: the same
    tokens as without it up to there, and none behind it is drawn."""
    asked = request(0, range(2, 8), max_tokens=40)
    whole = await engine.generate(asked)
    text = engine.decode(whole.token_ids)
    for at in (0, 9, 31, 57):
        stop = text[at : at + 3]
        ends = [n for n in range(1, 41) if stop in engine.decode(whole.token_ids[:n])]
        count = ends[0]
        told = replace(asked.sampling, stop=("nothing like it", stop))
        made = await engine.generate(replace(asked, sampling=told))
        _is_begin_of(whole, made, count)
        assert len(ended(made, told, engine.decode).token_ids) == count
        assert written(made, told, engine.decode) == text[: text.find(stop)]
        kept = replace(told, include_stop=True)
        assert written(made, kept, engine.decode) == text[: text.find(stop) + 3]
    for token in whole.token_ids[[3, 20]].tolist():
        count = 1 + whole.token_ids.tolist().index(token)
        never = next(one for one in range(2, 256) if one not in whole.token_ids)
        told = replace(asked.sampling, stop_token_ids=(never, token))
        made = await engine.generate(replace(asked, sampling=told))
        _is_begin_of(whole, made, count)
        assert len(ended(made, told, engine.decode).token_ids) == count
        assert written(made, told, engine.decode) == engine.decode(whole.token_ids[: count - 1])
        kept = replace(told, include_stop=True)
        assert written(made, kept, engine.decode) == engine.decode(whole.token_ids[:count])
    await _stops_across_an_interruption(engine, asked, whole)


async def _stops_across_an_interruption(
    engine: GenerationEngine, asked: Request, whole: Generated
) -> None:
    """The stop text begins in the tokens that a request brings, and is complete behind them."""
    begun = replace(
        whole,
        token_ids=whole.token_ids[:11],
        log_prob=whole.log_prob[:11],
        version=whole.version[:11],
        finish="abort",
    )
    before = engine.decode(begun.token_ids)
    told = replace(asked.sampling, stop=(before[-12:] + " w",))
    assert told.stop[0] not in before
    made = await engine.generate(replace(asked, sampling=told, partial=begun))
    assert made.finish == "stop"
    assert made.token_ids[:11].tolist() == begun.token_ids.tolist()
    assert told.stop[0] in engine.decode(made.token_ids)
    assert told.stop[0] not in engine.decode(made.token_ids[:-1])
    assert written(made, told, engine.decode) == before[:-12]


def _is_begin_of(whole: Generated, made: Generated, count: int) -> None:
    assert made.finish == "stop"
    assert made.token_ids.tolist() == whole.token_ids[:count].tolist()
    np.testing.assert_allclose(made.log_prob, whole.log_prob[:count], atol=1e-5)
    assert len(made.version) == count
