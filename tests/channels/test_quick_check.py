"""Values that are plainly as their type says pass in a moment; what looks like them does not."""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels.quick_check import quick_check

Text = NewType("Text", str)
Keyword = msgspec.defstruct("Keyword", [("class", int), ("v", Literal["v"])])


class Ended(msgspec.Struct):
    tokens: NDArray[np.int32]
    reason: Literal["stop", "length"]
    v: Literal[1] | None = None
    name: Text = Text("")


TOKENS = np.zeros(3, np.int32)
QUICK: list[tuple[Any, Any]] = [
    (Ended, Ended(TOKENS, "stop")),
    (Ended, Ended(TOKENS, "length", 1, Text("one"))),
    (Literal["a", 1], 1),
    (list[Literal["a", "b"]], ["a", "b", "a"]),
    (dict[Text, Literal[0]], {Text("a"): 0}),
    (Keyword, Keyword(1, "v")),
    (np.ndarray, np.ones(2)),
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
]


@pytest.mark.parametrize(("kind", "value"), QUICK, ids=repr)
def test_plain_values_pass(kind: Any, value: Any) -> None:
    assert quick_check(kind)(value)


@pytest.mark.parametrize(("kind", "value"), NOT_QUICK, ids=repr)
def test_what_only_looks_like_them_does_not(kind: Any, value: Any) -> None:
    assert not quick_check(kind)(value)
