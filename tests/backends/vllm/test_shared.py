"""Weights in shared memory: the same bytes, and nothing is left."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf_async.backends.vllm.shared import Sharing, open_shared
from rlinf_async.weights import unpack, verify
from tests.architecture.sources import ROOT
from tests.backends.models import make_model, publish, qwen3
from tests.backends.vllm.kit import shared_memory

READ = """
import sys
from rlinf_async.backends.vllm.shared import open_shared
from rlinf_async.weights import verify
update = open_shared(sys.argv[1])
verify(update)
print(update.version, update.checksum)
"""


def test_another_process_maps_the_same_bytes() -> None:
    update = publish(make_model(qwen3()), 5)
    with Sharing(update) as sharing:
        code = [sys.executable, "-c", READ, sharing.path]
        run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["5", str(update.checksum)]
        mine = unpack(sharing.update)
        for name, tensor in unpack(update).items():
            np.testing.assert_array_equal(mine[name], tensor)


def test_nothing_is_left_when_the_block_ends_and_views_outlive_it() -> None:
    with Sharing(publish(make_model(qwen3()), 5)) as sharing:
        assert shared_memory()
        seen = open_shared(sharing.path)
    verify(seen)
    verify(sharing.update)
    del seen, sharing
    gc.collect()
    assert shared_memory() == []


def test_whoever_writes_to_what_it_mapped_writes_to_a_copy_of_its_own() -> None:
    with Sharing(publish(make_model(qwen3()), 5)) as sharing:
        seen = open_shared(sharing.path)
        seen.buckets[0].data[:] = 0
        verify(sharing.update)
