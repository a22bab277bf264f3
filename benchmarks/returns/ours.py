"""One training of ours: prints return, success and speed as one line of JSON.

python ours.py CONFIG.toml OUT [--section.field VALUE]...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlinf_async.cli import main as command


def main(file: str, out: str, overrides: list[str]) -> int:
    """Train, and print what was measured."""
    os.chdir(Path(__file__).parents[2])  # entry points of examples are relative to the checkout
    code = command(["train", file, "--out", out, *overrides])
    summary_file = Path(out, "summary.json")
    if code > 1 or not summary_file.exists():
        return code or 1
    summary = json.loads(summary_file.read_text(encoding="utf-8"))
    if summary["outcome"] not in ("finished", "succeeded", "fell short"):
        return 1
    measured = {"return": summary["return"], "steps_per_second": summary["steps_per_second"]}
    if summary["success_rate"] is not None:
        measured["success"] = summary["success_rate"]
    print("\n" + json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
