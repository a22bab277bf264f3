"""Where a rank's weights and moments are: on its device, or on the CPU while others use that.

::

    weights, moments, float32 copies --copy--> CPU (pinned, reused)      gradients: discarded
    storage of size 0  <-- offload      onload --> storage of the old size, filled again

Tensors stay the same objects and views stay views: only their storage becomes empty. So optimizers,
buffers and hooks of Megatron need not know of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_async.backends.base import OffloadedError
from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS
from rlinf_async.backends.megatron.weights import MOMENTS, torch_optimizers


class _Kept(NamedTuple):
    tensor: Tensor
    on_cpu: Tensor
    bytes: int


class HostCopies:
    """CPU copies of tensors whose storage is empty."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        """copies by storage, as long as that is empty"""
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


class Offloading(ABC):
    """Moves the memory of a rank's part of the model, of which an idle rank has none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights_offloaded = False
        self.optimizer_offloaded = False

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether this rank holds a part of the model, and trains."""

    @property
    @abstractmethod
    def memory(self) -> StageMemory:
        """The memory of this rank's stage; raises `IdleRank`."""

    @abstractmethod
    def gather_parameters(self) -> None:
        """Have the last step's parameters of all data ranks. Collective among those."""

    def check_onloaded(self, doing: str, parts: Collection[str] = PARTS) -> None:
        """Raise `OffloadedError` while these parts are offloaded."""
        weights = self.weights_offloaded and WEIGHTS in parts
        if weights or (self.optimizer_offloaded and OPTIMIZER in parts):
            raise OffloadedError(f"{doing} while the model is offloaded: call onload() first")

    def offload_weights(self) -> None:
        """Move the weights to the CPU. On a CPU there is nothing to free."""
        if not self.weights_offloaded and self._on_device and self.active:
            self.gather_parameters()
            self.memory.offload_weights()
            torch.cuda.empty_cache()
        self.weights_offloaded = True

    def load_weights(self) -> None:
        """Take the weights back to the device."""
        if self.weights_offloaded and self._on_device and self.active:
            self.memory.load_weights()
        self.weights_offloaded = False

    def offload_optimizer(self) -> None:
        """Move moments and float32 copies of weights to the CPU, and free the memory of the
        gradients."""
        if not self.optimizer_offloaded and self._on_device and self.active:
            self.gather_parameters()
            self.memory.offload_optimizer()
            torch.cuda.empty_cache()
        self.optimizer_offloaded = True

    def load_optimizer(self) -> None:
        """Take the optimizer's state back to the device, with gradients of 0."""
        if self.optimizer_offloaded and self._on_device and self.active:
            self.memory.load_optimizer()
        self.optimizer_offloaded = False

    @contextmanager
    def awake(self, parts: Collection[str] = PARTS) -> Iterator[None]:
        """Have these parts on the device for the block. Those that were offloaded are offloaded
        again after it, also after an error; no rank waits for another.

        It is for reading and replacing weights and moments: gradients stay where they are.
        """
        weights = self.weights_offloaded and WEIGHTS in parts
        optimizer = self.optimizer_offloaded and OPTIMIZER in parts
        moves = self._on_device and self.active and (weights or optimizer)
        try:
            if weights:
                self.load_weights()
            if optimizer:
                if moves:
                    self.memory.load_state()
                self.optimizer_offloaded = False
            yield
        finally:
            # Nothing was stepped: parameters need not be gathered, as they were when offloaded.
            if moves and optimizer:
                self.memory.offload_optimizer()
            if moves and weights:
                self.memory.offload_weights()
            if moves:
                torch.cuda.empty_cache()
            self.weights_offloaded |= weights
            self.optimizer_offloaded |= optimizer

    @property
    def _on_device(self) -> bool:
        return self.device.type != "cpu"

    def offload_megatron_copy_params(self, optimizers: Any) -> None:
        """Give back the memory of the float32 copies of weights that optimizers keep.

        Args:
            optimizers: one of Megatron's, several, or a chained one. With float32 models there are
                no copies. The tensors stay the same objects; calling this twice does no harm.
        """
        self.memory.offload_copies(optimizers)

    def load_megatron_copy_params(self, optimizers: Any) -> None:
        """Take the float32 copies of weights back; calling this twice does no harm."""
        self.memory.load_copies(optimizers)
