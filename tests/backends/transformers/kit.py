"""Engines over tiny models, and what the library itself makes of the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.messages.language import Generated, Request
from tests.backends.models import save_folder


@asynccontextmanager
async def engine_of(
    folder: Path, model: nn.Module, **fields: Any
) -> AsyncIterator[TransformersEngine]:
    """An engine that serves this model as version 0."""
    config: Any = model.config
    path = await asyncio.to_thread(save_folder, folder, config, model)
    engine = TransformersEngine(TransformersEngineConfig(model=path, weights="folder", **fields))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def generate_all(engine: TransformersEngine, asked: Sequence[Request]) -> list[Generated]:
    """All at once."""
    return await asyncio.gather(*(engine.generate(one) for one in asked))


@torch.no_grad()
def processed_log_probs(model: nn.Module, asked: Request, got: Generated) -> torch.Tensor:
    """``[R]`` of the distribution that the library would sample from, by its own warpers."""
    prompt = asked.prompt.token_ids.tolist()
    ids = torch.tensor([prompt + got.token_ids.tolist()])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    sampling = asked.sampling
    for token, bias in sampling.logit_bias:
        logits[:, token] += bias
    if sampling.repetition_penalty != 1.0:
        penalty: Any = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        for at in range(len(logits)):
            logits[at] = penalty(ids[:, : len(prompt) + at], logits[at : at + 1])[0]
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    unused: Any = None
    warped = warpers(unused, logits)
    return warped.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
