"""Values that are plainly as their type says pass in a moment; what looks like them does not."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NewType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from rlinf_async.channels.items import quick_check

Text = NewType("Text", str)
Keyword = msgspec.defstruct("Keyword", [("class", int), ("v", Literal["v"])])


class Ended(msgspec.Struct):
    tokens: NDArray[np.int32]
    reason: Literal["stop", "length"]
    v: Literal[1] | None = None
    name: Text = Text("")


class Percent(msgspec.Struct, frozen=True):
    """Checked when it is made, and it does not change."""

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 100:
            raise ValueError("no percentage")


class Grade(IntEnum):
    BEST = 1


TOKENS = np.zeros(3, np.int32)
LEAST, MOST = -(2**63), 2**64 - 1
BORDERS = sorted(
    at + step for at in (-(2**31), -(2**30), 0, 2**30, 2**31, 2**63) for step in (-1, 0, 1)
)
BORDERS = [LEAST, LEAST + 1, *BORDERS, MOST - 1, MOST]
BEYOND = [LEAST - 1, MOST + 1, 2**70]
ANYTHING: list[Any] = [
    True,
    None,
    1.0,
    "",
    "i",
    b"",
    b"iiii",
    [],
    [1],
    (1,),
    {},
    Grade.BEST,
    TOKENS,
    1j,
    int,
]
QUICK: list[tuple[Any, Any]] = [
    (Ended, Ended(TOKENS, "stop")),
    (Percent, Percent(7)),
    (Ended, Ended(TOKENS, "length", 1, Text("one"))),
    (Literal["a", 1], 1),
    (list[Literal["a", "b"]], ["a", "b", "a"]),
    (dict[Text, Literal[0]], {Text("a"): 0}),
    (Keyword, Keyword(1, "v")),
    (np.ndarray, np.ones(2)),
    (NDArray[np.int32 | np.float64], np.ones(2)),
    (list[int], []),
    (Any, [1, None, {"a": [TOKENS, b"", {1: "é"}]}]),
    (dict, {"a": [True]}),
    *((int, number) for number in BORDERS),
]
NOT_QUICK: list[tuple[Any, Any]] = [
    (Ended, Ended(TOKENS.astype(np.int64), "stop")),  # pyright: ignore[reportArgumentType]
    (Ended, Ended(TOKENS, "other")),  # type: ignore[arg-type]
    (Ended, Ended(TOKENS, "stop", True)),  # type: ignore[arg-type]
    (Literal[1], True),
    (Literal[1], 1.0),
    (Literal["a"], np.str_("a")),
    (Literal["a"], ["a"]),
    (Text, 1),
    (Keyword, Keyword(1, "w")),
    (np.ndarray, np.ones(2, object)),
    (NDArray[np.int32 | np.float64], np.ones(2, np.float32)),
    (NDArray[np.object_], np.ones(2, object)),
    (Any, (1, 2)),
    (Any, [{1}]),
    (dict, {"a": {"b": frozenset()}}),
    (list, [Keyword(1, "v")]),
    *((int, number) for number in BEYOND),
]


@pytest.mark.parametrize(("kind", "value"), QUICK, ids=repr)
def test_plain_values_pass(kind: Any, value: Any) -> None:
    assert quick_check(kind)(value)


@pytest.mark.parametrize(("kind", "value"), NOT_QUICK, ids=repr)
def test_what_only_looks_like_them_does_not(kind: Any, value: Any) -> None:
    assert not quick_check(kind)(value)


@given(some.lists(some.sampled_from(BORDERS)), some.lists(some.sampled_from(BEYOND + ANYTHING)))
def test_a_list_of_ints_has_nothing_else_in_it(ints: list[int], others: list[Any]) -> None:
    assert quick_check(list[int])(ints)
    assert quick_check(list[int])(ints + others) == (not others)
    assert quick_check(list[int])(others + ints) == (not others)
    assert quick_check(dict[str, list[int]])({"one": ints, "two": others}) == (not others)
