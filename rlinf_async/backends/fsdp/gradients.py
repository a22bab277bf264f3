"""All gradients of a parameter group in one piece of memory.

Measuring and scaling the gradient is then one call for the whole group, instead of one for each
tensor: for a tiny policy that is a tenth of the update.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


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
        """Copy in gradients that somebody made outside of the buffer."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def detach(self) -> None:
        """Take the gradients away, so that an optimizer passes these parameters over."""
        for parameter in self._parameters:
            parameter.grad = None
