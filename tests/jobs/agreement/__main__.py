"""``python -m tests.jobs.agreement [--seconds 60] [--only TEXT] [--examples] [--wrong]``

From the root of a checkout: starts all examples and every wrong configuration of `wrong`. Each is
checked first; what passes is trained for so many seconds, and ended by SIGTERM. It prints a line
for each. The exit code is 1 if ``check`` passed what the run then ended with an error, or if a
wrong configuration was refused without the name of what is wrong.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from subprocess import TimeoutExpired
from typing import NamedTuple

from tests.jobs.agreement.wrong import WRONG, Wrong
from tests.jobs.language.checkpoints import save_checkpoint
from tests.jobs.processes import Driver

PATIENCE = 300.0
"""Longest time for a check or for the end of a run, on a busy machine, seconds."""
REFUSED = 2
"""Exit code of a refusal."""
ENDED = (0, 1, 143)
"""Exit codes of a run that was not refused: good, short of its target, ended by SIGTERM."""


class Verdict(NamedTuple):
    """What came of one configuration."""

    kind: str
    """``refused``, ``runs``, ``ended with an error`` or ``refused without a name``."""
    said: str

    @property
    def agrees(self) -> bool:
        return self.kind in ("refused", "runs")


def tried(case: Wrong, folder: pathlib.Path, seconds: float) -> Verdict:
    """Check a configuration, and train it where that says ok."""
    if case.prepare is not None:
        case.prepare(folder)
    words = case.arguments(folder)
    code, said = _ended(folder / "check", PATIENCE, "check", *words)
    if code == REFUSED:
        named = case.named.lower() in said.lower()
        return Verdict("refused" if named else "refused without a name", _last(said))
    if code != 0:
        return Verdict("check failed", f"{code}: {_last(said)}")
    code, said = _ended(folder / "train", seconds, "train", *words, "--out", folder / "run")
    failed = code not in ENDED or "error: " in said
    return Verdict("ended with an error" if failed else "runs", f"{code}: {_last(said)}")


def _ended(temporary: pathlib.Path, seconds: float, *words: object) -> tuple[int, str]:
    """Wait for a command, and end it by SIGTERM where it goes on; its exit code and its words."""
    temporary.mkdir()
    driver = Driver(temporary, *words)
    try:
        return driver.wait(seconds), driver.said
    except TimeoutExpired:
        driver.terminate()
        return driver.wait(PATIENCE), driver.said
    finally:
        driver.end()


def _last(said: str) -> str:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    return (errors or said.splitlines() or [""])[-1][:300]


def examples() -> Iterator[Wrong]:
    """Every configuration of ``examples/`` that trains, as it stands."""
    for path in sorted(pathlib.Path("examples").glob("*.toml")):
        if path.name.startswith("simulated"):
            continue
        own = path.name == "grpo_hf_checkpoint.toml"
        settings = {"model.path": "{folder}/model"} if own else {}
        yield Wrong(path.name, str(path), settings, "pip install", _own_model if own else None)


def _own_model(folder: pathlib.Path) -> None:
    save_checkpoint(folder / "model", "qwen3", max_position_embeddings=2048)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jobs.agreement")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run that passes")
    parser.add_argument("--only", default="", help="cases with this text in their name")
    parser.add_argument("--examples", action="store_true", help="these alone")
    parser.add_argument("--wrong", action="store_true", help="the wrong ones alone")
    given = parser.parse_args()
    cases = [] if given.wrong else list(examples())
    cases += [] if given.examples else WRONG
    totals: Counter[str] = Counter()
    broken = 0
    for case in cases:
        if given.only not in case.name:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
            verdict = tried(case, pathlib.Path(folder), given.seconds)
        totals[verdict.kind] += 1
        broken += not verdict.agrees
        took = time.monotonic() - began
        print(f"{case.name}: {verdict.kind}, {took:.0f} s\n    {verdict.said}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in totals.most_common()))
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
