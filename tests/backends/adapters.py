"""An adapter that is published alone, over a model in a folder, and what engines do with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import GenerationEngine
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    PublishedAdapterConfig,
)
from rlinf_async.backends.language_training.lora import is_of_adapter
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request
from rlinf_async.messages.weights import WeightsMismatch
from rlinf_async.weights.pack import pack
from tests.backends.engine_protocol import until_made
from tests.backends.language.kit import sample
from tests.backends.models import endless, make_model, qwen3, save_folder
from tests.backends.requests import request

ADAPTER = PublishedAdapterConfig(rank=4, alpha=6.0, publish="adapter")


def publisher(folder: Path) -> PolicyTrainer:
    """A trainer over a model in a folder."""
    config = qwen3(tied=False)
    path = save_folder(folder, config, endless(make_model(config, 3, sharpness=0.1)))
    fsdp = LanguageFSDPConfig(model=LanguageModelConfig(path=path))
    return PolicyTrainer(LanguageTrainerConfig(fsdp=fsdp, lora=ADAPTER, reference=True), 1, 0)


def make_next_version(trainer: PolicyTrainer) -> None:
    """Change the adapter, as training does."""
    generator = torch.Generator().manual_seed(trainer.version)
    with torch.no_grad():
        for name, one in trainer.manager.model.named_parameters():
            if is_of_adapter(name):
                one.add_(torch.randn(one.shape, generator=generator), alpha=0.1)
    trainer.end_iteration()


def log_probs(
    trainer: PolicyTrainer, asked: Request, got: Generated, *, reference: bool = False
) -> Floats:
    """``[R]`` of the response, by the trainer's own forward pass."""
    one = sample(0, 0)
    one.prompt_ids, one.response_ids = asked.prompt.token_ids, got.token_ids
    one.loss_mask, one.temperature = np.full(len(got.token_ids), True), 1.0
    return trainer.log_probs([one], reference=reference)[0]


async def serves_each_version(engine: GenerationEngine, trainer: PolicyTrainer) -> None:
    """Each token is of the version that it says, also where an adapter comes in flight."""

    def close(found: Any, expected: Any) -> None:
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

    first = trainer.publish()
    assert all(is_of_adapter(slot.name) for one in first.buckets for slot in one.slots)
    assert await engine.load(first) == first.checksum
    asked = request(1, max_tokens=300)
    running = asyncio.create_task(engine.generate(asked))
    await until_made(engine, 5, running)
    make_next_version(trainer)
    second = trainer.publish()
    assert await engine.load(second) == second.checksum
    got = await running
    before = got.version == 0
    assert set(got.version.tolist()) == {0, 1}
    close(got.log_prob[before], log_probs(trainer, asked, got, reference=True)[before])
    close(got.log_prob[~before], log_probs(trainer, asked, got)[~before])
    of_first = log_probs(trainer, asked, got, reference=True)
    assert np.abs(got.log_prob - of_first)[~before].max() > 0.1
    for version in (2, 3):
        make_next_version(trainer)
        update = trainer.publish()
        assert await engine.load(update) == update.checksum
        assert engine.version == version
        again = await engine.generate(request(version))
        assert set(again.version.tolist()) == {version}
        close(again.log_prob, log_probs(trainer, request(version), again))
        pair = (asked.prompt.token_ids, got.token_ids)
        [found] = await engine.log_probs([pair])
        close(found, log_probs(trainer, asked, got))
    with pytest.raises(WeightsMismatch, match="is whole weights, but the engine takes an adapter"):
        await engine.load(pack({"model.norm.weight": torch.ones(64)}, 4))
    assert engine.version == 3
