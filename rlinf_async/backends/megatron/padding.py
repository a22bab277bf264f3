"""The embedding of the padding token learns nothing, as in the models of transformers.

Their embeddings are made with ``padding_idx``: that row begins at 0 and gets no gradient. The norm
behind it would make a large one of it, should the token ever be in a sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FrozenPadding:
    """A hook of the embedding: hidden states of the padding token pass no gradient on."""

    def __init__(self, token: int, tensor_ranks: dist.ProcessGroup) -> None:
        self._token = token
        self._group = tensor_ranks

    def __call__(
        self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        """``output`` is ``[S, B, D]``, or this tensor rank's part of the tokens."""
        ids: Tensor = named["input_ids"] if "input_ids" in named else inputs[0]
        padding = (ids == self._token).t()
        if len(padding) != len(output):
            part = dist.get_rank(self._group)
            padding = padding[part * len(output) : (part + 1) * len(output)]
        return torch.where(padding[..., None], output.detach(), output)
