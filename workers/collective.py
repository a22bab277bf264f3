"""torch.distributed for the ranks of one worker group."""

from __future__ import annotations

from datetime import timedelta

from rlinf_async.workers.context import WorkerInfo
from rlinf_async.workers.errors import BuildError

JOIN_LIMIT = timedelta(minutes=5)


def join(info: WorkerInfo) -> None:
    """Join this group's process group; blocks until every rank is there.

    Raises:
        BuildError: the group was launched without ``collective=...``.
    """
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


def leave() -> None:
    """Leave the process group, if one was joined."""
    import sys

    if "torch.distributed" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
