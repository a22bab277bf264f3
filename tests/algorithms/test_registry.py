from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_async.algorithms.advantages import advantage_functions
from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.algorithms.losses import loss_functions
from rlinf_async.config.registry import Registry, UnknownName
from rlinf_async.rewards import register_verifier


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(UnknownName, match=r"no advantage is called 'gaee'; did you mean 'gae'\?"):
        advantage_functions["gaee"]


def test_the_error_lists_every_known_name() -> None:
    table: Registry[int] = Registry("number")
    table.register("one")(1)
    table.register("two")(2)
    with pytest.raises(UnknownName) as caught:
        table["zzz"]
    assert caught.value.known == ["one", "two"]
    assert "known: 'one', 'two'" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_the_same_name_cannot_be_taken_twice() -> None:
    table: Registry[int] = Registry("number")
    table.register("one")(1)
    with pytest.raises(ValueError, match="'one' is registered already"):
        table.register("one")(2)


def test_a_built_in_name_cannot_be_taken() -> None:
    """Processes that did not register it would go on to find the built-in part."""
    with pytest.raises(ValueError, match="a verifier called 'exact' is registered already"):
        register_verifier("exact")(lambda answer: 1.0)


def test_what_a_module_registers_anew_is_found_from_then_on() -> None:
    table: Registry[Callable[[], int]] = Registry("number")

    _load(table, 1)
    assert table.named("one")() == 1
    _load(table, 2)
    assert table.named("one")() == 2


def _load(table: Registry[Callable[[], int]], number: int) -> None:
    def one() -> int:
        return number

    one.__qualname__ = "one"  # as a module that is loaded again defines it
    table.register("one")(one)


def test_the_built_in_names_are_there() -> None:
    assert "gae" in advantage_functions
    assert loss_functions.names() == ["ppo"]


@pytest.mark.parametrize("field", ["gamma", "gae_lambda"])
def test_a_discount_outside_zero_to_one_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 1.5"):
        AdvantageConfig(**{field: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "number"),
    [("clip_low", 1.0), ("clip_high", 0.0), ("dual_clip", 1.0), ("value_clip", -1.0)],
)
def test_a_clip_range_that_makes_no_sense_is_refused(field: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {number}"):
        LossConfig(**{field: number})  # type: ignore[arg-type]
