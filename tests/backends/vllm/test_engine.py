"""The real engine, and every trap that it has, against plain forward passes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from rlinf_async.backends.language import EngineDied, PromptTooLong
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.engine import VllmEngine
from rlinf_async.backends.vllm.library import start_llm
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.language import Generated, Request
from rlinf_async.messages.weights import WeightsDamaged, WeightsMismatch, WeightUpdate
from rlinf_async.weights.pack import pack, unpack, verify
from tests.backends.checkpoint.kit import PROMPT, RESPONSE
from tests.backends.engine_protocol import (
    carries_a_cancelled_load_to_its_end,
    refuses_older_weights,
    stops_where_it_is_told,
    until_made,
    until_made_under,
)
from tests.backends.models import (
    END,
    endless,
    log_probs,
    make_model,
    publish,
    qwen3,
    save_folder,
)
from tests.backends.requests import request
from tests.backends.transformers.kit import engine_of, generate_all, processed_log_probs
from tests.backends.vllm.kit import (
    CONTEXT,
    FOR_EVER,
    PATIENCE,
    SMALL,
    Exported,
    Served,
    shared_memory,
    wait_for_shared_memory,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LONG = [2 + (5 * k) % 250 for k in range(100)]
"""a prompt of several blocks of the cache"""

MORE = 40
"""tokens after a part of a response"""

EMBEDDING = 256 * 64 * 4
"""bytes of the embedding"""


def close(found: Any, expected: torch.Tensor, within: float = 1e-4) -> None:
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected.numpy(), atol=within, rtol=0)


def serve(served: Served, model: nn.Module, version: int) -> None:
    """Have the engine serve this model."""
    update = publish(model, version)
    assert served.run(served.engine.load(update)) == update.checksum
    assert served.engine.version == version


def going_on(asked: Request, partial: Generated) -> Request:
    """The request for a few tokens after those."""
    most = len(partial.token_ids) + MORE
    return replace(asked, partial=partial, sampling=replace(asked.sampling, max_tokens=most))


def generate(served: Served, *asked: Request) -> list[Generated]:
    """All at once."""

    async def body() -> list[Generated]:
        return await asyncio.gather(*(served.engine.generate(one) for one in asked))

    return served.run(body())


def test_vllm_computes_what_the_trainer_of_an_exported_checkpoint_does(
    tied: Served, tied_export: Exported
) -> None:
    [found] = tied.run(tied.engine.log_probs([(PROMPT, RESPONSE)]))
    close(found, tied_export.log_probs)


def test_an_update_reaches_the_output_layer_that_is_tied_to_the_embedding(tied: Served) -> None:
    # vLLM's own update leaves it as it was on a CPU: log-probs would be off by several nats.
    for version, seed in [(1, 21), (2, 22)]:
        model: Any = make_model(qwen3(), seed)
        serve(tied, model, version)
        asked = [request(i, [3 + i, 9, 4], max_tokens=24, temperature=0.0) for i in range(4)]
        for one, got in zip(asked, generate(tied, *asked), strict=True):
            ids = torch.tensor([one.prompt.token_ids.tolist()])
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
            assert got.token_ids.tolist() == theirs[0, 3:].tolist()
            assert set(got.version.tolist()) == {version}
            # greedy: those at temperature 1
            close(got.log_prob, log_probs(model, one.prompt.token_ids, got.token_ids))


def test_log_probs_are_of_the_distribution_that_was_sampled_from(tied: Served) -> None:
    # By default vLLM gives those before temperature, top-k and top-p.
    model = make_model(qwen3(), 23)
    serve(tied, model, 3)
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.3},
        {"top_k": 12, "top_p": 0.9},
    ]
    asked = [request(i, max_tokens=30, **rules[i % 5]) for i in range(10)]
    for one, got in zip(asked, generate(tied, *asked), strict=True):
        close(got.log_prob, processed_log_probs(model, one, got))
        assert got.finish == ("stop" if got.token_ids[-1] == END else "length")


def test_it_stops_where_it_is_told(tied: Served) -> None:
    serve(tied, endless(make_model(qwen3(), 23)), 3)
    tied.run(stops_where_it_is_told(tied.engine))


def test_it_draws_what_the_other_engine_draws_with_every_setting_of_evaluations(
    tied: Served, tmp_path: Path
) -> None:
    """The most likely tokens, with biases, penalties and a stop text."""
    model = endless(make_model(qwen3(), 24))
    serve(tied, model, 3)
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8, "logit_bias": ((7, 30.0), (9, -100.0))},
        {"logit_bias": ((7, 5.0),), "stop": ("4 w",), "repetition_penalty": 1.2},
    ]
    asked = [request(i, max_tokens=30, temperature=0.0, **rules[i % 3]) for i in range(6)]

    async def others() -> list[Generated]:
        async with engine_of(tmp_path, model) as engine:
            return await generate_all(engine, asked)

    theirs = asyncio.run(others())
    for one, got, other in zip(asked, generate(tied, *asked), theirs, strict=True):
        assert got.token_ids.tolist() == other.token_ids.tolist()
        assert got.finish == other.finish
        for each in (got, other):
            close(each.log_prob, processed_log_probs(model, one, each))
    hot = [request(i, max_tokens=30, temperature=1.5, min_p=0.05, **rules[i]) for i in range(3)]
    for one, got in zip(hot, generate(tied, *hot), strict=True):
        close(got.log_prob, processed_log_probs(model, one, got))


def test_nothing_is_filtered_unless_it_is_asked_for(tied: Served) -> None:
    serve(tied, make_model(qwen3(), sharpness=0.001), 4)
    got = generate(tied, *(request(i, max_tokens=50) for i in range(30)))
    assert len({int(token) for one in got for token in one.token_ids}) > 200


def test_a_short_response_does_not_wait_for_a_long_one(tied: Served) -> None:
    serve(tied, endless(make_model(qwen3(), 45)), 5)

    async def body() -> None:
        long = asyncio.create_task(tied.engine.generate(request(0, max_tokens=FOR_EVER)))
        for index, tokens in ((1, 2), (2, 30)):
            short = await tied.engine.generate(request(index, max_tokens=tokens))
            assert len(short.token_ids) == tokens
        assert not long.done()
        await tied.engine.abort()
        assert (await long).finish == "abort"

    tied.run(body())


def test_a_prompt_in_the_prefix_cache_is_computed_anew_after_an_update(tied: Served) -> None:
    # vLLM keeps the cache: the new model would go on from the old one's keys and values.
    for version, seed in [(6, 24), (7, 25)]:
        model = make_model(qwen3(), seed)
        serve(tied, model, version)
        asked = [request(i, LONG, max_tokens=8) for i in range(3)]
        answers = [*generate(tied, *asked[:1]), *generate(tied, *asked[1:])]
        for got in answers:
            close(got.log_prob, log_probs(model, LONG, got.token_ids))
        cached = [got.cached for got in answers]
        assert cached[0] == 0  # nothing of the version before
        assert cached[1] == cached[2]
        assert 0 < (cached[1] or 0) < len(LONG)  # whole blocks


def test_new_weights_come_in_flight_and_no_request_is_dropped(tied: Served) -> None:
    # With the old cache kept, the tokens after the cut would be off by several nats.
    old, new = (endless(make_model(qwen3(), seed)) for seed in (26, 27))
    serve(tied, old, 8)
    asked = [request(i, LONG[: 3 + i], max_tokens=FOR_EVER, seed=70 + i) for i in range(8)]

    async def body() -> list[Generated]:
        update = publish(new, 9)
        running = [asyncio.create_task(tied.engine.generate(one)) for one in asked]
        await until_made(tied.engine, 5, *running)  # somewhere in the middle of the responses
        await tied.engine.load(update)
        await until_made_under(tied.engine, 9, *running)
        await tied.engine.abort()
        return await asyncio.gather(*running)

    cut = 0
    for one, got in zip(asked, tied.run(body()), strict=True):
        before = int((got.version == 8).sum())
        assert got.version.tolist() == [8] * before + [9] * (len(got.version) - before)
        prompt = one.prompt.token_ids
        close(got.log_prob[:before], log_probs(old, prompt, got.token_ids)[:before])
        close(got.log_prob[before:], log_probs(new, prompt, got.token_ids)[before:])
        cut += 0 < before < len(got.version)
    assert cut > 0
    assert shared_memory() == []


def test_an_aborted_response_keeps_its_tokens_and_goes_on_after_them(tied: Served) -> None:
    old, new = endless(make_model(qwen3(), 28)), make_model(qwen3(), 29)
    serve(tied, old, 10)
    asked = [request(i, max_tokens=FOR_EVER, seed=90 + i) for i in range(6)]

    async def interrupt() -> list[Generated]:
        running = [asyncio.create_task(tied.engine.generate(one)) for one in asked]
        await asyncio.sleep(0)  # still on their way into the engine
        await tied.engine.abort(["0/0"])
        first = await running[0]
        assert first.finish == "abort"
        await until_made(tied.engine, 5, *running[1:])
        await tied.engine.abort()
        return [first, *await asyncio.gather(*running[1:])]

    parts = tied.run(interrupt())
    assert any(part.finish == "abort" and len(part.token_ids) > 3 for part in parts)
    serve(tied, new, 11)
    pieces = zip(asked, parts, strict=True)
    rest = generate(tied, *(going_on(one, part) for one, part in pieces))
    for part, got in zip(parts, rest, strict=True):
        made = len(part.token_ids)
        np.testing.assert_array_equal(got.token_ids[:made], part.token_ids)
        assert got.version.tolist() == [10] * made + [11] * (len(got.version) - made)
        close(got.log_prob[:made], log_probs(old, [5, 6, 7], got.token_ids)[:made])
        close(got.log_prob[made:], log_probs(new, [5, 6, 7], got.token_ids)[made:])
        assert got.finish != "abort"
        assert len(got.token_ids) <= made + MORE


def test_what_is_under_way_can_be_looked_at_and_gone_on_with(tied: Served) -> None:
    model = endless(make_model(qwen3(), 41))
    serve(tied, model, 12)
    asked = [request(i, max_tokens=FOR_EVER, seed=70 + i) for i in range(3)]

    async def look() -> tuple[dict[str, Generated], list[Generated]]:
        running = asyncio.gather(*(tied.engine.generate(one) for one in asked))
        await until_made(tied.engine, 5, running)
        found = await tied.engine.so_far()
        await tied.engine.abort()
        return found, await running

    found, whole = tied.run(look())
    assert found
    again = [one for one in asked if one.name in found]
    rest = generate(tied, *(going_on(one, found[one.name]) for one in again))
    for one, got in zip(again, rest, strict=True):
        part, first = found[one.name], whole[asked.index(one)]
        made = len(part.token_ids)
        assert part.finish == "abort"
        assert part.version.tolist() == [12] * made
        np.testing.assert_array_equal(first.token_ids[:made], part.token_ids)
        np.testing.assert_array_equal(got.token_ids[:made], part.token_ids)
        close(part.log_prob, log_probs(model, [5, 6, 7], part.token_ids))
    assert tied.run(tied.engine.so_far()) == {}


def test_a_cancelled_request_leaves_the_engine(tied: Served) -> None:
    serve(tied, endless(make_model(qwen3(), 46)), 12)

    async def body() -> int:
        running = asyncio.create_task(tied.engine.generate(request(max_tokens=FOR_EVER)))
        await until_made(tied.engine, 5, running)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await tied.engine.generate(request(max_tokens=2))
        unfinished: int = tied.engine._llm.get_num_unfinished_requests()
        return unfinished

    assert tied.run(body()) == 0
    assert not tied.engine._running


def test_seeded_prompts_that_do_not_fit_one_step_together_are_all_answered(tied: Served) -> None:
    # vLLM would cut one into pieces, and that kills its engine on a CPU.
    model = make_model(qwen3(), 35)
    serve(tied, model, 12)
    prompts = [[2 + (i + k) % 250 for k in range(300)] for i in range(30)]
    asked = [request(i, prompts[i], max_tokens=3, group=i) for i in range(30)]
    for one, got in zip(asked, generate(tied, *asked), strict=True):
        close(got.log_prob, log_probs(model, one.prompt.token_ids, got.token_ids))


def test_a_seed_draws_the_same_tokens_again(tied: Served) -> None:
    serve(tied, make_model(qwen3(), 30, sharpness=0.1), 13)
    first, again, other = (generate(tied, request(seed=seed))[0] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.token_ids.tolist() != other.token_ids.tolist()


def test_damaged_weights_and_those_of_another_model_change_nothing(tied: Served) -> None:
    model = make_model(qwen3(), 31)
    serve(tied, model, 14)
    damaged = publish(make_model(qwen3(), 32), 15)
    damaged.buckets[-1].data[7] ^= 1
    with pytest.raises(WeightsDamaged, match="checksum"):
        tied.run(tied.engine.load(damaged))
    with pytest.raises(WeightsMismatch, match=r"does not fit the model.*missing"):
        tied.run(tied.engine.load(publish(make_model(qwen3(layers=1)), 15)))
    [got] = generate(tied, request(max_tokens=20))
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))
    assert set(got.version.tolist()) == {14}
    assert shared_memory() == []


def test_what_has_not_changed_is_neither_read_nor_loaded_again(tied: Served) -> None:
    model = make_model(qwen3(), 36)
    first = publish(model, 16)
    tied.run(tied.engine.load(first))
    same = pack(unpack(first), 17, bucket_bytes=100_000, previous=first)
    assert [id(one) for one in same.buckets] == [id(one) for one in first.buckets]
    for bucket in same.buckets:
        bucket.data[:] = 0xFF  # NaN, wherever it is looked at
    assert tied.run(tied.engine.load(same)) == same.checksum != first.checksum
    [got] = generate(tied, request(max_tokens=20))
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))
    assert set(got.version.tolist()) == {17}


def with_a_frozen_embedding(served: Served, model: nn.Module) -> tuple[WeightUpdate, set[int]]:
    """Load version 17; return 18, in which the layers have changed, and the buckets that have not.

    The model becomes that of version 18.
    """
    first = pack(unpack(publish(model, 17)), 17, bucket_bytes=EMBEDDING)
    served.run(served.engine.load(first))
    state = {name: tensor.clone() for name, tensor in unpack(first).items()}
    for name, tensor in model.state_dict().items():
        if "layers." in name:
            tensor *= 1.1
            state[name] = tensor
    rest = pack(state, 18, bucket_bytes=EMBEDDING, previous=first)
    kept = {at for at, one in enumerate(rest.buckets) if any(one is old for old in first.buckets)}
    names = {slot.name for at in kept for slot in rest.buckets[at].slots}
    assert "model.embed_tokens.weight" in names
    return rest, kept


def test_what_has_not_changed_is_verified_where_the_rest_has(tied: Served) -> None:
    # The engine may read it: it makes parameters of changed and unchanged tensors together.
    model = make_model(qwen3(), 44)
    rest, kept = with_a_frozen_embedding(tied, model)
    for at in kept:
        rest.buckets[at].data[:] = 0xFF
    with pytest.raises(WeightsDamaged, match="checksum"):
        tied.run(tied.engine.load(rest))
    assert tied.engine.version == 17


def test_a_frozen_embedding_is_not_loaded_again_with_the_rest(
    tied: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(qwen3(), 37)
    rest, kept = with_a_frozen_embedding(tied, model)

    def spoiling(update: WeightUpdate, but: Collection[int] = ()) -> None:
        verify(update, but)
        for at in kept:  # in the memory that the engine is to map
            update.buckets[at].data[:] = 0xFF

    monkeypatch.setattr("rlinf_async.backends.vllm.engine.verify", spoiling)
    assert tied.run(tied.engine.load(rest)) == rest.checksum
    [got] = generate(tied, request(max_tokens=20))
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))


def test_what_was_loaded_does_not_lie_in_shared_memory(tied: Served) -> None:
    model = make_model(qwen3(), 38)
    update = pack(unpack(publish(model, 18)), 18, allocate=shared_bytes)
    tied.run(tied.engine.load(update))
    for bucket in update.buckets:
        bucket.data[:] = 0xFF  # as when the memory is used for another version
    [got] = generate(tied, request(max_tokens=20))
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))


def test_weights_that_are_older_than_those_served_are_refused(tied: Served) -> None:
    model = make_model(qwen3(), 39)
    older = publish(make_model(qwen3(), 40), 18)
    tied.run(refuses_older_weights(tied.engine, older, publish(model, 19)))
    [got] = generate(tied, request(max_tokens=20))
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))


def test_a_load_that_is_cancelled_goes_on_to_its_end(tied: Served) -> None:
    old, new = (endless(make_model(qwen3(), seed)) for seed in (42, 43))
    serve(tied, old, 19)
    loading = carries_a_cancelled_load_to_its_end(tied.engine, publish(new, 20), FOR_EVER)
    made = tied.run(loading)
    for got in made:
        before = int((got.version == 19).sum())
        assert got.version.tolist() == [19] * before + [20] * (len(got.version) - before)
        close(got.log_prob[:before], log_probs(old, [5, 6, 7], got.token_ids)[:before])
        close(got.log_prob[before:], log_probs(new, [5, 6, 7], got.token_ids)[before:])
    assert made[0].version[-1] == 20
    assert shared_memory() == []


def test_the_engines_log_probs_of_given_tokens_agree_with_the_model(tied: Served) -> None:
    model = make_model(qwen3(), 33)
    serve(tied, model, 21)
    pairs = [
        (np.array(LONG[:count], np.int32), np.array(LONG[count : 2 * count], np.int32))
        for count in (1, 7, 40)
    ]
    for (prompt, response), found in zip(
        pairs, tied.run(tied.engine.log_probs(pairs)), strict=True
    ):
        close(found, log_probs(model, prompt, response))


def test_prompts_that_the_model_cannot_take_are_named(tied: Served) -> None:
    with pytest.raises(PromptTooLong, match=r"prompt 4 has 4094 tokens.*over the context of 4096"):
        generate(tied, request(tokens=[5] * (CONTEXT - 2), group=4))
    with pytest.raises(ValueError, match=r"prompt 4 .* does not have \(.*0 \.\. 255\)"):
        generate(tied, request(tokens=[5, 256], group=4))


def test_the_weights_of_a_folder_are_version_0(untied: Served, untied_export: Exported) -> None:
    assert untied.engine.version == 0
    [found] = untied.run(untied.engine.log_probs([(PROMPT, RESPONSE)]))
    close(found, untied_export.log_probs)
    [got] = generate(untied, request(max_tokens=30))
    close(got.log_prob, log_probs(untied_export.model(), [5, 6, 7], got.token_ids))
    assert set(got.version.tolist()) == {0}
    new = endless(make_model(qwen3(tied=False), 34))
    serve(untied, new, 1)
    [got] = generate(untied, request(max_tokens=30))
    close(got.log_prob, log_probs(new, [5, 6, 7], got.token_ids))


async def test_an_engine_that_is_closed_while_it_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, started = threading.Event(), threading.Event()
    processes: list[Any] = []

    def start(*given: Any) -> Any:
        under_way.set()
        llm = start_llm(*given)
        processes.extend(llm.engine_core.resources.engine_manager.processes)
        started.set()
        return llm

    monkeypatch.setattr("rlinf_async.backends.vllm.engine.start_llm", start)
    engine = VllmEngine(VllmEngineConfig(model=save_folder(tmp_path, qwen3()), **SMALL))
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(under_way.wait, PATIENCE)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.close()
    assert await asyncio.to_thread(started.wait, PATIENCE)
    assert [one.is_alive() for one in processes] == [False]
    with pytest.raises(EngineDied, match="was closed"):
        await engine.generate(request())


def test_an_engine_killed_within_a_load_is_an_error_for_whoever_waits_and_whoever_comes(
    untied: Served,
) -> None:
    engine, update = untied.engine, publish(make_model(qwen3(tied=False)), 2)

    async def body() -> None:
        running = asyncio.create_task(engine.generate(request(1, max_tokens=FOR_EVER)))
        await until_made(engine, 5, running)
        for process in engine.process_ids:
            os.kill(process, signal.SIGSTOP)  # the load cannot end
        loading = asyncio.create_task(engine.load(update))
        await asyncio.to_thread(wait_for_shared_memory)
        for process in engine.process_ids:
            os.kill(process, signal.SIGKILL)
        for one in (loading, running):
            with pytest.raises(EngineDied):
                await one
        calls: list[Coroutine[Any, Any, Any]] = [
            engine.load(update),
            engine.log_probs([(np.array([3]), np.array([4]))]),
            engine.generate(request(max_tokens=400)),
        ]
        for call in calls:
            with pytest.raises(EngineDied):
                await call

    untied.run(body())
    gc.collect()  # the errors know the memory
    assert shared_memory() == []
