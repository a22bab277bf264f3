"""Which devices each role gets, on stated machines. No accelerator is needed to know."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.config import ConfigError, MissingDevice
from rlinf_async.config.counts import MOST_WORKERS
from rlinf_async.runtime.jobs.embodied.settings import EmbodiedClusterConfig, EmbodiedPlacement
from rlinf_async.runtime.jobs.placement import PlacementPlan, Preset, Role, RolePlacement, make_plan
from rlinf_async.runtime.launching import stated_devices

PRESETS: list[Preset] = ["auto", "disaggregated", "collocated", "hybrid"]
HYBRID = (("actor", "critic"), ("rollout",))


def plan(
    machine: str,
    *,
    counts: dict[str, int | None] | None = None,
    preset: Preset = "auto",
    node_groups: dict[str, tuple[str, ...]] | None = None,
    **asked: str | RolePlacement,
) -> PlacementPlan:
    """The plan of actors (as many as divide 12), rollout workers and one reward worker."""
    count = {"actor": None, "rollout": None, "reward": 1} | (counts or {})
    roles = [
        Role(
            name=name,
            count=count[name],
            asked=asked.get(name, ""),
            takes_turns=name != "reward",
            one_device=name in ("actor", "critic"),
            accelerated=name != "reward",
            fits=(lambda n: 12 % n == 0) if name == "actor" else (lambda n: True),
        )
        for name in ("actor", "critic", "rollout", "reward")
        if name in count
    ]
    return make_plan(
        roles,
        stated_devices(machine),
        preset=preset,
        hybrid=HYBRID,
        node_groups=node_groups,
    )


TWO_EACH = RolePlacement(devices_per_worker=2)
HALF = RolePlacement(devices_per_worker=0.5)


@pytest.mark.parametrize(
    ("machine", "settings", "actor", "rollout", "turns"),
    [
        ("2xcpu", {}, [()], [()], False),
        ("2xcpu", {"preset": "collocated"}, [()], [()], True),
        ("2xcpu", {"rollout": "shared with actor"}, [()], [()], True),
        ("4xcpu", {"actor": "0-1", "rollout": "3"}, [(0,), (1,)], [(3,)], False),
        ("1xH100", {}, [(0,)], [(0,)], True),
        ("2xH100", {}, [(0,)], [(1,)], False),
        ("4xH100", {"preset": "collocated"}, "0-3", "0-3", True),
        ("5xH100", {"preset": "collocated"}, "0-3", "0-4", True),
        ("8xH100", {}, "0-3", "4-7", False),
        ("8xH100", {"actor": "7"}, [(7,)], "0-6", False),
        ("8xH100", {"rollout": "all", "actor": "0-2"}, "0-2", "0-7", True),
        ("8xH100", {"rollout": "cpu"}, "0-5", [()], False),
        ("8xH100", {"rollout": TWO_EACH}, "0-3", [(4, 5), (6, 7)], False),
        ("4xH100", {"rollout": HALF}, "0-1", [(2,), (2,), (3,), (3,)], False),
        ("8xH100", {"counts": {"actor": 2}}, "0-1", "2-7", False),
        ("8xH100", {"counts": {"actor": 6, "rollout": 2}}, "0-5", "6-7", False),
        ("2x2xH100", {"actor": "host1", "rollout": "host0:1"}, [(2,), (3,)], [(1,)], False),
        (
            "3x2xH100",
            {"actor": "old", "node_groups": {"old": ("host0", "host2")}},
            [(0,), (1,), (4,), (5,)],
            [(2,), (3,)],
            False,
        ),
        ("2x2xH100", {"actor": "old:1", "node_groups": {"old": ("host0", "host1")}},
         [(1,), (3,)], [(0,), (2,)], False),
    ],
    ids=str,
)  # fmt: skip
def test_every_worker_gets_its_devices(
    machine: str,
    settings: dict[str, Any],
    actor: str | list[tuple[int, ...]],
    rollout: str | list[tuple[int, ...]],
    turns: bool,
) -> None:
    found = plan(machine, **settings)
    assert found.ranks["actor"] == listed(actor)
    assert found.ranks["rollout"] == listed(rollout)
    assert found.ranks["reward"] == [()]
    assert found.shared("actor", "rollout") is turns
    assert {row.in_turns for row in found.rows() if row.role == "rollout"} == {turns}


def listed(ranks: str | list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """``"0-2"`` as the devices of three ranks."""
    if not isinstance(ranks, str):
        return ranks
    first, last = map(int, ranks.split("-"))
    return [(at,) for at in range(first, last + 1)]


@pytest.mark.parametrize(
    ("machine", "settings", "error"),
    [
        ("8xH100", {"actor": "0-9"}, r"actor: device 9 is not there: the machine has 8 \(cuda\)"),
        ("8xH100", {"actor": "0-3,2"}, "'0-3,2' names device 2 twice"),
        ("8xH100", {"actor": "3-1"}, "'3-1' is no range of devices"),
        ("8xH100", {"actor": "host0"}, "'host0' is neither .* there is this one alone"),
        ("2x8xH100", {"actor": "hots0"}, r"did you mean 'host0'\?\): there are host0, host1"),
        ("2x8xH100", {"actor": "host0:8"}, "device 8 is not there: host0 has 8"),
        ("8xH100", {"actor": "shared with rolout"}, r"no role 'rolout' .*did you mean 'rollout'"),
        (
            "8xH100",
            {"actor": "shared with rollout", "rollout": "shared with actor"},
            "actor, which shares with rollout, which shares with actor: give one of them devices",
        ),
        ("8xH100", {"actor": TWO_EACH}, "each actor worker uses one device"),
        (
            "8xH100",
            {"reward": "shared with actor", "counts": {"reward": 0}},
            "this run has no reward workers: say in .cluster. how many",
        ),
        (
            "8xH100",
            {"rollout": "0-1", "counts": {"rollout": 3}},
            r"3 workers with 1 devices each need 3, but rollout has 2 \(0, 1\)",
        ),
        (
            "2x3xH100",
            {"rollout": RolePlacement(devices="all", devices_per_worker=2), "actor": "cpu"},
            "worker 1 would have devices of several hosts .host0:2, host1:0.",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_met_is_named(
    machine: str, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        plan(machine, **settings)
    assert caught.value.path[:2] == ("cluster", "placement")


def test_too_few_devices_say_who_needs_how_many_and_who_holds_the_rest() -> None:
    with pytest.raises(MissingDevice, match=r"2 devices are needed \(actor 1, rollout 1\), but 1"):
        plan("1xH100", preset="disaggregated")
    with pytest.raises(MissingDevice, match=r"rollout 1\), but 0 of 8 .*settings: actor 8"):
        plan("8xH100", actor="all", counts={"actor": 6})


def test_a_hybrid_shares_among_those_that_train() -> None:
    found = plan("8xH100", preset="hybrid", counts={"actor": 4, "critic": 4, "rollout": None})
    assert found.ranks["critic"] == found.ranks["actor"] == listed("0-3")
    assert found.ranks["rollout"] == listed("4-7")
    assert found.shared("actor", "critic")
    assert not found.shared("actor", "rollout")


def test_memory_is_shared_by_those_that_hold_it_at_the_same_time() -> None:
    turns = plan("2xH100", preset="collocated", reward="shared with actor")
    shares = {(row.role, row.rank): row.memory_share for row in turns.rows()}
    assert shares["actor", 0] == shares["rollout", 0] == 0.5  # the other beside the reward worker
    assert shares["actor", 1] == shares["rollout", 1] == 1.0
    assert turns.memory_share("rollout") == 0.5
    assert plan("2xH100", rollout=HALF).memory_share("rollout") == 0.5


def test_a_large_cluster_is_planned_without_going_through_all_for_each() -> None:
    machine = stated_devices("1024x8xH100")
    looked = 0

    class Counted(list[tuple[int, ...]]):
        def __iter__(self) -> Iterator[tuple[int, ...]]:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    roles = [Role(name="actor", count=1), Role(name="rollout", count=None)]
    found = make_plan(roles, machine)
    assert found.count("rollout") == MOST_WORKERS  # no run has more
    found.ranks["rollout"] = Counted(found.ranks["rollout"])
    assert len(list(found.rows())) == MOST_WORKERS + 1
    assert looked <= 10 * MOST_WORKERS


def test_what_nobody_uses_is_named() -> None:
    assert [str(one) for one in plan("8xH100", actor="0", rollout="1-5").unused] == [
        "cuda:6",
        "cuda:7",
    ]
    assert plan("4xcpu").unused == []


@given(
    hosts=st.integers(1, 4),
    each=st.integers(1, 8),
    preset=st.sampled_from(PRESETS),
    actors=st.none() | st.integers(1, 12),
    rollouts=st.none() | st.integers(1, 12),
    share=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
)
def test_no_device_is_given_beyond_its_whole_and_the_plan_of_its_own_numbers_is_the_same(
    hosts: int,
    each: int,
    preset: Preset,
    actors: int | None,
    rollouts: int | None,
    share: float,
) -> None:
    wanted = RolePlacement(devices_per_worker=share)

    def planned(counts: dict[str, int | None]) -> PlacementPlan:
        return plan(f"{hosts}x{each}xH100", preset=preset, counts=counts, rollout=wanted)

    try:
        found = planned({"actor": actors, "rollout": rollouts})
    except (ConfigError, MissingDevice):
        return
    for role, of_each in (("actor", 1.0), ("rollout", share)):
        used = [at for rank in found.ranks[role] for at in rank]
        assert all(used.count(at) * min(of_each, 1.0) <= 1.0 for at in used)
        assert all(len(rank) == max(1, of_each) for rank in found.ranks[role])
    if preset == "disaggregated":
        assert not found.shared("actor", "rollout")
    assert actors in (None, found.count("actor"))
    assert rollouts in (None, found.count("rollout"))
    again = planned({role: found.count(role) for role in ("actor", "rollout")})
    assert again.ranks == found.ranks
    assert again.together == found.together


def test_a_role_is_launched_with_its_own_variables_resources_and_environment() -> None:
    robot = RolePlacement(
        resources={"robot": 1.0}, env_vars={"A": "own"}, runtime_env={"py_executable": "python"}
    )
    found = plan("2xcpu", rollout=robot, counts={"rollout": 1})
    assert found.options("rollout", {"A": "all", "B": "all"}) == {
        "placement": None,
        "env_vars": {"A": "own", "B": "all"},
        "resources": {"robot": 1.0},
        "runtime_env": {"py_executable": "python"},
    }
    assert found.options("actor", {"B": "all"}) == {
        "placement": None,
        "env_vars": {"B": "all"},
        "resources": None,
        "runtime_env": None,
    }


@pytest.mark.parametrize("name", ["resources", "runtime_env"])
def test_what_only_ray_has_is_refused_for_processes(name: str) -> None:
    asked = RolePlacement(**{name: {"robot": 1}})  # type: ignore[arg-type]
    placement = EmbodiedPlacement(env=asked)
    with pytest.raises(ConfigError, match="only Ray's hosts have any") as refused:
        EmbodiedClusterConfig(placement=placement)
    assert refused.value.path == ("cluster", "placement", "env", name)
    assert EmbodiedClusterConfig(placement=placement, backend="ray").placement is placement


@pytest.mark.parametrize("each", [0.0, -1.0, 1.5, math.inf, math.nan])
def test_devices_per_worker_are_a_whole_number_or_a_fraction_up_to_1(each: float) -> None:
    with pytest.raises(ValueError, match=f"devices_per_worker is {each}; it must be a whole"):
        RolePlacement(devices_per_worker=each)


@pytest.mark.parametrize("amount", [0.0, -1.0, 1.5, math.inf, math.nan])
def test_an_amount_of_a_resource_is_checked_with_the_settings(amount: float) -> None:
    with pytest.raises(ValueError, match=f"resources: 'robot' is {amount}; an amount"):
        RolePlacement(resources={"robot": amount})
