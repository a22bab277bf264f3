"""Our GRPO on the bench's task, by the public job: prints its speed and reward as one line of JSON.

    python ours.py [--seed 0] [--size full|small] [--steps 16] [--max-staleness 0] [--out FOLDER]

Rollout by the transformers engine, as TRL's own default is; each worker in a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from rlinf_async.data import DataConfig
from rlinf_async.messages.language import Sampling
from rlinf_async.runtime.jobs.language.config import (
    ActorConfig,
    ClusterConfig,
    EvaluationConfig,
    LanguageConfig,
    LanguageOptimizerConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
)
from rlinf_async.runtime.jobs.language.job import LanguageRL

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.grpo import task
from benchmarks.grpo.model import model_folder


def configured(
    size: task.Size, model: Path, data: Path, seed: int, max_staleness: int
) -> LanguageConfig:
    """The whole run."""
    return LanguageConfig(
        name="grpo",
        seed=seed,
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            path=str(data), chat=False, shuffle=False, verifier=f"{Path(task.__file__)}:score"
        ),
        training=TrainingConfig(
            iterations=size.steps,
            prompts=size.prompts,
            group_size=task.GROUP,
            max_staleness=max_staleness,
            checkpoint_every=0,
            metrics=(),
        ),
        rollout=RolloutConfig(sampling=Sampling(max_tokens=task.MAX_TOKENS)),
        actor=ActorConfig(
            optimizer=LanguageOptimizerConfig(lr=task.LR, max_grad_norm=task.MAX_GRAD_NORM),
            micro_batch_size=task.GROUP,
        ),
        evaluation=EvaluationConfig(samples=0),
        cluster=ClusterConfig(),
    )


def write_data(path: Path, size: task.Size, seed: int) -> None:
    """The prompts of the run, in order."""
    asked = task.numbers(size.prompts * size.steps, seed)
    lines = [json.dumps({"prompt": task.prompt(one), "answer": str(one)}) for one in asked]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Our GRPO on the bench's task.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=task.SIZES, default="full")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, help="optimizer steps; the size's own when left out")
    given = parser.parse_args()
    size = task.SIZES[given.size]
    size = size._replace(steps=given.steps or size.steps)
    data = given.out / "prompts.jsonl"
    given.out.mkdir(exist_ok=True)
    write_data(data, size, given.seed)
    config = configured(size, model_folder(size), data, given.seed, given.max_staleness)
    summary = LanguageRL().run(config, given.out / "run", resume=False)
    with (given.out / "run" / "metrics.csv").open(newline="") as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file)]
    last = rewards[-task.LAST :]
    measured = {
        "samples_per_second": summary.samples_per_second,
        "seconds": summary.train_seconds,
        "reward": sum(last) / len(last),
        "reward_first": rewards[0],
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
