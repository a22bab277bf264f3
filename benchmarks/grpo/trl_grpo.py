"""TRL's `GRPOTrainer` on the bench's task: prints its speed and reward as one line of JSON.

    python trl_grpo.py [--seed 0] [--size full|small] [--steps 16] [--threads 2] [--lora]

Runs in the peer's virtualenv. Seconds are those between the first step's beginning and the last
step's end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped,unused-ignore]
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.grpo import task
from benchmarks.grpo.model import model_folder


class Clock(TrainerCallback):
    """Notes when training began and ended, and the reward of every step."""

    def __init__(self) -> None:
        self.start = self.end = 0.0
        self.rewards: list[float] = []

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **options: Any) -> None:
        self.end = time.perf_counter()

    def on_log(self, *args: Any, **options: Any) -> None:
        logs = options["logs"]
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def rewards(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """One for each completion."""
    return [task.reward(one, wanted) for one, wanted in zip(completions, number, strict=True)]


def arguments(size: task.Size, given: argparse.Namespace, out: str) -> Any:
    """The same algorithm as ours: on-policy, one optimizer step for each batch of samples."""
    micro_batch = given.micro_batch or size.samples
    return GRPOConfig(
        output_dir=out,
        max_steps=size.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=size.samples // micro_batch,
        num_generations=task.GROUP,
        max_completion_length=task.MAX_TOKENS,
        learning_rate=task.LORA_LR if given.lora else task.LR,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=task.MAX_GRAD_NORM,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=task.CLIP,
        loss_type="dapo",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=given.seed,
    )


def adapter() -> Any:
    """An adapter of all linear layers."""
    return LoraConfig(
        r=task.LORA_RANK,
        lora_alpha=task.LORA_ALPHA,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer on the bench's task.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=task.SIZES, default="full")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=0, help="samples; 0: all of a step")
    parser.add_argument("--steps", type=int, help="optimizer steps; the size's own when left out")
    parser.add_argument("--lora", action="store_true", help="train an adapter alone")
    given = parser.parse_args()
    size = task.SIZES[given.size]
    size = size._replace(steps=given.steps or size.steps)
    torch.set_num_threads(given.threads)
    folder = model_folder(size)
    asked = task.numbers(size.prompts * size.steps, given.seed)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=rewards,
            args=arguments(size, given, out),
            train_dataset=Dataset.from_list(
                [{"prompt": task.prompt(one), "number": one} for one in asked]
            ),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
            peft_config=adapter() if given.lora else None,
        ).train()
    seconds = clock.end - clock.start
    last = clock.rewards[-task.LAST :]
    measured = {
        "samples_per_second": size.samples * size.steps / seconds,
        "seconds": seconds,
        "reward": sum(last) / len(last),
        "reward_first": clock.rewards[0],
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
