"""The same run on processes and on Ray: seconds of each after its start, and their losses.

    python jobs.py embodied | language FOLDER

Settings are those of the example, cut short; exactly on-policy, so the losses are to be the same.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

from rlinf_async import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
JOBS: dict[str, tuple[Path, tuple[str, ...], dict[str, object]]] = {
    "embodied": (
        EXAMPLES / "fetch_reach_ppo.toml",
        ("policy_loss", "value_loss"),
        {
            "training.total_steps": 36_000,
            "cluster.rollout_workers": 0,
            "evaluation.episodes": 1,
        },
    ),
    "language": (
        EXAMPLES / "grpo_arithmetic.toml",
        ("policy_loss", "grad_norm"),
        {
            "warm_start.steps": 50,
            "training.iterations": 30,
            "actor.pipelined": "false",
            "evaluation.every": 30,
        },
    ),
}
"""the file of each job, its columns that have to be the same, and what differs from the example"""


def train(job: str, backend: str, out: Path) -> tuple[float, list[float]]:
    """Train; seconds of training, and the losses of each iteration."""
    path, columns, settings = JOBS[job]
    given = settings | {"cluster.backend": backend, "out": out}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    code = cli.main(["train", str(path), *words])
    if not (out / "summary.json").is_file():
        sys.exit(code)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    if code and summary["outcome"] != "fell short":  # of its goal: the run is too short for it
        sys.exit(code)
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row[columns[0]]]  # others are evaluations
        losses = [float(row[name]) for row in rows for name in columns]
    return summary["train_seconds"], losses


def main() -> None:
    job, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    os.chdir(ROOT)  # from where the examples name their data
    process, of_process = train(job, "process", folder / "process")
    on_ray, of_ray = train(job, "ray", folder / "ray")
    measured = {
        "process_seconds": process,
        "ray_seconds": on_ray,
        "ray_over_process": on_ray / process,
        "loss_difference": max(abs(a - b) for a, b in zip(of_process, of_ray, strict=True)),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
