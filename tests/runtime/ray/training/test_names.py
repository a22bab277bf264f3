"""The names that people who come from slime know, with their arguments."""

from __future__ import annotations

import inspect

import pytest

from rlinf_async.runtime.ray.training import (
    FSDPTrainRayActor,
    MegatronTrainRayActor,
    RayTrainGroup,
    TrainRayActor,
)

GROUP = {
    "__init__": ["args", "num_nodes", "num_gpus_per_node", "pg", "num_gpus_per_actor", "role"],
    "async_init": ["args", "role", "with_ref"],
    "async_train": ["rollout_id", "rollout_data_ref"],
    "save_model": ["step_id"],
    "update_weights": [],
    "onload": ["tags"],
    "offload": ["tags"],
    "clear_memory": [],
    "connect": ["critic_group"],
    "set_rollout_manager": ["manager"],
}
ACTOR = {
    "init": ["args", "role", "with_ref"],
    "sleep": ["tags"],
    "wake_up": ["tags"],
    "train": ["rollout_id", "rollout_data_ref"],
    "save_model": ["step_id"],
    "update_weights": [],
    "connect_actor_critic": ["critic"],
    "_get_parallel_config": [],
}


def arguments(cls: type[object], method: str) -> list[str]:
    """Those of a method, without Ray's own, which it adds to a class that was made an actor."""
    names = [*inspect.signature(getattr(cls, method)).parameters][1:]
    return [name for name in names if not name.startswith("_ray_")]


def test_a_group_takes_what_it_took_there() -> None:
    assert {name: arguments(RayTrainGroup, name) for name in GROUP} == GROUP


@pytest.mark.parametrize("cls", [TrainRayActor, FSDPTrainRayActor, MegatronTrainRayActor])
def test_an_actor_takes_what_it_took_there(cls: type[TrainRayActor]) -> None:
    assert {name: arguments(cls, name) for name in ACTOR} == ACTOR
    assert ACTOR.keys() <= TrainRayActor.__abstractmethods__
    assert inspect.isabstract(cls) == (cls is TrainRayActor)
