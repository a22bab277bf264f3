"""One training of ours: prints speed, return, and seconds to success as one line of JSON.

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


def seconds_to_success(metrics: Path) -> float | None:
    """Seconds of training until so many episodes succeed, inf if never; None: none reported."""
    with metrics.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("success_rate")]
    if not rows:
        return None
    reached = (float(row["train_seconds"]) for row in rows if float(row["success_rate"]) >= WANTED)
    return next(reached, math.inf)


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
    seconds = seconds_to_success(Path(out, "metrics.csv"))
    if seconds is not None:
        measured["seconds_to_success"] = seconds
    print("\n" + json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
