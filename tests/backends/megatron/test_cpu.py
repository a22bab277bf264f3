"""The shims that let megatron-core compute on the CPU change nothing else of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

SCRIPT = """
import torch
from rlinf_async.backends.megatron.cpu import install_cpu_shims
install_cpu_shims()
with torch.device("meta"):
    made = [torch.zeros(2), torch.arange(3), torch.empty(1), torch.tensor([1.0])]
print([str(one.device) for one in made], torch.ones(1, device="cuda").device)
"""


def test_tensors_are_made_on_the_device_of_a_context() -> None:
    """Models are built on meta: buffers that were made elsewhere had random contents."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['meta', 'meta', 'meta', 'meta'] cpu\n"
