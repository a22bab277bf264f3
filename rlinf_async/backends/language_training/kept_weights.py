"""Weights kept on the CPU, under a name, that the model can be switched to.

::

    actor ----backup----> kept[tag]      ref, old_actor, rollout_actor
    live model <--switch-- kept[tag]     the actor's own are kept meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

REFERENCE = "ref"
STEP = "step"
"""the weights that the iteration began with"""
ACTOR = "actor"
"""the weights that are trained"""


class KeptWeightsError(ValueError):
    """There are no weights of that tag, or they are of another model."""


class HoldsWeights(Protocol):
    """A model manager, as far as other weights are concerned."""

    kept: dict[str, dict[str, Tensor]]
    """other weights, by tag and name: this rank's part, on the CPU"""

    def live_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights in the model, by name: the memory itself."""
        ...

    def settle_checkpoint(self) -> None:
        """Return when no checkpoint reads the weights any more."""
        ...


class KeptWeights:
    """This rank's part of copies of a model's weights, by tag.

    The manager holds them, so that they move when the number of ranks changes. While another tag
    is active, the weights that are trained are one of the copies: training, checkpoints and
    publishing have to switch back to `ACTOR` first.
    """

    def __init__(self, manager: HoldsWeights) -> None:
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
        """Keep the weights of one tag under another, too.

        Raises `KeptWeightsError` for an unknown tag.
        """
        found = self._manager.live_weights() if source == self.active else self._kept(source)
        self._manager.kept[target] = _copies(found)

    def drop(self, tag: str) -> None:
        """Free a copy. Raises `KeptWeightsError` for an unknown tag."""
        self._kept(tag)
        del self._manager.kept[tag]

    def of(self, tag: str) -> Mapping[str, Tensor]:
        """Return this rank's part of the weights kept under a tag."""
        return self._kept(tag)

    def put(self, tag: str, shards: Mapping[str, Tensor]) -> None:
        """Keep what `of` returned on the same rank of as many, under the same strategy.

        Raises `KeptWeightsError` where names or shapes are not those of this rank's part.
        """
        self._check_same(tag, shards)
        self._manager.kept[tag] = dict(shards)

    def keep(self, tag: str, other: HoldsWeights) -> None:
        """Keep the weights of another model of the same shape and sharding."""
        theirs = other.live_weights()
        self._check_same(tag, theirs)
        self._manager.kept[tag] = _copies(theirs)

    def _check_same(self, tag: str, theirs: Mapping[str, Tensor]) -> None:
        shapes, wanted = _shapes(theirs), _shapes(self._manager.live_weights())
        differing = sorted(name for name, _ in shapes.items() ^ wanted.items())
        if differing:
            name = differing[0]
            raise KeptWeightsError(
                f"the weights for {tag!r} are of another model: {name} is "
                f"{shapes.get(name, 'not')} there and {wanted.get(name, 'not')} here"
            )

    def switch(self, tag: str) -> None:
        """Put the weights of a tag into the model. Raises `KeptWeightsError` for an unknown tag."""
        if tag == self.active:
            return
        found = self._kept(tag)
        self._manager.settle_checkpoint()
        if self.active == ACTOR:
            self.backup(ACTOR)
        _copy(found, self._manager.live_weights())
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

    def _kept(self, tag: str) -> dict[str, Tensor]:
        if tag not in self._manager.kept:
            raise KeptWeightsError(
                f"no weights are kept as {tag!r}; there are: {', '.join(self.tags) or 'none'}"
            )
        return self._manager.kept[tag]


def _copies(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().to("cpu", copy=True) for name, one in shards.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, one in target.items():
            one.copy_(source[name])


def _shapes(shards: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in shards.items()}
