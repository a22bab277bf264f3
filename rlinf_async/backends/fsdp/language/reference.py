"""Weights kept on the CPU that take the model's place for a while: the reference policy's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlinf_async.backends.fsdp.sharding import local_shard


class KeptWeights:
    """A copy of a model's weights as they are now, this rank's part of them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [local_shard(one).detach().cpu().clone() for one in model.parameters()]

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """The model has the kept weights while the block runs, and its own again after it."""
        live = [local_shard(one).detach() for one in model.parameters()]
        own = [one.cpu().clone() for one in live]
        _copy(self._kept, live)
        try:
            yield
        finally:
            _copy(own, live)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(source, target, strict=True):
            other.copy_(one)
