"""A worker that only traces does not pay for what draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "tensorboard", "rich", "gymnasium", "imageio_ffmpeg", "numpy")


@pytest.mark.parametrize("heavy", HEAVY)
def test_the_package_is_imported_without(heavy: str) -> None:
    program = f"import sys, rlinf_async.observe; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_nothing_of_it_brings_in_torch() -> None:
    program = (
        "import sys\n"
        "from rlinf_async.observe import pictures, progress, tensorboard_sink\n"
        "from rlinf_async.observe import video\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_sink_that_was_found_is_imported() -> None:
    """A run looks for its sinks before its event loop begins, and makes them in there."""
    program = (
        "import sys; from rlinf_async.observe.sinks.config import find_sink; "
        "find_sink('tensorboard'); "
        "sys.exit('tensorboard.summary.writer.record_writer' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
