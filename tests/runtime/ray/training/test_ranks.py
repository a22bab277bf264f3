"""Ranks that are left alone in the middle of a call: their errors name the one that failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_async.runtime.ray.training import PeerFailed, RayTrainGroup, create_placement_group
from rlinf_async.runtime.ray.training import ranks as of_ranks
from tests.runtime.ray.training.kit import args, batch, columns

pytestmark = pytest.mark.xdist_group("ray")


def replace_step(ray: Any, group: RayTrainGroup, rank: int, step: Any) -> None:
    """Make optimizer steps of one rank by a function."""

    def replace(actor: Any) -> None:
        actor._worker._trainer.training_step = step

    ray.get(group.actors[rank].__ray_call__.remote(replace))


def hurry(actor: Any) -> None:
    """Do not wait long for a rank's own end, which does not come here."""
    setattr(of_ranks, "OWN_END_SECONDS", 0.1)  # noqa: B010


def no_room(micro_batches: Any) -> dict[str, float]:
    raise ValueError("no room for activations")


def killed(micro_batches: Any) -> dict[str, float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@contextmanager
def started(ray: Any, ranks: int = 2) -> Iterator[RayTrainGroup]:
    """A group that has begun."""
    group = RayTrainGroup(args(num_steps_per_rollout=1), 1, ranks, create_placement_group(ranks))
    try:
        ray.get(group.async_init())
        ray.get([actor.__ray_call__.remote(hurry) for actor in group.actors])
        yield group
    finally:
        group.shutdown()


def test_a_rank_that_fails_alone_ends_the_call_of_the_other(ray: Any) -> None:
    with started(ray) as group:
        replace_step(ray, group, 1, no_room)
        training = group.async_train(0, columns(batch(0)))
        with pytest.raises(ValueError, match="no room for activations"):
            ray.get(training)
        failed = r"actor\[1\] failed: ValueError: no room for activations"
        with pytest.raises(PeerFailed, match=rf"actor\[0\] cannot train rollout 0: {failed}"):
            ray.get(training[0])
        for method, given in (("save_model", [1]), ("clear_memory", [])):
            with pytest.raises(PeerFailed, match=f"{method}: in an earlier call {failed}"):
                ray.get(getattr(group.actors[0], method).remote(*given))


@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_names_a_rank_that_is_killed(ray: Any, lost: int) -> None:
    with started(ray) as group:
        _, pid = ray.get(group.actors[lost].place.remote())
        replace_step(ray, group, lost, killed)
        training = group.async_train(0, columns(batch(0)))
        how = rf"actor\[{lost}\] \(process {pid} on .*\) is lost: it was killed \(by SIGKILL"
        with pytest.raises(PeerFailed, match=rf"cannot train rollout 0: {how}"):
            ray.get(training[1 - lost])
