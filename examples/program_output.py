"""A verifier that runs what the model wrote, in a sandbox: bubblewrap, a package of every Linux.

In a configuration::

    [data]
    verifier = "examples/program_output.py:prints_the_answer"

The program of the last ``python`` block is right if it prints the reference. It has the system's
Python and nothing else: no network, no files but those of ``/usr``, no environment, no other
process, and it ends with the verifier.
"""

from __future__ import annotations

import re
import subprocess

from rlinf_async.episodes.sandbox import ENVIRONMENT, sandboxed
from rlinf_async.rewards import Answer

SECONDS = 5.0


def prints_the_answer(answer: Answer) -> float:
    """Whether the program prints the reference, white space at either end aside."""
    programs = re.findall(r"```python\n(.*?)```", answer.text, re.DOTALL)
    if not programs:
        return 0.0
    try:
        ran = subprocess.run(
            sandboxed(["/usr/bin/python3", "-I", "-c", programs[-1]]),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 0.0
    if ran.returncode and ran.stderr.startswith(("bwrap:", "setpriv:", "prlimit:")):
        raise RuntimeError(f"the sandbox cannot be made: {ran.stderr.strip()}")  # no wrong answer
    return float(ran.returncode == 0 and ran.stdout.strip() == answer.reference.strip())
