"""`TrainRayActor`: the base of the actors of a training group. A plain actor of Ray, whose methods
block.

::

    rank 0 is made  -->  listens at a free port  -->  its address and port to the other ranks
    meet (all ranks)     what the others are called, to ask Ray for those that are lost
    init (all ranks)     they meet there
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rlinf_async.runtime.ray.interfaces import interface_of
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.session import own_address
from rlinf_async.runtime.ray.training.ranks import Peer


class TrainRayActor(ABC):
    """One rank of a training group.

    Args:
        world_size: number of ranks.
        rank: of this one, from 0.
        master_addr: address of rank 0; None on rank 0 itself.
        master_port: its port; None on rank 0, which listens at a free one.
    """

    train_parallel_config: dict[str, int]
    """``dp_size``: between how many ranks a rollout is divided; set by `init`"""

    def __init__(
        self,
        world_size: int,
        rank: int,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        self.world_size, self.rank = world_size, rank
        self.rollout_manager: Any = None
        self.peers: Sequence[Peer] = ()
        if master_addr is None or master_port is None:
            master_addr, master_port = _listen()
        self.master_addr, self.master_port = master_addr, master_port
        os.environ.update(
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
            WORLD_SIZE=str(world_size),
            RANK=str(rank),
            LOCAL_RANK=str(self.local_device() or 0),
        )
        interface = interface_of(own_address())
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface:
                os.environ.setdefault(variable, interface)

    def place(self) -> tuple[str, int]:
        """Return where this rank is: Ray's identifier of the node, and its process."""
        return str(of_ray().get_runtime_context().get_node_id()), os.getpid()

    def meet(self, peers: Sequence[Peer]) -> None:
        """Take the ranks of the group, in order."""
        self.peers = peers

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return where the ranks meet."""
        return self.master_addr, self.master_port

    @property
    def rendezvous(self) -> str:
        """Where the ranks meet, as torch's ``init_method``."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"

    def local_device(self) -> int | None:
        """Return the number of this rank's accelerator among those that its process sees; None
        without one.

        With NOSET_VISIBLE_DEVICES the process sees all of its host, else its own alone.
        """
        given = [str(one) for one in of_ray().get_runtime_context().get_accelerator_ids()["GPU"]]
        if not given:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return int(given[0])
        return [one.strip() for one in visible.split(",")].index(given[0])

    @abstractmethod
    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Build what this rank trains; return the next rollout."""

    @abstractmethod
    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Free the device's memory of ``"weights"``, ``"optimizer"``, or both (None)."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take them back."""

    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any) -> Any:
        """Train on one rollout."""

    @abstractmethod
    def save_model(self, step_id: int) -> Any:
        """Write the checkpoint after a rollout."""

    @abstractmethod
    def update_weights(self) -> Any:
        """Give the engines the present weights."""

    @abstractmethod
    def connect_actor_critic(self, critic: Any) -> None:
        """Pair this rank of an actor with the critic of the same rank."""

    @abstractmethod
    def _get_parallel_config(self) -> dict[str, int]:
        """Return how a rollout is divided between the ranks."""

    @abstractmethod
    def clear_memory(self) -> None:
        """Give memory that is not in use back to the device."""

    def set_rollout_manager(self, manager: Any) -> None:
        """Take the actor of Ray that has the engines; rank 0 tells it how rollouts are divided."""
        self.rollout_manager = manager
        if self.rank == 0:
            told = manager.set_train_parallel_config.remote(self._get_parallel_config())
            of_ray().get(told)


def _listen() -> tuple[str, int]:
    """Listen at a free port of this host, where nobody else can come in between."""
    from rlinf_async.workers.collective import listen_for_ranks

    found = urlsplit(listen_for_ranks(own_address()))
    return str(found.hostname), int(found.port or 0)
