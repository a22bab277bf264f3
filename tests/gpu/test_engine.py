"""`TransformersEngine` on the device: the samples of the CPU, and memory that it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.messages.language import Generated, Request
from tests.backends.models import endless, log_probs, make_model, publish, qwen3, save_folder
from tests.backends.requests import request
from tests.backends.transformers.kit import generate_all
from tests.gpu.kit import DEVICE, held

WIDE: dict[str, Any] = {"hidden": 512, "layers": 6}


@asynccontextmanager
async def engine_on(
    device: str, folder: Path, model: nn.Module, **fields: Any
) -> AsyncIterator[TransformersEngine]:
    """An engine that waits for its weights."""
    config: Any = model.config
    path = await asyncio.to_thread(save_folder, folder, config)
    engine = TransformersEngine(TransformersEngineConfig(model=path, **fields), device=device)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def requests() -> list[Request]:
    """Prompts of many lengths; greedy ones, sampled ones, with top-k and top-p."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8},
    ]
    return [
        request(i, [3 + (7 * i + j) % 200 for j in range(1 + 5 * (i % 7))],
                group=i, max_tokens=24 + i, **ways[i % 4])
        for i in range(24)
    ]  # fmt: skip


def check(got: list[Generated], model: nn.Module, asked: list[Request], within: float) -> None:
    """Log-probs of those that are drawn from the whole distribution are the library's own."""
    for one, sample in zip(asked, got, strict=True):
        assert np.isfinite(sample.log_prob).all()
        sampling = one.sampling
        if sampling.top_k or sampling.top_p < 1.0:
            continue
        expected = log_probs(model, one.prompt.token_ids, sample.token_ids)
        np.testing.assert_allclose(sample.log_prob, expected.numpy(), atol=within, rtol=0)


async def test_float32_generates_what_the_cpu_generates(tmp_path: Path) -> None:
    model = await asyncio.to_thread(make_model, qwen3(), sharpness=0.15)
    update = publish(model, 3)
    found = {}
    for device in (DEVICE, "cpu"):
        async with engine_on(device, tmp_path / device, model) as engine:
            await engine.load(update)
            found[device] = await generate_all(engine, requests())
    check(found[DEVICE], model, requests(), 1e-4)
    same = [
        one.token_ids.tolist() == two.token_ids.tolist()
        for one, two in zip(found[DEVICE], found["cpu"], strict=True)
    ]
    assert sum(same) >= len(same) - 2  # a token near a border may be another one


async def test_bfloat16_generates_with_the_log_probs_of_its_own_rounding(tmp_path: Path) -> None:
    model = await asyncio.to_thread(make_model, qwen3(), sharpness=0.1)
    async with engine_on(DEVICE, tmp_path, model, dtype="bfloat16") as engine:
        await engine.load(publish(model, 0))
        got = await generate_all(engine, requests())
        check(got, model, requests(), 0.1)
        asked = [
            (one.prompt.token_ids, two.token_ids) for one, two in zip(requests(), got, strict=True)
        ]
        for (prompt, response), found in zip(asked, await engine.log_probs(asked), strict=True):
            expected = log_probs(model, prompt, response)
            np.testing.assert_allclose(found, expected.numpy(), atol=0.1, rtol=0)


async def test_weights_are_loaded_between_two_steps(tmp_path: Path) -> None:
    config = qwen3()
    first = endless(await asyncio.to_thread(make_model, config, 0, sharpness=0.15))
    second = endless(await asyncio.to_thread(make_model, config, 1, sharpness=0.15))
    async with engine_on(DEVICE, tmp_path, first) as engine:
        await engine.load(publish(first, 0))
        asked = [request(i, max_tokens=200) for i in range(4)]
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        while not any(len(one.token_ids) for one in (await engine.so_far()).values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.load(publish(second, 1))
        for sample, one in zip(await asyncio.gather(*running), asked, strict=True):
            versions = sample.version.tolist()
            assert versions == sorted(versions)
            assert set(versions) <= {0, 1}
            cut = versions.count(0)
            for model, part in ((first, slice(0, cut)), (second, slice(cut, None))):
                expected = log_probs(model, one.prompt.token_ids, sample.token_ids).numpy()
                np.testing.assert_allclose(sample.log_prob[part], expected[part], atol=1e-3)


async def test_an_offloaded_engine_holds_no_memory_and_takes_weights_meanwhile(
    tmp_path: Path,
) -> None:
    model = await asyncio.to_thread(make_model, qwen3(**WIDE), sharpness=0.05)
    before = await asyncio.to_thread(held)
    async with engine_on(DEVICE, tmp_path, model) as engine:
        await engine.load(publish(model, 0))
        first = await generate_all(engine, requests())
        assert await asyncio.to_thread(held) - before > 4 * 5_000_000
        await engine.offload()
        assert torch.cuda.memory_reserved() - before < 1 << 26
        assert await asyncio.to_thread(held) - before < 1 << 24
        await engine.load(publish(model, 1))
        await engine.onload()
        second = await generate_all(engine, requests())
        assert {int(one) for sample in second for one in sample.version} == {1}
        check(second, model, requests(), 1e-3)
        assert (
            sum(
                one.token_ids.tolist() == two.token_ids.tolist()
                for one, two in zip(first, second, strict=True)
            )
            >= len(first) - 2
        )


async def test_a_model_that_gives_nan_is_an_error_and_not_a_token(tmp_path: Path) -> None:
    model = await asyncio.to_thread(make_model, qwen3())
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    async with engine_on(DEVICE, tmp_path, model) as engine:
        await engine.load(publish(model, 0))
        got = await engine.generate(request())
        assert not np.isfinite(got.log_prob).all()  # the rollout worker raises `ModelOutputError`


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_rows_of_a_long_batch_come_and_go(tmp_path: Path, loop_kind: str) -> None:
    model = await asyncio.to_thread(make_model, qwen3(), sharpness=0.15)
    async with engine_on(DEVICE, tmp_path, model, max_concurrent=8, prefill_tokens=64) as engine:
        await engine.load(publish(model, 0))
        got = await generate_all(engine, requests())
    check(got, model, requests(), 1e-4)
