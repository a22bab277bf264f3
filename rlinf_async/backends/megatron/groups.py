"""The process groups of one rank, whatever the strategy: each set of ranks has one, made once.

Every launched rank makes every group, at the same place of the program, also those it is not in:
torch counts them. They are kept, because making one costs connections, and the groups of a strategy
that was rolled back are there for the next attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from rlinf_async.backends.rescale import TransferGroup

AFTER_A_FAILURE = timedelta(seconds=0.1)
"""limit of the other groups once one could not be made: they are only counted then"""


class Key(NamedTuple):
    """Which group."""

    ranks: tuple[int, ...]
    objects: bool = False
    """over gloo, for what is no tensor: its messages never meet those of stages"""


class Groups:
    """Groups by their ranks."""

    def __init__(self) -> None:
        self._made: dict[Key, dist.ProcessGroup] = {}
        self.transfer = TransferGroup()

    @property
    def known(self) -> list[Key]:
        """The groups that this rank has made."""
        return list(self._made)

    def make(
        self,
        keys: Iterable[Key],
        known: Collection[Key] = (),
        limit: timedelta = default_pg_timeout,
    ) -> None:
        """Make groups. Collective over all launched ranks.

        Args:
            keys: in the same order on all ranks.
            known: those that every rank has.
            limit: how long one may take.

        Raises the `RuntimeError` of torch when a rank cannot be reached, after all were asked for;
        another attempt may be made.
        """
        failed: RuntimeError | None = None
        for key in dict.fromkeys(keys):
            if key in known:
                continue
            options: dict[str, Any] = {"backend": "gloo"} if key.objects else {}
            limit = limit if failed is None else AFTER_A_FAILURE
            try:
                made: Any = dist.new_group(list(key.ranks), timeout=limit, **options)
            except RuntimeError as error:
                failed = failed or error
                self._made.pop(key, None)
                continue
            self._made[key] = made
            if limit != default_pg_timeout and dist.get_rank() in key.ranks:
                _set_pg_timeout(default_pg_timeout, made)
        if failed is not None:
            raise failed

    def of(self, key: Key) -> dist.ProcessGroup:
        """Return a group that was made."""
        return self._made[key]
