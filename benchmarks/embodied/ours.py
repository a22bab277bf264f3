"""One training of ours: prints speed, returns, and seconds to success as one line of JSON.

    python ours.py CONFIG.toml OUT [--section.field VALUE]...

Exit code 77, which skips the case, where a package that the configuration needs is not installed.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

from rlinf_async.cli import main as command
from rlinf_async.config import Document, MissingExtra
from rlinf_async.runtime.jobs import get_job
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.workers.env import describe_env

SKIPPED = 77
"""Exit code that the harness takes for "cannot run here"."""
WANTED = 0.95
"""share of the last 100 episodes that succeed"""


def missing(file: str) -> str:
    """Why the environment cannot be made here; empty if it can."""
    document = Document.read(file)
    config = document.to(get_job(str(document.tables["job"])).config_type)
    if not isinstance(config, EnvironmentSettings):
        raise TypeError(f"{file} is of a job without environments")
    try:
        describe_env(config.env)
    except MissingExtra as error:
        return str(error)
    return ""


def of_training(metrics: Path) -> dict[str, float]:
    """What the iterations' rows say: the last return, where an episode ended; and the seconds until
    so many episodes succeeded, inf for never, where they report success."""
    with metrics.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, float] = {}
    if returns := [row["return"] for row in rows if row.get("return")]:
        found["train_return"] = float(returns[-1])
    if judged := [row for row in rows if row.get("success_rate")]:
        reached = (row for row in judged if float(row["success_rate"]) >= WANTED)
        first = next(reached, None)
        found["seconds_to_success"] = float(first["train_seconds"]) if first else math.inf
    return found


def main(file: str, out: str, overrides: list[str]) -> int:
    """Train, and print what was measured."""
    if problem := missing(file):
        print(problem, file=sys.stderr)
        return SKIPPED
    code = command(["train", file, "--out", out, *overrides])
    summary_file = Path(out, "summary.json")
    if code > 1 or not summary_file.exists():
        return code or 1
    summary = json.loads(summary_file.read_text(encoding="utf-8"))
    if summary["outcome"] not in ("finished", "succeeded", "fell short"):
        return 1
    measured = {"steps_per_second": summary["steps_per_second"], "return": summary["return"]}
    print("\n" + json.dumps(measured | of_training(Path(out, "metrics.csv"))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
