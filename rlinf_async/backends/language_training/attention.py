"""Attention inside each sample of a packed row, registered with transformers as ``NAME``.

A sample's tokens attend to that sample's earlier tokens only. One call of PyTorch's fused attention
for each sample: no mask is built, and no work is done for pairs of tokens of different samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "rlinf_async_packed"


def register() -> None:
    """Register ``attn_implementation=NAME`` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sample_lengths: list[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ``[1, T, heads, D]`` from query ``[1, heads, T, D]``, key and value with fewer heads.

    ``sample_lengths`` sum to ``T``; without them the row is one sample. Raises
    `NotImplementedError` for parts of some models' attention that are not implemented here.
    """
    _check_plain(others)
    lengths = sample_lengths or [query.shape[2]]
    parts = []
    samples = (torch.split(one, lengths, 2) for one in (query, key, value))
    for q, k, v in zip(*samples, strict=True):
        mask = _window(q.shape[2], sliding_window, q.device)
        parts.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return whole.transpose(1, 2), None


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    # transformers counts the token itself.
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - window)


def _check_plain(others: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"this model's attention uses {name!r}, which packed attention does not implement"
            )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return None: samples are separated by their lengths, not by a mask."""
