"""The devices of scheduled runs, on stated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_async.config import ConfigError
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.jobs.language.backends import layout_of, options, placed, plan_roles
from rlinf_async.runtime.jobs.language.schedulable import check_scheduler
from rlinf_async.runtime.jobs.language.scheduling import topology
from rlinf_async.runtime.launching import Ranks, stated_devices
from tests.jobs.language.test_placement import config

SCHEDULED = {
    "scheduler__policy": "tail",
    "training__prompts": "24",
    "training__group_size": "4",
    "actor__global_batches": "2",
    "cluster__backend": "process",
    "rollout__backend": "vllm",
}


@pytest.mark.parametrize(
    ("machine", "settings", "actor", "instances"),
    [
        ("4xcpu", {"cluster__rollout_workers": "3"}, (0, 3, 2), ((1,), (2,), (3,))),
        (
            "4xH100",
            {"cluster__actors": "1", "cluster__rollout_workers": "3"},
            (0, 3, 2),
            ((1,), (2,), (3,)),
        ),
        (
            "8xH100",
            {
                "cluster__actors": "2",
                "cluster__rollout_workers": "3",
                "cluster__placement__rollout__devices_per_worker": "2",
            },
            (0, 1, 6, 7, 4, 5),
            ((2, 3), (4, 5), (6, 7)),
        ),
        (
            "8xH100",
            {
                "actor__backend": "megatron",
                "actor__tp": "2",
                "cluster__actors": "2",
                "cluster__rollout_workers": "4",
            },
            (0, 1, 5, 4),
            ((2,), (3,), (4,), (5,)),
        ),
        (
            "2x2xH100",
            {"cluster__actors": "1", "cluster__rollout_workers": "3"},
            (0, 3, 2),
            ((1,), (2,), (3,)),
        ),
    ],
    ids=str,
)
def test_actors_are_launched_on_their_devices_and_those_of_the_last_rollout_workers(
    tmp_path: Path,
    machine: str,
    settings: dict[str, str],
    actor: tuple[int, ...],
    instances: tuple[tuple[int, ...], ...],
) -> None:
    asked = config(tmp_path, **SCHEDULED, **settings)
    plan = plan_roles(asked, stated_devices(machine))
    found = placed(asked, plan)
    check_scheduler(found, plan)
    layout = layout_of(found, plan)
    assert (layout.actor, layout.instances) == (actor, instances)
    placement = options("actor", layout, plan, {})["placement"]
    if machine == "4xcpu":
        assert placement is None
    else:
        assert placement == Ranks([(device,) for device in actor])
        assert found.rollout.vllm.sleep is True  # a worker that stops frees its devices' memory
    tp = found.actor.tp
    home = Strategy(dp=found.data_ranks, tp=tp)
    seen = topology(layout, found.iteration_samples, 4, home, (1, 2))
    assert seen.strategies == (Strategy(dp=1, tp=tp), Strategy(dp=2, tp=tp))
    hosts = [seen.hosts[device] for device in sorted(seen.hosts)]
    assert hosts == ([0, 0, 1, 1] if machine.startswith("2x2") else [0] * len(hosts))


@pytest.mark.parametrize(
    ("devices", "guests", "homes"),
    [("1", "2", ((0,), (1,))), ("2", "1", ((0, 1),))],
)
def test_guests_are_launched_on_devices_of_the_actors(
    tmp_path: Path, devices: str, guests: str, homes: tuple[tuple[int, ...], ...]
) -> None:
    settings = {
        "cluster__actors": "2",
        "cluster__rollout_workers": "2",
        "cluster__placement__rollout__devices_per_worker": devices,
        "scheduler__guests": guests,
    }
    asked = config(tmp_path, **SCHEDULED, **settings)
    plan = plan_roles(asked, stated_devices("8xH100"))
    found = placed(asked, plan)
    check_scheduler(found, plan)
    layout = layout_of(found, plan)
    own = tuple(plan.ranks["rollout"])
    assert layout.instances == (*own, *homes)
    assert options("rollout", layout, plan, {})["placement"] == Ranks([*own, *homes])
    assert found.rollout_ranks == len(layout.instances)


def test_a_guest_on_devices_of_two_hosts_is_refused(tmp_path: Path) -> None:
    settings = {
        "cluster__actors": "4",
        "cluster__rollout_workers": "2",
        "cluster__placement__rollout__devices_per_worker": "2",
        "scheduler__guests": "2",
    }
    asked = config(tmp_path, **SCHEDULED, **settings)
    plan = plan_roles(asked, stated_devices("3x3xH100"))
    with pytest.raises(ConfigError, match=r"devices \[2, 3\] of the actors, which are on several"):
        check_scheduler(placed(asked, plan), plan)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster__placement": "collocated"}, "rollout and actor workers share devices"),
        ({"cluster__placement__actor": "cpu"}, "rollout workers have accelerators and the other"),
        (
            {"cluster__placement__rollout__devices_per_worker": "0.5"},
            "several rollout workers share a device",
        ),
        ({"rollout__vllm__sleep": "false"}, "has to free their memory, and sleep is false"),
        (
            {"scheduler__guests": "2"},
            "devices could be lent: use no more than 1",
        ),
    ],
)
def test_devices_that_cannot_move_are_refused(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    counts = {"cluster__rollout_workers": "2", "cluster__actors": "1"}
    asked = config(tmp_path, **SCHEDULED, **counts, **settings)
    plan = plan_roles(asked, stated_devices("4xH100"))
    with pytest.raises(ConfigError, match=message):
        check_scheduler(placed(asked, plan), plan)
