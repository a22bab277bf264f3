"""Channels between two hosts: two network namespaces, a good cable and a bad one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.net.badcable import bad_cable
from tests.net.hosts import Hosts, NotAllowed, good_cable, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts without a cable."""
    try:
        with two_hosts() as made:
            yield made
    except NotAllowed as error:
        pytest.skip(f"two hosts are not allowed here: {error}")


def test_the_channel_suite_runs_between_two_hosts(hosts: Hosts) -> None:
    good_cable(hosts)
    done = hosts.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.net.over_hosts",
        "-k", "hosts-uvloop", "tests/channels", "--ignore=tests/channels/wire",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100


def test_nothing_is_lost_over_20_ms_of_delay_and_1_percent_of_loss(hosts: Hosts) -> None:
    with bad_cable(hosts, seconds=0.02, loss=0.01) as cable:
        done = hosts.run("-m", "tests.net.far_talk")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything arrived once" in done.stdout
    seconds = re.search(r"round trip (\d\.\d+) s", done.stdout)
    assert seconds is not None
    assert float(seconds[1]) >= 0.04
    assert cable.lost > 0


def test_a_cable_that_is_pulled_for_a_while_costs_nothing(hosts: Hosts) -> None:
    with bad_cable(hosts, seconds=0.001, loss=0.0):
        done = hosts.run("-m", "tests.net.far_talk", "--reset")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything arrived once" in done.stdout
    cuts = re.search(r"(\d+) cuts", done.stdout)
    assert cuts is not None
    assert int(cuts[1]) >= 3
