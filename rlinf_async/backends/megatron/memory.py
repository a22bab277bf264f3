"""Memory of the device that is given back while others use the device, and taken again.

::

    weights, moments, float32 copies --copy--> CPU (pinned, reused)      gradients: discarded
    storage of size 0  <-- offload      onload --> storage of the old size, filled again

Tensors stay the same objects and views stay views: only their storage becomes empty. So optimizers,
buffers and hooks of Megatron need not know of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.megatron.state import MOMENTS, torch_optimizers


class _Kept(NamedTuple):
    tensor: Tensor
    on_cpu: Tensor
    bytes: int


class HostCopies:
    """CPU copies of tensors whose storage is empty."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        """by storage, as long as that is empty"""
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors and give their memory back. Does nothing to those whose memory is gone, and
        to views, whose memory is another tensor's."""
        for one in tensors:
            storage = one.untyped_storage()
            if not storage.size() or storage.size() != one.numel() * one.element_size():
                continue
            on_cpu = self._buffer(one)
            with torch.no_grad():
                on_cpu.copy_(one.reshape(-1))
            self._kept[storage._cdata] = _Kept(one, on_cpu, storage.size())
            storage.resize_(0)

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors whose memory was given back. Does nothing to others."""
        for one in tensors:
            storage = one.untyped_storage()
            kept = self._kept.get(storage._cdata)
            if kept is None:
                continue
            storage.resize_(kept.bytes)  # where the device is full, the copy stays the only one
            with torch.no_grad():
                kept.tensor.copy_(kept.on_cpu.view(kept.tensor.shape))
            del self._kept[storage._cdata]
            self._free[kept.on_cpu.dtype, kept.on_cpu.numel()].append(kept.on_cpu)

    def _buffer(self, like: Tensor) -> Tensor:
        free = self._free[like.dtype, like.numel()]
        if free:
            return free.pop()
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.device.type == "cuda")


class StageMemory:
    """The memory of a stage: weights, gradients, optimizer.

    Args:
        models: Megatron's wrapped chunks.
        optimizer: Megatron's.
    """

    def __init__(self, models: Sequence[Any], optimizer: Any) -> None:
        self._models = models
        self._optimizer = optimizer
        self._copies = HostCopies()
        self._gradient_bytes: dict[int, int] = {}

    def offload_weights(self) -> None:
        """Give back what weights take; calling it twice does no harm, as with all that follow."""
        self._copies.offload(self._weights())

    def load_weights(self) -> None:
        """Take the weights back."""
        self._copies.load(self._weights())

    def offload_optimizer(self) -> None:
        """Give back what moments, float32 copies and gradients take."""
        self.offload_copies(self._optimizer)
        self._copies.offload(self._moments())
        for at, gradients in enumerate(self._gradients()):
            storage = gradients.untyped_storage()
            if storage.size():
                self._gradient_bytes[at] = storage.size()
                storage.resize_(0)

    def load_optimizer(self) -> None:
        """Take them back; gradients are 0."""
        for at, gradients in enumerate(self._gradients()):
            storage = gradients.untyped_storage()
            if not storage.size() and at in self._gradient_bytes:
                storage.resize_(self._gradient_bytes[at])
                gradients.zero_()
        self.load_state()

    def load_state(self) -> None:
        """Take moments and float32 copies back, without gradients."""
        self._copies.load(self._moments())
        self.load_copies(self._optimizer)

    def offload_copies(self, optimizers: Any) -> None:
        """Give back what the float32 copies of weights take."""
        self._copies.offload(float32_copies(optimizers))

    def load_copies(self, optimizers: Any) -> None:
        """Take the float32 copies of weights back."""
        self._copies.load(float32_copies(optimizers))

    def _moments(self) -> Iterator[Tensor]:
        for one in torch_optimizers(self._optimizer):
            for state in one.state.values():
                yield from (state[name] for name in MOMENTS if name in state)

    def _weights(self) -> Iterator[Tensor]:
        for model in self._models:
            for buffer in _buffers(model):
                if buffer.param_data is not None:  # of the distributed optimizer
                    yield buffer.param_data
            yield from (one.data for one in model.parameters())

    def _gradients(self) -> Iterator[Tensor]:
        for model in self._models:
            for buffer in _buffers(model):
                yield buffer.grad_data


def float32_copies(optimizers: Any) -> Iterator[Tensor]:
    """Yield the optimizers' own float32 weights; with float32 models there are none.

    ``optimizers``: one, several, or a chained one.
    """
    if isinstance(optimizers, list | tuple):
        for one in optimizers:
            yield from float32_copies(one)
        return
    for one in getattr(optimizers, "chained_optimizers", [optimizers]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(one, name, ()):
                yield from (copy for copy in group if copy is not None)


def _buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]
