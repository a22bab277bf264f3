"""CUDA tensors between processes: copied through pinned memory, or shared by CUDA IPC."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

import rlinf_async as ra
from rlinf_async.channels.wire import SharedTensor, share_tensor
from tests.channels.wire.harness import remote_pair


class Batch(msgspec.Struct):
    """Tensors wherever they may stand."""

    logits: torch.Tensor
    parts: dict[str, list[torch.Tensor]]


class Neighbour(ra.Worker):
    """Works on another process's tensor."""

    async def add_one(self, shared: SharedTensor) -> float:
        tensor = shared.open()
        tensor += 1
        torch.cuda.synchronize()
        return float(tensor.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (300, 200)], ids=str)
async def test_cuda_tensors_arrive_in_the_cpus_memory_with_their_elements(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = (torch.rand(shape, device="cuda") * 100).to(dtype)
    item = Batch(sent.T if sent.dim() == 2 else sent, {"both": [sent, sent.cpu()]})
    async with remote_pair(ra.Channel(Batch, name="batches")) as (sender, receiver):
        await sender.put(item)
        found = await receiver.get()
    assert found.logits.device.type == "cpu"
    assert found.logits.equal(item.logits.cpu())
    assert all(one.equal(sent.cpu()) for one in found.parts["both"])


async def test_what_is_still_computed_when_it_is_put_arrives_computed() -> None:
    async with remote_pair(ra.Channel(torch.Tensor, name="tensors")) as (sender, receiver):
        one = torch.rand(2000, 2000, device="cuda")
        for _ in range(20):
            one = one @ one.softmax(0)
        await sender.put(one)
        assert (await receiver.get()).equal(one.cpu())


@pytest.mark.parametrize("offset", [0, 1000])
async def test_another_process_works_on_shared_memory_in_place(offset: int) -> None:
    tensor = torch.zeros(1_000_000, device="cuda")[offset:]
    async with ra.Cluster.process() as cluster:
        neighbours = await cluster.launch(Neighbour)
        shared = share_tensor(tensor)
        assert shared.memory is not None
        [total] = await neighbours.call(Neighbour.add_one, shared)
    assert total == len(tensor)
    assert bool((tensor == 1).all())


async def test_memory_that_was_shared_is_free_again_when_nobody_uses_it() -> None:
    async with ra.Cluster.process() as cluster:
        neighbours = await cluster.launch(Neighbour)
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            tensor = torch.zeros(10_000_000, device="cuda")
            await neighbours.call(Neighbour.add_one, share_tensor(tensor))
            del tensor
        gc.collect()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        assert torch.cuda.memory_allocated() - before <= 2 * 40_000_000
