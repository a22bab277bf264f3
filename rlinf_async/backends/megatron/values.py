"""The value head of a critic, where Megatron's model has its output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """One output, which begins at 0.

    Every tensor rank has the whole head and computes the same values, so its gradients need no sum.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        """whether the hidden states are cut over tensor ranks: they are gathered before"""
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, Any]:
        """Return ``[N, 1, 1]`` of ``[N, 1, D]``, as Megatron's output layer returns logits."""
        return nn.functional.linear(hidden, self.weight, self.bias), None
