"""`Pairing`: the pair that a rank of a training group is in, seen from this rank.

::

    actor   connect --ticket, first rollout--> link   critic
    each    begin a step, on its own side: see `critics`
"""

from __future__ import annotations

from typing import Any

from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.training.critic_worker import GroupCritic
from rlinf_async.runtime.ray.training.critics import (
    ActorSide,
    ActorStep,
    CriticSide,
    CriticStep,
    PairTicket,
    from_peer,
)
from rlinf_async.runtime.ray.training.loop import LoopThread
from rlinf_async.runtime.ray.training.worker import GroupRank


class Pairing:
    """The pair of this rank, on whichever side; none at first, and one at a time.

    Args:
        loop: of this process.
        worker: the rank.
    """

    def __init__(self, loop: LoopThread, worker: GroupRank) -> None:
        self._loop, self._worker = loop, worker
        self._side: ActorSide | CriticSide | None = None
        self._step = 0
        """the last one of the pair"""

    def connect(self, critic: Any) -> None:
        """On an actor: pair it with the critic of the same rank, whose handle this is.

        Raises `ValueError`: the critic would begin at another rollout, or has other ranks.
        """
        worker = self._worker
        name = f"critic[{worker.rank}]"
        side = self._loop.run(ActorSide.open(worker.args, worker.data_rank, worker.name, name))
        try:
            of_ray().get(critic.link_actor.remote(side.ticket, worker.start_rollout_id))
        except BaseException:
            self._loop.run(side.close())
            raise
        self._replace(side)

    def link(self, ticket: PairTicket, start_rollout_id: int) -> None:
        """On a critic: open its side of a pair.

        Raises `ValueError`: the actor begins at another rollout, or has other ranks.
        """
        worker = self._worker
        if not isinstance(worker, GroupCritic):
            raise ValueError(
                f"{worker.name} is no rank of a critic: connect() is a method of the actor's group"
            )
        theirs, mine = ticket.data_rank, worker.data_rank
        if theirs != mine:
            raise ValueError(
                f"{worker.name} trains share {mine.rank} of {mine.size} of a rollout, but the "
                f"actor of the same rank share {theirs.rank} of {theirs.size}: give both groups "
                "the same backend, tensor_model_parallel_size and pipeline_model_parallel_size"
            )
        if start_rollout_id != worker.start_rollout_id:
            raise ValueError(
                f"the actor begins at rollout {start_rollout_id}, but the critic at "
                f"{worker.start_rollout_id}: load and critic_load must be of the same rollout"
            )
        self._replace(self._loop.run(CriticSide.open(ticket, worker.args, worker.name)))

    def begin(self, step: int | None, rollout_id: int) -> ActorStep | CriticStep | None:
        """Begin a step of the pair, None: the next; return None where this rank trains alone.

        Raises `PeerFailed`: the other side is lost, or further already.
        """
        self._step = self._step + 1 if step is None else step
        if rollout_id < self._worker.args.num_critic_only_steps:
            return None
        match self._side:
            case ActorSide() as actor:
                return self._loop.run(actor.begin(self._step))
            case CriticSide() as critic:
                doing = f"{self._worker.name} cannot train rollout {rollout_id}"
                return self._loop.run(from_peer(critic.peer, doing, critic.begin(self._step)))
            case None:
                return None

    def _replace(self, side: ActorSide | CriticSide) -> None:
        """Take the place of a pair that there was before."""
        former, self._side, self._step = self._side, side, 0
        if former is not None:
            self._loop.run(former.close())
