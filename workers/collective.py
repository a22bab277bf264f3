"""torch.distributed for the ranks of one worker group."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from rlinf_async.workers.context import WorkerContext, WorkerInfo
from rlinf_async.workers.errors import BuildError

JOIN_LIMIT = timedelta(minutes=5)

_listening: socket.socket | None = None
"""where rank 0 of a group on several hosts waits for the others; until `join` takes it over"""


def listen_for_ranks(host: str) -> str:
    """Listen in this process, which is to be rank 0, for the other ranks of its group.

    Nobody else can take the port between now and `join`.

    Args:
        host: the address of this host's interface.

    Returns:
        The group's rendezvous, ``tcp://host:port``.
    """
    global _listening
    if _listening is not None:
        _listening.close()
    _listening = socket.create_server((host, 0), family=_family(host), backlog=1024)
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{_listening.getsockname()[1]}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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

    where: dict[str, Any] = {"init_method": info.rendezvous}
    if info.rendezvous.startswith("tcp:"):
        where = {"store": _tcp_store(info)}
    distributed.init_process_group(
        info.collective,
        rank=info.rank,
        world_size=info.world_size,
        timeout=JOIN_LIMIT,
        **where,
    )
    context.joined = True


def _tcp_store(info: WorkerInfo) -> Any:
    """The store of the group: in rank 0, at the port where it listens already."""
    global _listening
    from torch import distributed

    of_torch: Any = distributed  # its names are exported, but not to type checkers
    address = urlsplit(info.rendezvous)
    listening, _listening = _listening, None
    return of_torch.TCPStore(
        str(address.hostname),
        int(address.port or 0),
        info.world_size,
        is_master=info.rank == 0,
        timeout=JOIN_LIMIT,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )


class GroupStore:
    """Bytes by key that all ranks of a group share: the store of their process group.

    Args:
        prefix: of all keys.
        apart: over a connection of its own, which does not wait where torch waits in the store.
    """

    def __init__(self, prefix: str, *, apart: bool = False) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store: Any = _get_default_store()
        self._store = PrefixStore(prefix, store.clone() if apart else store)

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        content: Any = value  # a str by its signature; bytes will do
        self._store.set(key, content)

    def set_first(self, key: str, value: bytes) -> bytes:
        """Set the value of a key that has none; return the one that it has."""
        content: Any = value
        found: bytes = self._store.compare_set(key, "", content)
        return found

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
