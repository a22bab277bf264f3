"""Optimizer steps of our trainer and of a bare Megatron loop in turns; prints seconds and ratio.

    python step.py [--attention fused|local] [--steps 10] [--layers 6] [--profile ours|bare]

With ``--profile`` only one of them runs, under PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.megatron.bare import BareLoop
from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.megatron.trainer import MegatronTrainer
from rlinf_async.messages.language import TrainingSample

SAMPLES, MICRO_BATCH, TOKENS = 16, 4, 128
OPTIMIZER = OptimizerConfig(lr=1e-4, eps=1e-8, max_grad_norm=1.0)


def model(layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }


def tokens(vocabulary: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """``[SAMPLES, TOKENS]``; the first of each sample is its prompt, all others are trained."""
    random = np.random.default_rng(0)
    return random.integers(0, vocabulary, (SAMPLES, TOKENS)).astype(np.int32)


def samples(ids: np.ndarray[Any, np.dtype[np.int32]]) -> list[TrainingSample]:
    size = TOKENS - 1
    return [
        TrainingSample(
            group=0,
            index=index,
            prompt_ids=row[:1],
            response_ids=row[1:],
            loss_mask=np.ones(size, bool),
            log_prob=np.full(size, -7.6, np.float32),
            version=np.zeros(size, np.int32),
            temperature=1.0,
            reward=1.0,
            scored=True,
            advantage=np.full(size, 1.0 - 2.0 * (index % 2), np.float32),
        )
        for index, row in enumerate(ids)
    ]


def our_step(described: dict[str, Any]) -> Callable[[], object]:
    config = MegatronTrainerConfig(
        megatron=MegatronConfig(model=LanguageModelConfig(config=described), optimizer=OPTIMIZER),
        loss=LanguageLossConfig(),
    )
    trainer = MegatronTrainer(config, 1, 0)
    batch = samples(tokens(described["vocab_size"]))
    count = SAMPLES // MICRO_BATCH
    parts = [batch[at : at + MICRO_BATCH] for at in range(0, SAMPLES, MICRO_BATCH)]

    def step() -> object:
        work = (MicroBatch(part, at == count - 1, count) for at, part in enumerate(parts))
        return trainer.training_step(work)

    return step


def seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def profiled(step: Callable[[], object]) -> None:
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of both in turns.")
    parser.add_argument("--attention", choices=["fused", "local"], default="fused")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--profile", choices=["ours", "bare"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    described = model(given.layers)
    collectives: Any = torch.distributed
    collectives.init_process_group("gloo", store=collectives.HashStore(), rank=0, world_size=1)
    ids = tokens(described["vocab_size"])
    bare = BareLoop(described, OPTIMIZER, ids, MICRO_BATCH, fused=given.attention == "fused").step
    ours = our_step(described)
    for one in (ours, bare, ours, bare):
        one()
    if given.profile:
        profiled(ours if given.profile == "ours" else bare)
        return
    # The one that comes second finds the caches as the first left them: they change places.
    pairs = []
    for at in range(given.steps):
        if at % 2:
            theirs = seconds(bare)
            mine = seconds(ours)
        else:
            mine = seconds(ours)
            theirs = seconds(bare)
        pairs.append((mine, theirs))
    measured = {
        "ours_seconds": statistics.median(mine for mine, _ in pairs),
        "bare_seconds": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
