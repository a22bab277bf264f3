"""The process groups of one rank: of all that were launched, and of the first n that are active.

One group serves all collectives of the active ranks. Its order is that in which they hold shards
(`order_of`), since the mesh of a model depends on it. A second group, in the order of the ranks,
would cost its connections (with NCCL, memory) and could break alone; of the collectives, only
`ranks.all_gather` depends on the order in the group, and it returns tensors by rank.

Every rank makes every group, at the same place of the program, also those it is not in: torch
counts them. They are kept, because making one costs connections.

State is moved in a group of its own: `TransferGroup`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from rlinf_async.backends.rescale import TransferGroup
from rlinf_async.parallel import nested_order

TRAINING_LIMIT = timedelta(minutes=5)
"""of one collective of the model"""


def order_of(ranks: int) -> tuple[int, ...]:
    """Return the active ranks in the order of the shards that they hold.

    That is `nested_order`, which moves few rows when the number of ranks changes, where torch can
    make a group in that order, as 2.13 can; else the order of their numbers.
    """
    return nested_order(ranks) if _can_order() else tuple(range(ranks))


class Groups:
    """Groups of the first n of ``launched`` ranks. None stands for torch's default group.

    They are never replaced: torch remembers the group of a mesh by its ranks.
    """

    def __init__(self, launched: int) -> None:
        self.launched = launched
        self._active: dict[int, dist.ProcessGroup | None] = {1: None, launched: None}
        self.transfer = TransferGroup()

    def launch(self) -> dist.ProcessGroup | None:
        """Return the group in which all launched ranks train a model that can be rescaled.

        Collective. Torch's default group where `order_of` is the order of their numbers; else a new
        one.
        """
        order = order_of(self.launched)
        if order != tuple(range(self.launched)):
            self._active[self.launched], failed = _made(order, TRAINING_LIMIT)
            if failed is not None:
                raise failed
        return self._active[self.launched]

    @property
    def sizes(self) -> list[int]:
        """Numbers of active ranks for which there is a group."""
        return list(self._active)

    def prepare(self, size: int, *, known: bool) -> None:
        """Make the group of the first ``size`` ranks, if it is missing. Collective.

        ``known``: all ranks have that size in `sizes`. Raises the `RuntimeError` of torch when a
        rank cannot be reached; another attempt may be made.
        """
        if known:
            return
        self._active[size], failed = _made(order_of(size), TRAINING_LIMIT)
        if failed is not None:
            del self._active[size]
            raise failed

    def active(self, size: int) -> dist.ProcessGroup | None:
        """Return the group of the first ``size`` ranks, which was prepared."""
        return self._active[size]


def _made(
    ranks: Sequence[int], limit: timedelta
) -> tuple[dist.ProcessGroup | None, RuntimeError | None]:
    # A failure is raised later: all ranks have to ask for the same number of groups.
    # Where this rank is not in the group, torch returns a number that its collectives know.
    ordered: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    try:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=limit, **ordered)), None
    except RuntimeError as error:
        return None, error


def _can_order() -> bool:
    """Whether torch can make a group with its ranks in another order than that of their numbers.

    With TorchComms it cannot.
    """
    if getattr(getattr(dist, "config", None), "use_torchcomms", False):
        return False
    return "sort_ranks" in inspect.signature(dist.new_group).parameters
