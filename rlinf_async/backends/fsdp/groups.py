"""The process groups of one rank: of all that were launched, and of the first n that are active.

One group serves all that the active ranks do together. They stand in it in the order in which they
hold shards (`order_of`), since the mesh of a model goes by that. A second group, in the order of
their numbers, would cost its connections (with NCCL, memory) and could break alone; of what is done
in the group, only `ranks.all_gather` goes by places, and it gives back by rank.

Every rank makes every group, at the same place of the program, also those it is not in: torch
counts them. They are kept, because making one costs connections.

The group in which state travels is none of those in which the model computes. A rank that was
waited for in vain breaks the connections of the group in which that happened: training must not
depend on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from rlinf_async.parallel import nested_order

TRAINING_LIMIT = timedelta(minutes=5)
"""of one collective of the model"""


def order_of(ranks: int) -> tuple[int, ...]:
    """Return the active ranks by the shard that they hold.

    Next to what they hold among other numbers of ranks (`nested_order`) where torch can make such a
    group, as 2.13 can; else by their numbers.
    """
    return nested_order(ranks) if _can_order() else tuple(range(ranks))


class Groups:
    """Groups of the first n of ``launched`` ranks. None stands for torch's default group."""

    def __init__(self, launched: int) -> None:
        self.launched = launched
        self._active: dict[int, dist.ProcessGroup | None] = {1: None, launched: None}
        self._transfer: dist.ProcessGroup | None = None
        self._limit = timedelta(0)

    def launch(self) -> dist.ProcessGroup | None:
        """Return the group in which all launched ranks train a model that can move. Collective.

        Torch's default one has them by their numbers; where they stand in another order, it is
        made.
        """
        order = order_of(self.launched)
        if order != tuple(range(self.launched)):
            self._active[self.launched], failed = _made(order, TRAINING_LIMIT)
            if failed is not None:
                raise failed
        return self._active[self.launched]

    @property
    def sizes(self) -> list[int]:
        """The sizes for which this rank is ready."""
        return list(self._active)

    def prepare(self, size: int, limit: timedelta, *, known: bool) -> None:
        """Make what a move to ``size`` ranks needs, if it is not there. Collective.

        ``known``: all ranks have that size in `sizes`. Raises the `RuntimeError` of torch when a
        rank cannot be reached; another attempt may be made.
        """
        failed: RuntimeError | None = None
        if not known:
            self._active[size], failed = _made(order_of(size), TRAINING_LIMIT)
        if self._transfer is None or self._limit != limit:
            self.forget_transfer()
            self._transfer, second = _made(range(self.launched), limit)
            self._limit, failed = limit, failed or second
        if failed is not None:
            if not known:
                del self._active[size]
            raise failed

    def active(self, size: int) -> dist.ProcessGroup | None:
        """Return the group of the first ``size`` ranks, which was prepared."""
        return self._active[size]

    @property
    def transfer(self) -> dist.ProcessGroup | None:
        """The group of all launched ranks in which state travels."""
        return self._transfer

    def forget_transfer(self) -> None:
        """Make the transfer's group anew next time, for it may be broken; on all ranks.

        Groups in which models compute are never made anew: torch remembers for meshes of the same
        ranks which group was theirs.
        """
        broken, self._transfer = self._transfer, None
        if broken is not None:
            dist.destroy_process_group(broken)


def _made(
    ranks: Sequence[int], limit: timedelta
) -> tuple[dist.ProcessGroup | None, RuntimeError | None]:
    # A failure is kept for later: all ranks have to ask for the same number of groups.
    # Where this rank is not in it, torch's stand-in is a number, which collectives know.
    ordered: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    try:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=limit, **ordered)), None
    except RuntimeError as error:
        return None, error


def _can_order() -> bool:
    """Whether torch makes groups in which ranks stand in another order than that of their numbers.

    With TorchComms it cannot.
    """
    if getattr(getattr(dist, "config", None), "use_torchcomms", False):
        return False
    return "sort_ranks" in inspect.signature(dist.new_group).parameters
