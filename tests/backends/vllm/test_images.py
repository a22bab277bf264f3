"""Prompts with images and vLLM: its log-probs are the trainer's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.backends.vllm.engine import VllmEngine
from rlinf_async.messages.language import Generated, Prompt, Request, Sample, Sampling
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.inference import with_log_probs
from tests.backends import seeing
from tests.backends.vllm.kit import SMALL, Served

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WIDE: dict[str, Any] = copy.deepcopy(seeing.IDEFICS3)
WIDE["text_config"] |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def asked(prompt: Prompt, group: int, index: int, partial: Generated | None = None) -> Request:
    return Request(
        group=group,
        index=index,
        group_size=2,
        iteration=0,
        min_version=0,
        prompt=prompt,
        sampling=Sampling(max_tokens=12),
        seed=10 * group + index,
        partial=partial,
    )


async def drawn(
    engine: VllmEngine, given: Sequence[Prompt], first: WeightUpdate, second: WeightUpdate
) -> list[Sample]:
    """Samples of prompts with several images, one and none, under the second weights: two of each
    prompt, and one that goes on with an answer which was begun."""
    await engine.load(first)
    await asyncio.gather(*(engine.generate(asked(one, 9, at)) for at, one in enumerate(given)))
    await engine.load(second)
    requests = [asked(one, group, index) for group, one in enumerate(given) for index in range(2)]
    found = await asyncio.gather(*map(engine.generate, requests))
    begun = [
        msgspec.structs.replace(
            one,
            token_ids=one.token_ids[:4],
            log_prob=one.log_prob[:4],
            version=one.version[:4],
            finish="abort",
        )
        for one in found[::2]
    ]
    rest = [asked(prompt, group, 0, begun[group]) for group, prompt in enumerate(given)]
    found += await asyncio.gather(*map(engine.generate, rest))
    return [
        Sample(request=one, generated=made, text="", rollout_rank=0)
        for one, made in zip(requests + rest, found, strict=True)
    ]


def test_log_probs_of_answers_to_images_are_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update too: neither its cache nor vectors of images are of the weights before."""
    monkeypatch.setitem(seeing.TINY, "idefics3", WIDE)
    model = seeing.seeing_folder(tmp_path)
    given = seeing.prompts(tmp_path, model)
    trainer = PolicyTrainer(seeing.seeing_trainer(model), 1, 0)
    first = trainer.publish()
    with torch.no_grad():
        for parameter in trainer.manager.model.parameters():
            parameter.mul_(1.1)
    trainer.end_iteration()
    with Served(VllmEngineConfig(model=str(model), **SMALL)) as served:
        samples = served.run(drawn(served.engine, given, first, trainer.publish()))
    for one in with_log_probs(trainer, samples, reference=False, previous=True):
        assert one.prev_log_prob is not None
        assert len(one.generated.token_ids) > 1
        np.testing.assert_allclose(one.prev_log_prob, one.generated.log_prob, atol=1e-4)
    same, other = (samples[at].generated.log_prob[0] for at in (2, 4))
    assert abs(float(same - other)) > 1e-3  # the same text, another image
