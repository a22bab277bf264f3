"""New weights of a 50 M-parameter model for a live vLLM: one line of JSON.

``own_load_seconds``: vLLM's own ``reload_weights`` of the same bytes, files in the page cache.
``update_seconds``: `VllmEngine.load` of a `WeightUpdate` while requests run: check, share, pause,
load, clear caches, resume. Log-probs are compared with plain forward passes of the same weights.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

import rlinf_async as ra
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.engine import VllmEngine
from rlinf_async.messages.language import Generated, Request, Sampling
from rlinf_async.weights import pack

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.rollout.generate import requests
from benchmarks.rollout.model import save_model

TIMES = 5
RUNNING = 16


async def measure(folder: str) -> dict[str, float]:
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(folder, dtype=torch.float32)
    state = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    engine = VllmEngine(
        VllmEngineConfig(
            model=folder, weights="folder", context=512, max_concurrent=RUNNING, seeded=False
        )
    )
    await engine.start()
    llm: Any = engine._llm
    try:
        own, updates = [], []
        asked: list[Request] = []
        kept: list[Generated] = []
        for version in range(TIMES):
            start = time.perf_counter()
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            own.append(time.perf_counter() - start)
            update = pack(state, version)
            if version == 0:
                await engine.load(update)
            long = Sampling(max_tokens=400)
            asked = [replace(one, sampling=long) for one in requests(RUNNING, 100 * version)]
            running = [asyncio.create_task(engine.generate(one)) for one in asked]
            await asyncio.sleep(3.0)  # the prompts are computed, the responses are on their way
            start = time.perf_counter()
            await engine.load(update)
            updates.append(time.perf_counter() - start)
            for one in running[4:]:
                one.cancel()
            kept = await asyncio.gather(*running[:4])
            await asyncio.gather(*running, return_exceptions=True)
        worst = max(
            difference(model, one.prompt.token_ids, got)
            for one, got in zip(asked, kept, strict=False)
        )
    finally:
        await engine.close()
    return {
        "parameters": float(sum(one.numel() for one in state.values())),
        "own_load_seconds": statistics.median(own),
        "update_seconds": statistics.median(updates),
        "log_prob_difference": worst,
        "answered": float(len(kept)),
    }


@torch.no_grad()
def difference(model: Any, prompt: Any, got: Any) -> float:
    """The largest between the engine's log-probs and a forward pass's."""
    ids = torch.tensor([[*prompt.tolist(), *got.token_ids.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return float(np.abs(expected.numpy() - got.log_prob).max())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=512, layers=14, vocabulary=4096)
        print(json.dumps(ra.run(measure(path))))


if __name__ == "__main__":
    main()
