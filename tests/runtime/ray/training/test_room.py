"""A group whose bundles others hold says so, and starts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_async.runtime.ray.training import RayTrainGroup, create_placement_group
from rlinf_async.runtime.ray.training import group as placement
from rlinf_async.workers.base import BuildError
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


def reserved(ray: Any) -> set[str]:
    """The placement groups that there are."""
    table = ray.util.placement_group_table()
    return {name for name, one in table.items() if one["state"] != "REMOVED"}


def test_a_pair_as_older_scripts_have_it_will_do(ray: Any) -> None:
    pg = create_placement_group(2)
    group = RayTrainGroup(args(debug_rollout_only=True), 1, 2, (pg.group, pg.bundle_indices))
    assert ray.get(group.async_init()) == [0, 0]
    before = reserved(ray)
    group.shutdown()
    assert reserved(ray) == before  # it was given
    ray.util.remove_placement_group(pg.group)


def test_a_group_makes_its_own_bundles_and_removes_them(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reserved(ray)
    group = RayTrainGroup(args(debug_rollout_only=True), 1, 2, None)
    assert ray.get(group.async_init()) == [0, 0]
    assert len(reserved(ray)) == len(before) + 1
    group.shutdown()
    group.shutdown()
    assert reserved(ray) == before

    def fails(*given: Any) -> None:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(RayTrainGroup, "_introduce", fails)
    with pytest.raises(RuntimeError, match="as the test wants it"):
        RayTrainGroup(args(), 1, 1)
    assert reserved(ray) == before


GROUP = SimpleNamespace(bundle_specs=[{"CPU": 1.0}] * 2)


@pytest.mark.parametrize(
    ("pg", "text"),
    [
        (
            GROUP,
            r"pg is \(SimpleNamespace\); it has to be \(placement group of Ray",
        ),
        ((GROUP,), r"pg is \(SimpleNamespace\); it has to be"),
        ((GROUP, [0], ["0"], 1), r"pg is \(SimpleNamespace, list, list, int\); it has to be"),
        ((GROUP, 0), r"pg is \(SimpleNamespace, int\); it has to be"),
        (([0, 1], GROUP), r"pg is \(list, SimpleNamespace\); it has to be"),
        (7, r"pg is \(int\); it has to be"),
        ("pg", r"pg is \(str, str\); it has to be"),
        ((GROUP, [0]), "2 ranks need 2 bundles, but pg names 1"),
        ((GROUP, [0, 2]), "bundle 2 of rank 1 is none of the placement group, which has 0 to 1"),
        ((GROUP, ["0", "1"]), "bundle 0 of rank 0 is none of"),
    ],
)
def test_what_is_no_placement_group_with_bundles_is_named(pg: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayTrainGroup(args(), 1, 2, pg)


@pytest.mark.parametrize(("bundles", "during"), [(64, "log.warning"), (2, "_ordered")])
def test_an_interrupted_reservation_leaves_no_placement_group(
    ray: Any, monkeypatch: pytest.MonkeyPatch, bundles: int, during: str
) -> None:
    """While it waits for bundles that there are not, and while it looks them up."""

    def interrupted(*given: Any) -> None:
        assert len(reserved(ray)) == len(before) + 1
        raise KeyboardInterrupt

    before = reserved(ray)
    monkeypatch.setattr(f"{placement.__name__}.{during}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_placement_group(bundles)
    assert reserved(ray) == before
