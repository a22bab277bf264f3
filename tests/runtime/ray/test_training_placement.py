"""A training group on several hosts with (unreal) accelerators."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_async.runtime.ray.training import RayTrainGroup, create_placement_group
from rlinf_async.workers.base import BuildError
from tests.runtime.ray.kit import Hosts
from tests.runtime.ray.training.kit import args

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def ray(hosts: Hosts) -> Iterator[Any]:
    """This process, connected to the hosts."""
    library: Any = importlib.import_module("ray")
    library.init(address=hosts.address, logging_level=logging.ERROR, log_to_driver=False)
    yield library
    library.shutdown()


def variables(*names: str) -> list[str | None]:
    """Of the process of a rank."""
    import os

    return [os.environ.get(name) for name in names]


def test_bundles_are_ordered_by_host_and_device_and_ranks_know_their_own(ray: Any) -> None:
    pg = create_placement_group(4)
    assert sorted(pg.bundle_indices) == [0, 1, 2, 3]
    assert pg.gpu_ids == ["0", "1", "0", "1"]
    group = RayTrainGroup(args(debug_rollout_only=True), 2, 2, pg, num_gpus_per_actor=0.5)
    try:
        ray.get(group.async_init())
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"
        found = ray.get(
            [one.__ray_call__.remote(lambda _: variables(*names)) for one in group.actors]
        )
        _, port = ray.get(group.actors[0].get_master_addr_and_port.remote())
        # Ray hides no devices (NOSET_VISIBLE_DEVICES), and LOCAL_RANK is the rank's own.
        assert found == [[str(at), "4", pg.gpu_ids[at], None, str(port)] for at in range(4)]
    finally:
        group.shutdown()
    with pytest.raises(BuildError, match=r"9 bundles of 1 GPU was not free within 1 s: of 3 hosts"):
        create_placement_group(9, wait=1.0)
