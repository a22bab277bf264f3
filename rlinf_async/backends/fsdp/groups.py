"""The process groups of one rank: of all that were launched, and of the first n that are active.

Every rank makes every group, at the same place of the program, also those it is not in: torch
counts them. They are kept, because making one costs connections.

The group in which state travels is none of those in which the model computes. A rank that was
waited for in vain breaks the connections of the group in which that happened: training must not
depend on it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist

TRAINING_LIMIT = timedelta(minutes=5)
"""of one collective of the model"""


class Groups:
    """Groups of the first n of ``launched`` ranks. None stands for torch's default group."""

    def __init__(self, launched: int) -> None:
        self.launched = launched
        self._active: dict[int, dist.ProcessGroup | None] = {1: None, launched: None}
        self._transfer: dist.ProcessGroup | None = None
        self._limit = timedelta(0)

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
            self._active[size], failed = _made(list(range(size)), TRAINING_LIMIT)
        if self._transfer is None or self._limit != limit:
            self.forget_transfer()
            self._transfer, second = _made(list(range(self.launched)), limit)
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
    ranks: list[int], limit: timedelta
) -> tuple[dist.ProcessGroup | None, RuntimeError | None]:
    # A failure is kept for later: all ranks have to ask for the same number of groups.
    # Where this rank is not in it, torch's stand-in is a number, which collectives know.
    try:
        return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=limit)), None
    except RuntimeError as error:
        return None, error
