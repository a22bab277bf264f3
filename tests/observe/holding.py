"""A process that holds a run folder, as the driver of a run does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOLD = """
import sys
from rlinf_async.observe.run_folder import RunFolder
with RunFolder.create(sys.argv[1], config_text="held"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds this folder until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()
