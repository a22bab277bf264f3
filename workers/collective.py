"""torch.distributed for the ranks of one worker group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rlinf_async.workers.context import WorkerContext
from rlinf_async.workers.errors import BuildError

JOIN_LIMIT = timedelta(minutes=5)


def join(context: WorkerContext) -> None:
    """Join this worker's process group; blocks until every rank has joined.

    Raises:
        BuildError: the group was launched without ``collective=...``.
    """
    info = context.info
    if info.collective is None:
        raise BuildError(
            f"{info.name} asks for torch.distributed, but its group was launched without it: "
            'pass collective="gloo" (CPU) or collective="nccl" (GPU) to launch()'
        )
    from torch import distributed

    distributed.init_process_group(
        info.collective,
        init_method=info.rendezvous,
        rank=info.rank,
        world_size=info.world_size,
        timeout=JOIN_LIMIT,
    )
    context.joined = True


class GroupStore:
    """Bytes by key that all ranks of a group share: the store of their process group.

    Args:
        prefix: of all keys.
    """

    def __init__(self, prefix: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self._store = PrefixStore(prefix, _get_default_store())

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        content: Any = value  # a str by its signature; bytes will do
        self._store.set(key, content)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None while it has none."""
        return self._store.get(key) if self._store.check([key]) else None


def leave(context: WorkerContext) -> None:
    """Leave the process group, if this worker joined it. Others in the process are left alone."""
    if not context.joined:
        return
    from torch import distributed

    context.joined = False
    if distributed.is_initialized():
        distributed.destroy_process_group()
