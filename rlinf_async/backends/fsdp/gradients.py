"""The gradients of one rank: added up, measured, clipped, and given to the optimizer.

Those of a model that is not sharded lie in one piece of memory for each parameter group. Measuring
and scaling them is then one call for the whole group instead of one for each tensor: for a tiny
policy that is a tenth of the update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rlinf_async.backends.fsdp.optim import LossScaler


class GradientBuffer:
    """Lays the gradients of ``parameters`` back to back; each ``.grad`` is a view of ``flat``.

    Invariant: after `attach` every gradient is a view, and autograd adds into it in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = [
            piece.view(parameter.shape)
            for piece, parameter in zip(
                torch.split(self.flat, sizes), self._parameters, strict=True
            )
        ]

    def attach(self) -> None:
        """Zero the buffer and make it the gradient of every parameter."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def collect(self) -> None:
        """Copy in gradients that were made outside the buffer."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def detach(self) -> None:
        """Remove the gradients, so that an optimizer skips these parameters."""
        for parameter in self._parameters:
            parameter.grad = None


class Gradients:
    """The gradients of one optimizer's parameters on one rank.

    A sharded model's are those of FSDP; others lie in a `GradientBuffer` for each parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
        self._optimizer, self._sharded = optimizer, sharded
        self._buffers: dict[str, GradientBuffer] = {}
        """by parameter group"""

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def zero(self) -> None:
        """Zero all gradients."""
        if self._sharded:
            self._optimizer.zero_grad(set_to_none=True)
            return
        for group in self._groups:
            buffer = self._buffers.get(group["name"])
            if buffer is None:
                buffer = self._buffers[group["name"]] = GradientBuffer(group["params"])
            buffer.attach()

    def pending(self) -> bool:
        """Whether gradients were added up since they were zeroed."""
        if self._sharded:
            return any(one.grad is not None for group in self._groups for one in group["params"])
        return any(bool(buffer.flat.any()) for buffer in self._buffers.values())

    def drop(self) -> None:
        """Free the gradients' memory; call `zero` before the next backward pass."""
        self._buffers.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def release_buffers(self) -> None:
        """Forget the buffers, whose memory is on the device that the model leaves."""
        self._buffers.clear()

    def rebuild_buffers(self) -> None:
        """Copy the gradients that the parameters have into new buffers."""
        if self._sharded:
            return
        self._buffers = {group["name"]: GradientBuffer(group["params"]) for group in self._groups}
        for buffer in self._buffers.values():
            buffer.collect()

    def clip(
        self, model: nn.Module, max_norm: float | None, factor: float, scaler: LossScaler
    ) -> float:
        """Unscale, multiply by ``factor`` and clip to ``max_norm``; return the norm before.

        Gradients of frozen parameter groups are removed first. Collective where sharded. ``model``
        is the one with these parameters.
        """
        frozen = [group for group in self._groups if group["frozen"]]
        if not self._sharded:
            return self._clip_buffers({group["name"] for group in frozen}, max_norm, factor, scaler)
        for group in frozen:
            for parameter in group["params"]:
                parameter.grad = None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _rescale(gradients, factor, scaler)
        return _clip_sharded(model, max_norm)

    def _clip_buffers(
        self, frozen: set[str], max_norm: float | None, factor: float, scaler: LossScaler
    ) -> float:
        trained = [buffer for name, buffer in self._buffers.items() if name not in frozen]
        for name in frozen:
            self._buffers[name].detach()
        for buffer in trained:
            buffer.collect()
        flats = [buffer.flat for buffer in trained]
        _rescale(flats, factor, scaler)
        norm = math.hypot(*(torch.linalg.vector_norm(flat).item() for flat in flats))
        if max_norm is not None and max_norm < norm < math.inf:
            for flat in flats:
                flat.mul_(max_norm / (norm + 1e-6))
        return norm


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Reduce gradients over the ranks after the backward passes inside, or only add them up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, FullyShardedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def _rescale(gradients: Sequence[Tensor], factor: float, scaler: LossScaler) -> None:
    scaler.unscale(gradients)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def _clip_sharded(model: nn.Module, max_norm: float | None) -> float:
    limit = float("inf") if max_norm is None else max_norm
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(limit))
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
