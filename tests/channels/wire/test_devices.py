"""Tensors that are shared: copies where there is no GPU, and plain words where it is not seen."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from rlinf_async.channels import Channel, WireError
from rlinf_async.channels.wire import Decoder, SharedTensor, encode, share_tensor
from rlinf_async.channels.wire.items.devices import CudaMemory
from tests.channels.wire.harness import remote_pair

SOMEWHERE = CudaMemory(
    host="another boot", gpu="GPU-0000", shape=(2, 3), stride=(3, 1), offset=0, dtype="bfloat16",
    handle=bytes(64), storage_bytes=512, storage_offset=0, counter=b"/torch", counter_offset=1,
    event=bytes(64), wait=True,
)  # fmt: skip


async def test_a_tensor_of_the_cpu_is_shared_as_a_copy() -> None:
    sent = torch.arange(40_000, dtype=torch.float32).reshape(200, 200).T
    async with remote_pair(Channel(SharedTensor, name="tensors")) as (sender, receiver):
        await sender.put(share_tensor(sent))
        found = (await receiver.get()).open()
    assert found.equal(sent)
    found += 1
    assert sent[0, 0] == 0


def test_what_names_memory_travels_as_plain_data() -> None:
    shared = SharedTensor(SOMEWHERE)
    assert Decoder(SharedTensor).decode(encode(shared)) == shared


def test_memory_of_a_gpu_that_is_not_seen_is_refused_with_what_to_do() -> None:
    with pytest.raises(WireError, match=r"GPU GPU-0000 of host another boot.*copy=True"):
        SharedTensor(SOMEWHERE).open()


def test_an_unknown_dtype_is_refused() -> None:
    strange = msgspec.structs.replace(SOMEWHERE, dtype="load")
    with pytest.raises(WireError, match="torch has no dtype 'load'"):
        SharedTensor(strange).open()


def test_a_shared_tensor_of_nothing_is_refused() -> None:
    with pytest.raises(WireError, match="without memory and without a copy"):
        SharedTensor(None).open()


def test_sharing_is_known_without_torch() -> None:
    code = (
        "import sys, rlinf_async.channels.wire.items.devices; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
