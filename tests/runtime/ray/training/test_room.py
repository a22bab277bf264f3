"""A group whose bundles others hold says so, and starts nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_async.runtime.ray.training import RayTrainGroup, create_placement_group, placement
from rlinf_async.workers.errors import BuildError
from tests.runtime.ray.training.kit import args

pytestmark = pytest.mark.xdist_group("ray")


def actors(ray: Any) -> list[str]:
    """The actors of Ray that live."""
    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]


def test_a_second_group_on_the_same_bundle_is_told_who_holds_it(ray: Any) -> None:
    pg = create_placement_group(1)
    first = RayTrainGroup(args(), 1, 1, pg)
    before = actors(ray)
    with pytest.raises(BuildError) as refused:
        RayTrainGroup(args(), 1, 1, pg, role="critic")
    for part in (
        r"critic[0] asks for 1 CPU of bundle 0",
        "which has 1 CPU, of which actor[0] holds 1 CPU",
        "num_gpus_per_actor=0.4",
    ):
        assert part in str(refused.value)
    assert actors(ray) == before
    first.shutdown()
    again = RayTrainGroup(args(), 1, 1, pg, role="critic")  # what has just ended makes room
    again.shutdown()
    ray.util.remove_placement_group(pg.group)


def test_a_bundle_that_is_too_small_is_refused(ray: Any) -> None:
    group = ray.util.placement_group([{"CPU": 0.5}])
    with pytest.raises(BuildError, match=r"actor\[0\] asks for 1 CPU, but bundle 0 .* is of 0.5"):
        RayTrainGroup(args(), 1, 1, (group, [0], [""]))
    both = r"actor\[0\] and actor\[1\] ask for 0.4 CPU each, but bundle 0 .* is of 0.5"
    with pytest.raises(BuildError, match=both):
        RayTrainGroup(args(), 1, 2, (group, [0, 0], ["", ""]), num_gpus_per_actor=0.4)
    for bundle in (-1, 1):
        with pytest.raises(ValueError, match=f"bundle {bundle} of rank 0 is none of the placement"):
            RayTrainGroup(args(), 1, 1, (group, [bundle], [""]))
    assert actors(ray) == []
    ray.util.remove_placement_group(group)


@pytest.mark.parametrize(("bundles", "during"), [(64, "log.warning"), (2, "_ordered")])
def test_an_interrupted_reservation_leaves_no_placement_group(
    ray: Any, monkeypatch: pytest.MonkeyPatch, bundles: int, during: str
) -> None:
    """While it waits for bundles that there are not, and while it looks them up."""

    def left() -> set[str]:
        table = ray.util.placement_group_table()
        return {name for name, one in table.items() if one["state"] != "REMOVED"}

    def interrupted(*given: Any) -> None:
        assert len(left()) == len(before) + 1
        raise KeyboardInterrupt

    before = left()
    monkeypatch.setattr(f"{placement.__name__}.{during}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_placement_group(bundles)
    assert left() == before
