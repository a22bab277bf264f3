"""The process group in which state is moved from one strategy to another.

No model computes in it: a timeout while waiting for a rank breaks the connections of the group in
which that happened, and training must not depend on it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist


class TransferGroup:
    """A group of all launched ranks. Every rank makes it at the same place of the program."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._limit = timedelta(0)

    def prepare(self, limit: timedelta) -> RuntimeError | None:
        """Make the group, if it is missing or has another limit. Collective.

        Returns torch's error when a rank cannot be reached, for the caller to raise when it has
        made all other groups: torch counts them. Another attempt may be made.
        """
        if self.group is not None and self._limit == limit:
            return None
        self.forget()
        self._limit = limit
        everyone = list(range(dist.get_world_size()))
        try:
            self.group = cast(dist.ProcessGroup, dist.new_group(everyone, timeout=limit))
        except RuntimeError as error:
            return error
        return None

    def forget(self) -> None:
        """Destroy the group, which may be broken; `prepare` makes another. On all ranks."""
        broken, self.group = self.group, None
        if broken is not None:
            dist.destroy_process_group(broken)
