"""Runs on three hosts, one of which is killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.on_hosts.hosts import NAMES, Hosts, three_hosts
from tests.jobs.on_hosts.kills import perform
from tests.jobs.on_hosts.plan import Kill, Plan
from tests.jobs.on_hosts.runs import Observer
from tests.net.hosts import NotAllowed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts."""
    try:
        with three_hosts() as made:
            yield made
    except NotAllowed as error:
        pytest.skip(f"three hosts are not allowed here: {error}")


@pytest.fixture(scope="module")
def observer(hosts: Hosts) -> Iterator[Observer]:
    """It asks Ray."""
    with Observer(hosts) as made:
        yield made


@pytest.fixture(autouse=True)
def all_run(hosts: Hosts, observer: Observer) -> None:
    """All hosts do."""
    for name in NAMES:
        if name not in hosts:
            hosts.start(name)
    observer.until_alive(*NAMES)


@pytest.mark.parametrize(
    ("name", "restarts"),
    [("rollout", 2), ("actor", 0)],
    ids=["a_host_of_env_and_rollout_workers", "the_host_of_the_actor"],
)
def test_a_run_loses_nothing_when_a_host_is_killed_which_is(
    name: str, restarts: int, hosts: Hosts, observer: Observer
) -> None:
    """Placement by host, one error where the actor's host is lost, `--resume`, every trajectory
    trained once, and nothing left: see `kills.perform`."""
    victim = "gamma" if name == "rollout" else "beta"
    kill = Kill(after=3, moment=0.0, what="host", name=victim)
    plan = Plan(seed=0, kind="embodied", trainer="beta", placed=True, kills=(kill,))
    done = perform(plan, hosts, observer, hosts.folder / name)
    assert done.wrong == []
    assert done.codes == ([0] if restarts else [1, 0])
    assert done.restarts == restarts
