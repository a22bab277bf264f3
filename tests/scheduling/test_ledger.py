"""A device has one holder at most, whatever is asked of the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.scheduling import DeviceLedger, DeviceTaken, Loan


def ledger(devices: int = 4) -> DeviceLedger:
    return DeviceLedger({n: n // 2 for n in range(devices)})


def test_a_device_is_not_given_out_twice() -> None:
    one = ledger()
    one.take("actor", [0, 1])
    with pytest.raises(DeviceTaken, match="b cannot hold device 1: actor holds it"):
        one.take("b", [2, 1])
    assert one.held_by("b") == ()
    assert one.free == (2, 3)


def test_an_unknown_or_lost_device_or_one_named_twice_is_refused() -> None:
    one = ledger()
    one.lose(3)
    with pytest.raises(DeviceTaken, match="there is none of this number"):
        one.take("a", [7])
    with pytest.raises(DeviceTaken, match="it is lost"):
        one.take("a", [3])
    with pytest.raises(DeviceTaken, match="twice"):
        one.take("a", [0, 0])
    one.found(3)
    one.take("a", [3])
    assert one.holder(3) == "a"


def test_what_is_given_back_goes_to_its_lender() -> None:
    one = ledger()
    one.take("actor", [0, 1])
    one.lend("actor", "rollout[4]", [1], until="half of iteration 3")
    assert one.held_by("actor") == (0,)
    assert one.loans() == (
        Loan(device=1, lender="actor", borrower="rollout[4]", until="half of iteration 3"),
    )
    with pytest.raises(DeviceTaken, match="device 0 is not on loan"):
        one.give_back("rollout[4]", [0])
    assert one.give_back("rollout[4]") == (1,)
    assert one.held_by("actor") == (0, 1)
    assert one.loans() == ()


def test_what_somebody_else_holds_cannot_be_lent_or_released() -> None:
    one = ledger()
    one.take("a", [0])
    with pytest.raises(DeviceTaken, match="a holds it"):
        one.lend("b", "c", [0], until="later")
    with pytest.raises(DeviceTaken, match="b cannot release device 0: a holds it"):
        one.release("b", [0])


def test_holdings_change_all_at_once_or_not_at_all() -> None:
    one = ledger()
    one.assign({"actor": [0, 1], "r": [2, 3]})
    one.assign({"actor": [], "r": [0, 1, 2, 3]}, until="end")
    assert [loan.device for loan in one.loans()] == [0, 1]
    with pytest.raises(DeviceTaken, match="actor cannot hold device 0: r holds it"):
        one.assign({"actor": [0]})
    assert one.held_by("r") == (0, 1, 2, 3)
    one.assign({"actor": [0, 1], "r": [2, 3]})
    assert one.loans() == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "release", "lend", "back", "assign", "lose", "found"]),
            st.sampled_from("abc"),
            st.sampled_from("abc"),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=30,
    )
)
def test_no_program_breaks_it(steps: list[tuple[str, str, str, list[int]]]) -> None:
    one = ledger(5)
    for what, who, other, devices in steps:
        before = (one.holdings(), one.loans(), one.free)
        try:
            match what:
                case "take":
                    one.take(who, devices)
                case "release":
                    one.release(who, devices)
                case "lend":
                    one.lend(who, other, devices, until="later")
                case "back":
                    one.give_back(who, devices)
                case "assign":
                    one.assign({who: devices}, until="later")
                case "lose":
                    one.lose(devices[0] if devices else 0)
                case _:
                    one.found(devices[0] if devices else 0)
        except DeviceTaken:
            assert (one.holdings(), one.loans(), one.free) == before
        held = [device for each in one.holdings() for device in each.devices]
        known = {*range(5), 5} if 5 in one.lost else set(range(5))
        assert sorted([*held, *one.free, *(set(one.lost) & known)]) == sorted(known)
        assert all(one.holder(loan.device) == loan.borrower for loan in one.loans())
