"""What is generated is what the library generates, whoever else is in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

from rlinf_async.backends.language import EngineDied, PromptTooLong
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.backends.transformers.folder import ModelFolderError
from rlinf_async.messages.weights import WeightsDamaged, WeightsMismatch
from tests.backends.engine_protocol import (
    carries_a_cancelled_load_to_its_end,
    refuses_older_weights,
    stops_where_it_is_told,
    until_made,
)
from tests.backends.models import (
    END,
    VOCABULARY,
    endless,
    log_probs,
    make_model,
    publish,
    qwen3,
    save_folder,
    save_tokenizer,
)
from tests.backends.requests import request
from tests.backends.transformers.kit import engine_of, generate_all, processed_log_probs

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": END,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3, tied": qwen3,
    "qwen3, untied": lambda: qwen3(tied=False),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral, sliding window": lambda: MistralConfig(**SMALL, sliding_window=8),
    "gemma2, soft caps, layers of two kinds": lambda: Gemma2Config(**SMALL, sliding_window=8),
    "gemma3, layers of two kinds": lambda: Gemma3TextConfig(
        **SMALL,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
}

CPU = Path("/proc/cpuinfo")
EXACT = not (CPU.exists() and "amx_tile" in CPU.read_text())
"""whether sums of a row do not depend on how many rows there are: with AMX torch chooses other
kernels by that, and log-probs differ in their last bits"""


def close(found: Any, expected: torch.Tensor, within: float = 1e-4) -> None:
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected.numpy(), atol=within, rtol=0)


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """One model of each architecture; importing it here does not hold up a test's loop."""
    return make_model(ARCHITECTURES[request.param](), sharpness=0.15)


async def test_log_probs_of_a_sample_are_those_of_a_plain_forward_pass(
    model: nn.Module, tmp_path: Path
) -> None:
    async with engine_of(tmp_path, model) as engine:
        prompts = [[2 + (7 * i + k) % 250 for k in range(1 + 5 * i)] for i in range(4)]
        asked = [request(i, prompts[i], group=i, max_tokens=20 + 4 * i) for i in range(4)]
        made = await generate_all(engine, asked)
        for one, got in zip(asked, made, strict=True):
            close(got.log_prob, log_probs(model, one.prompt.token_ids, got.token_ids))
            assert set(got.version.tolist()) == {0}
        again = await engine.log_probs([(asked[3].prompt.token_ids, made[3].token_ids)])
        close(again[0], torch.from_numpy(made[3].log_prob))


async def test_greedy_tokens_are_those_of_the_librarys_generate(tmp_path: Path) -> None:
    model: Any = make_model(qwen3())
    async with engine_of(tmp_path, model) as engine:
        asked = [request(i, [3 + i, 9, 4], max_tokens=24, temperature=0.0) for i in range(6)]
        for one, got in zip(asked, await generate_all(engine, asked), strict=True):
            ids = torch.tensor([one.prompt.token_ids.tolist()])
            theirs = await asyncio.to_thread(
                model.generate,
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
            )
            assert got.token_ids.tolist() == theirs[0, 3:].tolist()
            close(got.log_prob, log_probs(model, one.prompt.token_ids, got.token_ids))


async def test_rows_that_come_and_go_do_not_change_one_another(tmp_path: Path) -> None:
    model = make_model(qwen3())
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.3},
        {"top_k": 12, "top_p": 0.9},
        {"temperature": 0.0},
        {"min_p": 0.1, "logit_bias": ((7, 3.0), (8, -100.0))},
        {"repetition_penalty": 1.3, "temperature": 0.0, "logit_bias": ((9, 2.0),)},
    ]
    asked = [
        request(i, range(2, 5 + i), max_tokens=4 + 3 * (i % 7), **rules[i % len(rules)])
        for i in range(18)
    ]
    async with engine_of(tmp_path, model, max_concurrent=5) as engine:
        together = await generate_all(engine, asked)
        for one, got in zip(asked, together, strict=True):
            alone = await engine.generate(one)
            np.testing.assert_array_equal(alone.token_ids, got.token_ids)
            close(got.log_prob, processed_log_probs(model, one, got))
            if one.sampling.max_tokens == len(got.token_ids):
                assert got.finish == ("stop" if got.token_ids[-1] == END else "length")
            else:
                assert got.finish == "stop"
                assert got.token_ids[-1] == END


async def test_a_sample_is_the_same_to_the_last_bit_whoever_is_in_the_batch(tmp_path: Path) -> None:
    asked = [request(i, range(2, 4 + 4 * i), max_tokens=3 + 5 * (i % 5)) for i in range(14)]
    async with engine_of(tmp_path, make_model(qwen3())) as engine:
        together = await generate_all(engine, asked)
        alone = [await engine.generate(one) for one in asked]
    async with engine_of(tmp_path / "few", make_model(qwen3()), max_concurrent=3) as engine:
        few = await generate_all(engine, asked[::-1])
    for one, two, three in zip(together, alone, few[::-1], strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist() == three.token_ids.tolist()
        if EXACT:
            assert one.log_prob.tobytes() == two.log_prob.tobytes() == three.log_prob.tobytes()
        for other in (two, three):
            np.testing.assert_allclose(one.log_prob, other.log_prob, rtol=0, atol=1e-5)


async def test_nothing_is_filtered_unless_it_is_asked_for(tmp_path: Path) -> None:
    flat = make_model(qwen3(), sharpness=0.001)
    async with engine_of(tmp_path, flat) as engine:
        asked = [request(i, max_tokens=50) for i in range(30)]
        drawn = {int(token) for got in await generate_all(engine, asked) for token in got.token_ids}
        assert len(drawn) > 200  # the library's generate would draw from 50 only
        asked = [request(i, max_tokens=50, top_k=50) for i in range(10)]
        for one, got in zip(asked, await generate_all(engine, asked), strict=True):
            close(got.log_prob, processed_log_probs(flat, one, got), within=1e-3)
            assert got.log_prob == pytest.approx(-np.log(50), abs=0.2)


async def test_tokens_are_drawn_as_often_as_they_are_likely(tmp_path: Path) -> None:
    model = make_model(qwen3(), sharpness=0.25)
    async with engine_of(tmp_path, model) as engine:
        asked = [request(i, max_tokens=1, seed=i, temperature=0.8) for i in range(3000)]
        got = [
            one
            for start in range(0, len(asked), 300)
            for one in await generate_all(engine, asked[start : start + 300])
        ]
        counts = np.bincount([int(one.token_ids[0]) for one in got], minlength=VOCABULARY)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
        expected = (logits / 0.8).softmax(-1).numpy() * len(asked)
        likely = expected > 5
        assert likely.sum() > 10
        chi_squared = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
        freedom = likely.sum() - 1
        assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)


async def test_new_weights_come_in_flight_and_the_cache_is_computed_anew(tmp_path: Path) -> None:
    old, new = make_model(qwen3(), 1), make_model(qwen3(), 2)
    async with engine_of(tmp_path, old) as engine:
        asked = [request(i, range(3, 6 + i), max_tokens=300, seed=50 + i) for i in range(6)]
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        update = publish(new, 7)
        await until_made(engine, 5, *running)  # somewhere in the middle of the responses
        assert await engine.load(update) == update.checksum
        for one, got in zip(asked, await asyncio.gather(*running), strict=True):
            before = int((got.version == 0).sum())
            assert got.version.tolist() == [0] * before + [7] * (len(got.version) - before)
            prompt = one.prompt.token_ids
            close(got.log_prob[:before], log_probs(old, prompt, got.token_ids)[:before])
            close(got.log_prob[before:], log_probs(new, prompt, got.token_ids)[before:])
        assert engine.version == 7
        assert any(task.result().version.argmax() > 0 for task in running)


async def test_weights_that_are_older_than_those_served_are_refused(tmp_path: Path) -> None:
    older, newer = (publish(make_model(qwen3(), seed), seed) for seed in (3, 4))
    async with engine_of(tmp_path, make_model(qwen3())) as engine:
        await refuses_older_weights(engine, older, newer)


async def test_it_stops_where_it_is_told(tmp_path: Path) -> None:
    async with engine_of(tmp_path, endless(make_model(qwen3()))) as engine:
        await stops_where_it_is_told(engine)


async def test_a_load_that_fails_halfway_is_the_end_of_the_engine(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3())) as engine:
        running = asyncio.create_task(engine.generate(request(max_tokens=400)))
        await until_made(engine, 5, running)
        assert engine._decoder is not None
        norm = engine._decoder.model.get_parameter("model.norm.weight")
        update = publish(make_model(qwen3(), 5), 1)
        async with engine._turn:  # between two steps, the last layer becomes one that takes nothing
            norm.data = norm.data[:1].expand(64)
        with pytest.raises(EngineDied, match="could not load weights version 1: RuntimeError"):
            await engine.load(update)
        with pytest.raises(EngineDied, match="could not load weights version 1"):
            await running
        with pytest.raises(EngineDied, match="could not load weights version 1"):
            await engine.generate(request(1))
        with pytest.raises(EngineDied, match="could not load weights version 1"):
            await engine.load(update)


async def test_a_load_that_is_cancelled_goes_on_to_its_end(tmp_path: Path) -> None:
    old, new = make_model(qwen3(), 1), make_model(qwen3(), 2)
    async with engine_of(tmp_path, old) as engine:
        made = await carries_a_cancelled_load_to_its_end(engine, publish(new, 7))
        for got in made:
            before = int((got.version == 0).sum())
            assert got.version.tolist() == [0] * before + [7] * (len(got.version) - before)
            close(got.log_prob[:before], log_probs(old, [5, 6, 7], got.token_ids)[:before])
            close(got.log_prob[before:], log_probs(new, [5, 6, 7], got.token_ids)[before:])
        assert made[-1].version[-1] == 7


@pytest.mark.parametrize("tied", [True, False])
async def test_an_engine_without_weights_takes_them_from_the_first_update(
    tied: bool, tmp_path: Path
) -> None:
    model = make_model(qwen3(tied=tied), 3)
    engine = TransformersEngine(TransformersEngineConfig(model=save_folder(tmp_path, model.config)))
    await engine.start()
    assert engine.version == -1
    update = publish(model, 0)
    assert await engine.load(update) == update.checksum
    got = await engine.generate(request())
    close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))
    await engine.close()


async def test_an_interrupted_response_goes_on_to_what_it_would_have_been(tmp_path: Path) -> None:
    model = make_model(qwen3(), 4, sharpness=0.2)
    async with engine_of(tmp_path, model) as engine:
        asked = [request(i, max_tokens=200, seed=i) for i in range(8)]
        whole = await generate_all(engine, asked)
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)  # all of them are in the engine
        await engine.abort(["0/0"])
        parts = [await running[0]]
        assert parts[0].finish == "abort"
        await until_made(engine, 5, *running[1:])
        await engine.abort()
        parts += await asyncio.gather(*running[1:])
        pieces = list(zip(asked, parts, strict=True))
        rest = await generate_all(engine, [replace(one, partial=part) for one, part in pieces])
        for one, part, got in zip(whole, parts, rest, strict=True):
            # Rounding differs from batch to batch, and in the end may choose another token.
            same = len(part.token_ids) + 4
            np.testing.assert_array_equal(got.token_ids[:same], one.token_ids[:same])
            close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids))
            assert got.finish != "abort"


async def test_a_cancelled_request_leaves_its_row_to_the_next(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3()), max_concurrent=1) as engine:
        first = asyncio.create_task(engine.generate(request(0, max_tokens=450)))
        second = asyncio.create_task(engine.generate(request(1, max_tokens=4)))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second).token_ids) <= 4
        assert not engine._answers


async def test_of_waiting_requests_the_lowest_priority_number_goes_first(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3()), max_concurrent=1) as engine:
        done: list[int] = []

        async def one(index: int, priority: int) -> None:
            await engine.generate(request(index, max_tokens=3, priority=priority))
            done.append(index)

        await asyncio.gather(one(0, 3), one(1, 2), one(2, 1), one(3, 2))
        assert done == [2, 1, 3, 0]


async def test_damaged_weights_and_those_of_another_model_change_nothing(tmp_path: Path) -> None:
    model = make_model(qwen3())
    async with engine_of(tmp_path, model) as engine:
        before = await engine.generate(request())
        damaged = publish(make_model(qwen3(), 5), 1)
        damaged.buckets[-1].data[7] ^= 1
        with pytest.raises(WeightsDamaged, match="checksum"):
            await engine.load(damaged)
        with pytest.raises(WeightsMismatch, match=r"does not fit the model.*missing"):
            await engine.load(publish(make_model(qwen3(layers=1)), 1))
        after = await engine.generate(request())
        assert engine.version == 0
        np.testing.assert_array_equal(after.log_prob, before.log_prob)


async def test_weights_of_another_float_type_are_cast(tmp_path: Path) -> None:
    model = make_model(qwen3())
    async with engine_of(tmp_path, model, dtype="bfloat16") as engine:
        await engine.load(publish(model, 3))
        got = await engine.generate(request())
        close(got.log_prob, log_probs(model, [5, 6, 7], got.token_ids), within=0.5)
        assert engine.version == 3


async def test_offloading_keeps_the_weights_and_gives_the_memory_to_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(qwen3())
    given_back: list[None] = []
    async with engine_of(tmp_path, model) as engine:
        before = await engine.generate(request())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
        await engine.offload()
        assert given_back
        await engine.onload()
        after = await engine.generate(request())
        np.testing.assert_array_equal(after.log_prob, before.log_prob)


async def test_text_leaves_special_tokens_out(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3())) as engine:
        assert engine.decode(np.array([7, 9, END, 0], np.int32)) == "w7 w9"


async def test_prompts_that_the_model_cannot_take_are_named(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3()), context=32) as engine:
        with pytest.raises(PromptTooLong, match=r"prompt 4 has 20 tokens.*16 that is 36.*of 32"):
            await engine.generate(request(tokens=[5] * 20, group=4))
        with pytest.raises(ValueError, match=r"prompt 4 .* does not have \(.*0 \.\. 255\)"):
            await engine.generate(request(tokens=[5, 256], group=4))
        with pytest.raises(ValueError, match="prompt 4 is empty"):
            await engine.generate(request(tokens=[], group=4))
        assert (await engine.generate(request())).finish in ("stop", "length")


async def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    async with engine_of(tmp_path, make_model(qwen3())) as engine:
        running = asyncio.create_task(engine.generate(request(max_tokens=400)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDied, match="was closed"):
            await running
        with pytest.raises(EngineDied, match="was closed"):
            await engine.generate(request())


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("folder", "no such folder"),
        ("config", r"no config\.json"),
        ("tokenizer", "no tokenizer in that folder"),
        ("weights", r"no weights in that folder.*weights = 'update'"),
        ("context", "made for 512 tokens"),
    ],
)
async def test_a_folder_that_lacks_something_is_named_with_what_it_lacks(
    missing: str, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if missing != "folder":
        folder.mkdir()
    if missing in ("tokenizer", "weights", "context"):
        qwen3().save_pretrained(folder)
    if missing in ("weights", "context"):
        save_tokenizer(folder)
    config = TransformersEngineConfig(
        model=str(folder),
        weights="folder" if missing == "weights" else "update",
        context=1024 if missing == "context" else None,
    )
    engine = TransformersEngine(config)
    with pytest.raises(ModelFolderError, match=said) as got:
        await engine.start()
    assert str(folder) in str(got.value)
    await engine.close()


async def test_what_is_under_way_can_be_looked_at_and_gone_on_with(tmp_path: Path) -> None:
    model = make_model(qwen3(), sharpness=0.1)
    asked = [request(i, max_tokens=400, seed=40 + i) for i in range(3)]
    async with engine_of(tmp_path, model) as engine:
        running = asyncio.gather(*(engine.generate(one) for one in asked))
        await until_made(engine, 5, running)
        found = await engine.so_far()
        whole = {one.name: got for one, got in zip(asked, await running, strict=True)}
        assert found
        assert await engine.so_far() == {}
        begun = [one for one in asked if one.name in found]
        again = await generate_all(engine, [replace(one, partial=found[one.name]) for one in begun])
    for one, got in zip(begun, again, strict=True):
        part = found[one.name]
        assert part.finish == "abort"
        np.testing.assert_array_equal(got.token_ids[: len(part.token_ids)], part.token_ids)
        np.testing.assert_array_equal(got.log_prob[: len(part.token_ids)], part.log_prob)
        np.testing.assert_array_equal(got.token_ids, whole[one.name].token_ids)
