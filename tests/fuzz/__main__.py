"""Fuzz one target by coverage: ``python -m tests.fuzz TARGET FOLDER... [-max_total_time=600]``.

Needs the ``fuzz`` extra (atheris). What follows the target goes to libFuzzer; the first folder gets
every input that reached something new. To shrink a corpus: ``-merge=1 tests/fuzz/corpus/TARGET
FOLDER``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["rlinf_async.channels"]):
        targets = importlib.import_module("tests.fuzz.targets")
    name, *arguments = sys.argv[1:] or [""]
    if name not in targets.TARGETS:
        sys.exit(f"usage: python -m tests.fuzz ({' | '.join(targets.TARGETS)}) FOLDER...")
    with targets.ready(name) as target:
        itself = f"{sys.executable} -m tests.fuzz {name}"  # what libFuzzer runs to merge
        atheris.Setup([itself, *arguments], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
