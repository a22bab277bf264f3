from __future__ import annotations

import pytest

from rlinf_async.algorithms.advantages import advantage_functions
from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.algorithms.losses import loss_functions
from rlinf_async.config.registry import Registry, UnknownName


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
