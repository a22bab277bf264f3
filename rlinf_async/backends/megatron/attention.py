"""Attention inside each sample of a packed row, as a core attention of Megatron's layers.

Transformer Engine's attention does this on GPUs. Without it, one call of PyTorch's fused attention
for each sample: no mask is built, and no work is done for pairs of tokens of different samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(nn.Module):
    """Causal attention over ``[T, heads, D]`` with fewer heads of key and value."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._dropout = float(config.attention_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Tensor:
        """Return ``[T, heads x D]``; the bounds of the samples are in ``packed_seq_params``."""
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        parts = []
        samples = (torch.split(one, lengths) for one in (query, key, value))
        for q, k, v in zip(*samples, strict=True):
            found = scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                dropout_p=self._dropout if self.training else 0.0,
                scale=self._scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(found.transpose(0, 1))
        return torch.cat(parts).flatten(1)
