"""Which devices each rank gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.runtime import Packed, Placement, Ranks, Spread
from rlinf_async.workers import BuildError, Device

FOUR = tuple(Device("cuda", index) for index in range(4))


def assigned(placement: Placement, count: int) -> list[tuple[int, ...]]:
    return [tuple(device.index for device in of) for of in placement.assign(count, FOUR)]


@pytest.mark.parametrize(
    ("placement", "count", "devices"),
    [
        (Packed(), 3, [(0,), (1,), (2,)]),
        (Packed(start=2), 2, [(2,), (3,)]),
        (Packed(devices=2), 2, [(0, 1), (2, 3)]),
        (Packed(devices=0.5), 5, [(0,), (0,), (1,), (1,), (2,)]),
        (Packed(devices=0.25, start=3), 4, [(3,), (3,), (3,), (3,)]),
        (Packed(devices=0.3), 4, [(0,), (0,), (0,), (1,)]),
        (Packed(devices=0.7), 3, [(0,), (1,), (2,)]),
        (Spread(), 1, [(0,)]),
        (Spread(), 2, [(0,), (2,)]),
        (Spread(), 3, [(0,), (1,), (2,)]),
        (Spread(), 4, [(0,), (1,), (2,), (3,)]),
        (Ranks([0, 0, 3]), 3, [(0,), (0,), (3,)]),
        (Ranks([[0, 1], [2, 3]]), 2, [(0, 1), (2, 3)]),
        (Ranks([1, [2, 3]]), 2, [(1,), (2, 3)]),
    ],
    ids=str,
)
def test_ranks_are_placed(placement: Placement, count: int, devices: list[tuple[int, ...]]) -> None:
    assert assigned(placement, count) == devices


@pytest.mark.parametrize(
    ("placement", "count", "message"),
    [
        (
            Packed(),
            5,
            r"Packed\(devices=1, start=0\) for 5 workers needs 5 devices, but .* 4 \(cud",
        ),
        (Packed(devices=2), 3, "needs 6 devices, but this host has 4"),
        (Packed(devices=0.5), 9, "needs 5 devices"),
        (Packed(devices=1.5), 1, r"whole number, or a fraction up to 1, got 1\.5"),
        (Packed(devices=0), 1, "got 0"),
        (Packed(start=-1), 1, r"asks for device -1: devices are numbered from 0"),
        (Spread(), 5, r"Spread\(\) for 5 workers needs 5 devices, but this host has 4"),
        (Ranks([0, 1]), 3, "lists devices for 2 ranks, but count=3"),
        (Ranks([0, 4]), 2, "needs 5 devices, but this host has 4"),
        (Ranks([0, -2]), 2, "asks for device -2"),
        (Ranks([[0], []]), 2, "gives a worker no device"),
    ],
    ids=str,
)
def test_a_placement_that_does_not_fit_says_what_is_missing(
    placement: Placement, count: int, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        placement.assign(count, FOUR)


def test_a_host_without_devices_places_nobody() -> None:
    for placement in (Packed(), Spread(), Ranks([0])):
        with pytest.raises(BuildError, match=r"this host has 0 \(no\)"):
            placement.assign(1, ())


@given(share=st.floats(0.05, 1.0), count=st.integers(1, 12))
def test_no_device_is_shared_beyond_its_whole(share: float, count: int) -> None:
    many = tuple(Device("cuda", index) for index in range(12))
    placed = Packed(devices=share).assign(count, many)
    for device in many:
        assert sum(device in of for of in placed) * share <= 1 + 1e-6
