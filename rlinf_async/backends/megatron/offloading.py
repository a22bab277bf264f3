"""Where a rank's weights and moments are: on its device, or on the CPU while others use that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlinf_async.backends.language import OPTIMIZER, PARTS, WEIGHTS
from rlinf_async.backends.megatron.errors import OffloadedError
from rlinf_async.backends.megatron.memory import StageMemory


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
