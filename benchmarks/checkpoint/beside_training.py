"""Trains a language model while checkpoints are written; prints what that costs, as JSON.

``python beside_training.py FOLDER``
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.messages.language import TrainingSample

CHECKPOINTS = 5
TOKENS, SAMPLES = 64, 4
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 640,
    "intermediate_size": 2560,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 16_000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def sample(index: int) -> TrainingSample:
    random = np.random.default_rng(index)
    ids = random.integers(0, 16_000, (2, TOKENS)).astype(np.int32)
    return TrainingSample(
        group=0,
        index=index,
        prompt_ids=ids[0],
        response_ids=ids[1],
        loss_mask=np.ones(TOKENS, bool),
        log_prob=np.full(TOKENS, -9.7, np.float32),
        version=np.zeros(TOKENS, np.int32),
        temperature=1.0,
        reward=float(index % 2),
        scored=True,
        advantage=np.full(TOKENS, 1.0 - 2.0 * (index % 2), np.float32),
    )


def timed_step(trainer: PolicyTrainer, batch: list[TrainingSample]) -> float:
    began = time.perf_counter()
    trainer.training_step([MicroBatch(batch, True)])
    return time.perf_counter() - began


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = LanguageTrainerConfig(fsdp=LanguageFSDPConfig(model=LanguageModelConfig(config=MODEL)))
    trainer = PolicyTrainer(config, 1, 0)
    manager, batch = trainer.manager, [sample(index) for index in range(SAMPLES)]
    timed_step(trainer, batch)
    began = time.perf_counter()
    trainer.save_checkpoint(folder / "checkpoint")  # takes the memory, and is not counted
    first = time.perf_counter() - began
    alone = [timed_step(trainer, batch) for _ in range(5)]
    stalls: list[float] = []
    writing: list[float] = []
    beside: list[float] = []
    for _ in range(CHECKPOINTS):
        began = time.perf_counter()
        flight = trainer.begin_checkpoint(folder / "checkpoint")
        until_back = time.perf_counter() - began
        so_far = manager.checkpoints.seconds.stalled
        while True:
            beside.append(timed_step(trainer, batch))
            if flight.done():
                break
        flight.result()
        seconds = manager.checkpoints.seconds
        stalls.append(until_back + seconds.stalled - so_far)
        writing.append(seconds.writing)
    weights = sum(one.numel() for one in manager.model.parameters())
    median = statistics.median
    shares = [stall / took for stall, took in zip(stalls, writing, strict=True)]
    measured = {
        "parameters_m": weights / 1e6,
        "gigabytes": 3 * weights * 4 / 1e9,
        "first_save_seconds": first,
        "stalled_ms": 1e3 * median(stalls),
        "worst_stalled_ms": 1e3 * max(stalls),
        "writing_seconds": median(writing),
        "stalled_share": median(shares),
        "step_seconds": median(alone),
        "step_beside_seconds": median(beside),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
