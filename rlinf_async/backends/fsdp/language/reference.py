"""Weights kept on the CPU, under a name, that the model can be switched to.

::

    actor ----backup----> kept[tag]      ref, old_actor, rollout_actor
    live model <--switch-- kept[tag]     the actor's own are kept meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf_async.backends.fsdp.errors import FSDPError
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import local_shard

REFERENCE = "ref"
ACTOR = "actor"
"""the weights that are trained"""


class KeptWeights:
    """This rank's part of copies of a model's weights, by tag.

    The manager holds them, so that they move when the number of ranks changes. While another tag
    is active, the weights that are trained are one of the copies: training, checkpoints and
    publishing have to switch back to `ACTOR` first.
    """

    def __init__(self, manager: FSDPModelManager) -> None:
        self._manager = manager
        self.active = ACTOR
        """tag of the weights in the model"""

    @property
    def tags(self) -> list[str]:
        """Tags of the copies that are kept."""
        return list(self._manager.kept)

    def backup(self, tag: str) -> None:
        """Keep a copy of the weights that are trained under a tag."""
        self.copy(ACTOR, tag)

    def copy(self, source: str, target: str) -> None:
        """Keep the weights of one tag under another, too. Raises `FSDPError` for an unknown tag."""
        found = self._live() if source == self.active else self._kept(source)
        self._manager.kept[target] = _copies(found)

    def of(self, tag: str) -> Mapping[str, Tensor]:
        """Return this rank's part of the weights kept under a tag."""
        return self._kept(tag)

    def put(self, tag: str, shards: Mapping[str, Tensor]) -> None:
        """Keep what `of` returned on the same rank of as many."""
        self._manager.kept[tag] = dict(shards)

    def keep(self, tag: str, other: FSDPModelManager) -> None:
        """Keep the weights of another model of the same shape and sharding."""
        theirs = KeptWeights(other)._live()
        mine = self._live()
        shapes, wanted = _shapes(theirs), _shapes(mine)
        differing = sorted(name for name, _ in shapes.items() ^ wanted.items())
        if differing:
            name = differing[0]
            raise FSDPError(
                f"the weights for {tag!r} are of another model: {name} is "
                f"{shapes.get(name, 'not')} there and {wanted.get(name, 'not')} here"
            )
        self._manager.kept[tag] = _copies(theirs)

    def switch(self, tag: str) -> None:
        """Put the weights of a tag into the model. Raises `FSDPError` for an unknown tag."""
        if tag == self.active:
            return
        found = self._kept(tag)
        self._manager.settle_checkpoint()
        if self.active == ACTOR:
            self.backup(ACTOR)
        _copy(found, self._live())
        self.active = tag
        if tag == ACTOR:
            del self._manager.kept[ACTOR]  # they are in the model again

    @contextmanager
    def swapped_in(self, tag: str = REFERENCE) -> Iterator[None]:
        """Switch to a tag for the block, and back after it."""
        before = self.active
        self.switch(tag)
        try:
            yield
        finally:
            self.switch(before)

    def _kept(self, tag: str) -> Mapping[str, Tensor]:
        if tag not in self._manager.kept:
            raise FSDPError(
                f"no weights are kept as {tag!r}; there are: {', '.join(self.tags) or 'none'}"
            )
        return self._manager.kept[tag]

    def _live(self) -> dict[str, Tensor]:
        parameters = self._manager.model.named_parameters()
        return {name: local_shard(one).detach() for name, one in parameters}


def _copies(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in shards.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, one in target.items():
            one.copy_(source[name])


def _shapes(shards: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in shards.items()}
