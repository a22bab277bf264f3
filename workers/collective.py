"""torch.distributed for the ranks of one worker group."""

from __future__ import annotations

from datetime import timedelta

from rlinf_async.workers.context import WorkerContext
from rlinf_async.workers.errors import BuildError

JOIN_LIMIT = timedelta(minutes=5)


def join(context: WorkerContext) -> None:
    """Join this worker's process group; blocks until every rank is there.

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


def leave(context: WorkerContext) -> None:
    """Leave the process group, if this worker joined it; somebody else's is left alone."""
    if not context.joined:
        return
    from torch import distributed

    context.joined = False
    if distributed.is_initialized():
        distributed.destroy_process_group()
