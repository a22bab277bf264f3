"""Weights kept on the CPU that replace the model's for a while: the reference policy's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import local_shard

REFERENCE = "reference"


class KeptWeights:
    """This rank's part of a copy of a model's present weights.

    The manager holds it, so that it moves when the number of ranks changes.
    """

    def __init__(self, manager: FSDPModelManager) -> None:
        self._manager = manager
        manager.kept[REFERENCE] = _copies(self._live())

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the kept weights into the model for the block, and its own back after it."""
        live = self._live()
        own = _copies(live)
        _copy(self._manager.kept[REFERENCE], live)
        try:
            yield
        finally:
            _copy(own, live)

    def _live(self) -> dict[str, Tensor]:
        parameters = self._manager.model.named_parameters()
        return {name: local_shard(one).detach() for name, one in parameters}


def _copies(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.cpu().clone() for name, one in shards.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, one in target.items():
            one.copy_(source[name])
