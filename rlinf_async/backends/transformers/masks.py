"""Additive attention masks ``[rows, 1, new, seen]``: 0, or the lowest number where masked.

The library takes a mask of four dimensions as it is. A model with layers of several kinds (some
look at a window only) takes one for each kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.families import LAYER_KINDS

Masks = Tensor | dict[str, Tensor]


def layer_kinds(config: Any) -> list[str]:
    """Return the kinds of layers that a model has, as its configuration names them.

    Raises:
        ValueError: it has layers that do not attend to keys and values (recurrent ones).
    """
    kinds: list[str] = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in LAYER_KINDS]
    if unknown:
        raise ValueError(
            f"the model ({config.model_type}) has layers of kind {unknown}; the transformers "
            f"engine supports {list(LAYER_KINDS)} only: use the vllm engine"
        )
    if kinds:
        return kinds
    return ["sliding_attention" if _window(config) else "full_attention"]


def make_masks(config: Any, kinds: list[str], at: Tensor, width: int, dtype: torch.dtype) -> Masks:
    """Mask what comes later, and what lies outside the window.

    Args:
        config: of the model.
        kinds: of its layers.
        at: ``[rows, new]`` (rows may be 1): the position of each query token.
        width: positions of keys.
        dtype: of the model.
    """
    seen = torch.arange(width, device=at.device)
    look = seen <= at[:, None, :, None]
    masks = {}
    for kind in kinds:
        window = _window(config) if kind == "sliding_attention" else None
        within = look if window is None else look & (seen > at[:, None, :, None] - window)
        masks[kind] = torch.zeros(within.shape, dtype=dtype, device=at.device).masked_fill_(
            ~within, torch.finfo(dtype).min
        )
    return masks if len(masks) > 1 else masks[kinds[0]]


def _window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
