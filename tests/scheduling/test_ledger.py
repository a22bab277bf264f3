"""A device has one holder at most, whatever is asked of the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.scheduling import DeviceLedger, DeviceLoan, DeviceTaken


def ledger(devices: int = 4) -> DeviceLedger:
    """Half of the devices are the actor's, the others have no owner."""
    owners = dict.fromkeys(range(devices // 2), "actor")
    return DeviceLedger({n: n // 2 for n in range(devices)}, owners)


def test_a_device_is_not_given_out_twice() -> None:
    one = ledger()
    one.take("actor", [0, 1])
    assert one.can_take("b", [2, 3])
    assert not one.can_take("b", [2, 1])
    with pytest.raises(DeviceTaken, match="b cannot hold device 1: actor holds it"):
        one.take("b", [2, 1])
    assert one.held_by("b") == ()
    assert one.free == (2, 3)


def test_an_unknown_or_lost_device_or_one_named_twice_is_refused() -> None:
    one = ledger()
    one.lose(3)
    assert not one.can_take("a", [3])
    assert not one.can_take("a", [7])
    with pytest.raises(DeviceTaken, match="there is none of this number"):
        one.take("a", [7])
    with pytest.raises(DeviceTaken, match="it is lost"):
        one.take("a", [3])
    with pytest.raises(DeviceTaken, match="twice"):
        one.take("a", [0, 0])
    one.found(3)
    one.take("a", [3])
    one.lose(3)
    one.found(3)
    with pytest.raises(DeviceTaken, match="a holds it"):  # it may not know that it was lost
        one.take("b", [3])


def test_who_holds_the_device_of_another_has_borrowed_it() -> None:
    one = ledger()
    one.take("actor", [0])
    one.take("rollout[4]", [1, 2], until="half of iteration 3")
    assert one.loans() == (
        DeviceLoan(device=1, lender="actor", borrower="rollout[4]", until="half of iteration 3"),
    )
    assert one.keep("rollout[4]", [2]) == (1,)
    assert one.loans() == ()
    assert one.can_take("actor", [0, 1])


def test_what_somebody_else_holds_cannot_be_released() -> None:
    one = ledger()
    one.take("a", [0])
    with pytest.raises(DeviceTaken, match="b cannot release device 0: a holds it"):
        one.release("b", [0])
    assert one.keep("b", []) == ()
    assert one.held_by("a") == (0,)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "release", "keep", "lose", "found"]),
            st.sampled_from(["actor", "b", "c"]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=30,
    )
)
def test_no_program_breaks_it(steps: list[tuple[str, str, list[int]]]) -> None:
    one = ledger(5)
    for what, who, devices in steps:
        before = (one.holdings(), one.loans(), one.free)
        could = one.can_take(who, devices) and len(set(devices)) == len(devices)
        try:
            match what:
                case "take":
                    one.take(who, devices)
                    assert could
                case "release":
                    one.release(who, devices)
                case "keep":
                    one.keep(who, devices)
                case "lose":
                    one.lose(devices[0] if devices else 0)
                case _:
                    one.found(devices[0] if devices else 0)
        except DeviceTaken:
            assert (one.holdings(), one.loans(), one.free) == before
            assert what == "release" or not could
        held = [device for each in one.holdings() for device in each.devices]
        assert len(held) == len(set(held))
        assert {*held, *one.free, *one.lost} >= set(range(5))
        assert set(one.free).isdisjoint([*held, *one.lost])
        assert all(one.holder(loan.device) == loan.borrower != loan.lender for loan in one.loans())
