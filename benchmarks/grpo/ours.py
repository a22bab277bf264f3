"""Our GRPO on the bench's task, by the public job: prints its speed and reward as one line of JSON.

    python ours.py [--seed 0] [--size full|small] [--steps 16] [--out FOLDER] [--lora]

Settings are those of ``grpo.toml``. Each worker has a process of its own; the actor has two
threads, the engine one.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from rlinf_async import cli

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.grpo import task
from benchmarks.grpo.model import model_folder

SETTINGS = Path(__file__).with_name("grpo.toml")


def write_prompts(path: Path, size: task.Size, seed: int) -> None:
    """The prompts of the run, in order."""
    asked = task.numbers(size.prompts * size.steps, seed)
    lines = [json.dumps({"prompt": task.prompt(one), "answer": str(one)}) for one in asked]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def evaluated(size: task.Size, out: Path) -> dict[str, object]:
    """Settings of evaluations beside the training: other prompts, as many as in a step."""
    prompts, name = out / "evaluated.jsonl", "evaluation.sets.others"
    write_prompts(prompts, size._replace(steps=1), seed=-1)
    return {
        "evaluation.every": 4,
        f"{name}.data.path": prompts,
        f"{name}.data.verifier": f"{Path(task.__file__).resolve()}:score",
        f"{name}.data.chat": "false",
    }


def adapter() -> dict[str, object]:
    """Settings that train an adapter of all linear layers; the engine is given merged weights."""
    return {
        "actor.lora.rank": task.LORA_RANK,
        "actor.lora.alpha": task.LORA_ALPHA,
        "actor.optimizer.lr": task.LORA_LR,
    }


def train(size: task.Size, seed: int, out: Path, more: dict[str, object]) -> Path:
    """Train as a user would; the run's folder."""
    prompts, run = out / "prompts.jsonl", out / "run"
    write_prompts(prompts, size, seed)
    given = {
        "out": run,
        "seed": seed,
        "model.path": model_folder(size),
        "data.path": prompts,
        "data.verifier": f"{Path(task.__file__).resolve()}:score",
        "training.iterations": size.steps,
        "training.prompts": size.prompts,
        "training.group_size": task.GROUP,
        "rollout.sampling.max_tokens": task.MAX_TOKENS,
        "actor.micro_batch_size": task.GROUP,
        "actor.optimizer.lr": task.LR,
        "actor.optimizer.max_grad_norm": task.MAX_GRAD_NORM,
        "actor.loss.clip_low": task.CLIP,
        "actor.loss.clip_high": task.CLIP,
        **more,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    code = cli.main(["train", str(SETTINGS), *words])
    if code:
        sys.exit(code)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Our GRPO on the bench's task.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=task.SIZES, default="full")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, help="optimizer steps; the size's own when left out")
    parser.add_argument("--evaluated", action="store_true", help="with evaluations beside")
    parser.add_argument("--lora", action="store_true", help="train an adapter alone")
    given = parser.parse_args()
    size = task.SIZES[given.size]
    size = size._replace(steps=given.steps or size.steps)
    given.out.mkdir(exist_ok=True)
    more = evaluated(size, given.out) if given.evaluated else {}
    more |= adapter() if given.lora else {}
    run = train(size, given.seed, given.out, more)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file) if row["reward"]]
    last = rewards[-task.LAST :]
    measured = {
        "samples_per_second": summary["samples_per_second"],
        "seconds": summary["train_seconds"],
        "reward": sum(last) / len(last),
        "reward_first": rewards[0],
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
