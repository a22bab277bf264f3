"""Weights in shared memory: the same bytes, copied only where they must be, and nothing is left."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf_async.backends.vllm.shared import Memory, UpdateSharing
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import pack, unpack, verify
from tests.architecture.sources import ROOT
from tests.backends.models import make_model, publish, qwen3
from tests.backends.vllm.kit import shared_memory

READ = """
import sys
from rlinf_async.backends.vllm.shared import Memory
from rlinf_async.weights.pack import verify
update, unchanged = Memory().open(sys.stdin.buffer.read())
verify(update)
print(update.version, update.checksum, sorted(unchanged))
"""


def in_shared_memory(update: WeightUpdate) -> WeightUpdate:
    """The same, as it comes from an actor of this host."""
    return pack(unpack(update), update.version, allocate=shared_bytes)


@pytest.mark.parametrize("came_shared", [True, False])
def test_another_process_maps_the_same_bytes(came_shared: bool) -> None:
    update = publish(make_model(qwen3()), 5)
    given = in_shared_memory(update) if came_shared else update
    with UpdateSharing(given) as sharing:
        assert bool(shared_memory()) != came_shared
        code = [sys.executable, "-c", READ]
        run = subprocess.run(code, cwd=ROOT, capture_output=True, input=sharing.header, check=False)
        assert run.returncode == 0, run.stderr.decode()
        assert run.stdout.decode().split() == ["5", str(given.checksum), "[]"]
        mine = unpack(sharing.update)
        for name, tensor in unpack(update).items():
            np.testing.assert_array_equal(mine[name], tensor)


def test_nothing_is_left_when_the_block_ends_and_views_outlive_it() -> None:
    with UpdateSharing(publish(make_model(qwen3()), 5)) as sharing:
        assert shared_memory()
        memory = Memory()
        seen, _ = memory.open(sharing.header)
    verify(seen)
    verify(sharing.update)
    del seen, sharing, memory
    gc.collect()
    assert shared_memory() == []


def test_whoever_writes_to_what_it_mapped_writes_to_a_copy_of_its_own() -> None:
    with UpdateSharing(publish(make_model(qwen3()), 5)) as sharing:
        seen, _ = Memory().open(sharing.header)
        seen.buckets[0].data[:] = 0
        verify(sharing.update)


def test_memory_stays_mapped_only_while_updates_lie_in_it() -> None:
    memory = Memory()
    first = in_shared_memory(publish(make_model(qwen3()), 5))
    with UpdateSharing(first) as sharing:
        memory.open(sharing.header)
        mapped = dict(memory._mapped)
        memory.open(sharing.header)
        assert memory._mapped == mapped
    with UpdateSharing(publish(make_model(qwen3()), 6)) as sharing:
        memory.open(sharing.header)
        assert not memory._mapped.keys() & mapped.keys()


def test_buckets_that_the_engine_has_are_said_to_be_unchanged() -> None:
    state = unpack(publish(make_model(qwen3()), 5))
    first = pack(state, 5, bucket_bytes=20_000)
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["model.norm.weight"] += 1
    second = pack(changed, 6, bucket_bytes=20_000)
    with UpdateSharing(
        second, {bucket.slots: bucket.checksum for bucket in first.buckets}
    ) as sharing:
        _, loaded = Memory().open(sharing.header)
        assert "model.norm.weight" not in loaded
        assert "model.embed_tokens.weight" in loaded
        assert len(sharing.unchanged) == len(second.buckets) - 1
