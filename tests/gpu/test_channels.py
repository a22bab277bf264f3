"""CUDA tensors between processes: copied through pinned memory."""

from __future__ import annotations

import msgspec
import pytest
import torch

import rlinf_async as ra
from tests.channels.wire.harness import remote_pair


class Batch(msgspec.Struct):
    """Tensors wherever they may stand."""

    logits: torch.Tensor
    parts: dict[str, list[torch.Tensor]]


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
