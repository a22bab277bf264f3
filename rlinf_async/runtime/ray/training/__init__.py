"""A training group as users of slime know it: plain actors of Ray that train one model.

::

    driver            RayTrainGroup ----------------- calls of Ray ----------------+
                                                                                   v
    actor of Ray, one for each rank   FSDPTrainRayActor or   --> GroupActor | GroupCritic
                                      MegatronTrainRayActor      (our FSDPActor, FSDPCritic)

    args.py     what a group is told: settings of our trainers, rollout data, checkpoints
    group.py    `RayTrainGroup`: bundles by host and device, and whether they have room
    actor.py    `TrainRayActor`, `FSDPTrainRayActor`, `MegatronTrainRayActor`; device memory asleep
    worker.py   a rank of ours: our actor, our critic
    ranks.py    ranks that find one another; an event loop in a thread
    pairs.py    pairs of actor and critic: channels between actors of Ray
    engine.py   an engine as an actor of Ray, and the weights' way to it
"""

from rlinf_async.runtime.ray.training.actor import (
    FSDPTrainRayActor,
    MegatronTrainRayActor,
    TrainRayActor,
)
from rlinf_async.runtime.ray.training.args import RolloutData, RolloutDataError, TrainArgs
from rlinf_async.runtime.ray.training.engine import RolloutEngineActor
from rlinf_async.runtime.ray.training.group import (
    OrderedPlacementGroup,
    RayTrainGroup,
    Refs,
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
