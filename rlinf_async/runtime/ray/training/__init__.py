"""A training group as users of slime know it: plain actors of Ray that train one model.

::

    driver            RayTrainGroup ----------------- calls of Ray ----------------+
                                                                                   v
    actor of Ray, one for each rank   FSDPTrainRayActor or   --> GroupActor | GroupCritic
                                      MegatronTrainRayActor      (our FSDPActor, FSDPCritic)

    args.py         what a group is told          settings.py     as settings of our trainers
    data.py         rollout data                  placement.py    bundles by host and device
    group.py        `RayTrainGroup`               worker.py       a rank of ours:
    actor.py        `TrainRayActor`               actor_worker.py     our actor
    language_actor.py   what these two share:     critic_worker.py    our critic
    fsdp_actor.py       `FSDPTrainRayActor`       critics.py      pairs of actor and critic
    megatron_actor.py   `MegatronTrainRayActor`   links.py        channels between actors of Ray
    weights.py      their way to the engines      engine.py       an engine as an actor of Ray
    checkpoints.py  where they are                memory.py       of a device that sleeps
    loop.py         an event loop in a thread     room.py         whether bundles have room
"""

from rlinf_async.runtime.ray.training.actor import TrainRayActor
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.data import RolloutData, RolloutDataError
from rlinf_async.runtime.ray.training.engine import RolloutEngineActor
from rlinf_async.runtime.ray.training.fsdp_actor import FSDPTrainRayActor
from rlinf_async.runtime.ray.training.group import RayTrainGroup, Refs
from rlinf_async.runtime.ray.training.megatron_actor import MegatronTrainRayActor
from rlinf_async.runtime.ray.training.placement import (
    OrderedPlacementGroup,
    create_placement_group,
)
from rlinf_async.runtime.ray.training.ranks import PeerFailed

__all__ = [
    "FSDPTrainRayActor",
    "MegatronTrainRayActor",
    "OrderedPlacementGroup",
    "PeerFailed",
    "RayTrainGroup",
    "Refs",
    "RolloutData",
    "RolloutDataError",
    "RolloutEngineActor",
    "TrainArgs",
    "TrainRayActor",
    "create_placement_group",
]
