"""Arguments and results are recorded as plain data, and compared value by value."""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.channels.wire.codec import Decoder, encode
from rlinf_async.messages.weights import TensorSlot, WeightBucket
from rlinf_async.recording.values import NotFound, NotPlain, found_at, paths_in, plain, restored
from rlinf_async.replaying.compare import Comparison, Found


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: float
    y: tuple[int, ...] = ()


class Settings(msgspec.Struct, kw_only=True):
    name: str
    inner: Point
    colour: Colour = Colour.RED
    seconds: float = 0.0


def scale(factor: float, value: float) -> float:
    return factor * value


def there_and_back(value: Any) -> Any:
    return restored(Decoder(Any).decode(encode(plain(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**200,
        -(2**70),
        1.5,
        "text",
        b"bytes",
        [1, (2, {"a": {3}}), frozenset({4})],
        {1: "one", ("a", 2): [None]},
        Path("a/b"),
        Colour.RED,
        Point(1.0, (2, 3)),
        Settings(name="x", inner=Point(0.5)),
        Settings,
        scale,
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_functions_with_arguments_and_arrays_come_back() -> None:
    assert there_and_back(functools.partial(scale, 3.0))(2.0) == 6.0
    found = there_and_back({"a": np.arange(6, dtype=np.int16).reshape(2, 3)})["a"]
    assert found.dtype == np.int16
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_cannot_be_recorded_is_named_with_its_place(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(NotPlain, match=r"it\[1\]\['f'\]"):
        plain([1, {"f": file}], "it")
    with pytest.raises(NotPlain, match="no name by which"):
        plain(lambda: 1)


def test_what_is_not_here_any_more_is_named() -> None:
    with pytest.raises(NotFound, match="no_such_module_anywhere"):
        restored(["name", "no_such_module_anywhere:Thing"])
    with pytest.raises(NotFound, match="NoSuchName"):
        found_at(f"{__name__}:NoSuchName")
    with pytest.raises(NotFound, match=r"has no field lost"):
        restored(["object", f"{__name__}:Point", {"x": 1.0, "lost": 2}])
    with pytest.raises(NotFound, match="another thing"):
        restored(["another thing", 1])


def test_everything_that_a_value_names_is_found() -> None:
    data = plain([Settings(name="x", inner=Point(1.0)), {"k": scale}])
    names = {one.rpartition(":")[2] for one in paths_in(data)}
    assert names == {"Settings", "Point", "Colour", "scale"}


# ---- comparison


def difference(recorded: Any, replayed: Any, tolerance: float = 0.0) -> tuple[str, str, str] | None:
    try:
        Comparison(tolerance).compare(recorded, replayed)
    except Found as found:
        return found.path, found.recorded, found.replayed
    return None


def test_nan_is_nan_and_whole_numbers_are_exact_however_large() -> None:
    assert difference([math.nan, 2**80], [math.nan, 2**80]) is None
    assert difference(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) is None
    assert difference(2**80, 2**80 + 1, tolerance=10.0) is not None
    assert difference(2**53, 2**53 + 1, tolerance=10.0) is not None
    assert difference(math.nan, 1.0, tolerance=1e9) == ("", "nan", "1.0")
    assert difference(math.inf, -math.inf, tolerance=1e9) is not None
    assert difference(True, 1) is not None


def test_a_tolerance_of_nothing_is_exact() -> None:
    assert difference(0.1, np.nextafter(0.1, 1.0)) is not None
    assert (
        difference(np.ones(1, np.float32), np.nextafter(np.ones(1, np.float32), np.float32(2)))
        is not None
    )
    assert difference(0.1, np.nextafter(0.1, 1.0), tolerance=1e-12) is None


@pytest.mark.parametrize(
    ("replayed", "path"),
    [
        (Settings(name="y", inner=Point(1.0, (2, 3))), ".name"),
        (Settings(name="x", inner=Point(1.0, (2, 4))), ".inner.y[1]"),
        (Settings(name="x", inner=Point(1.0, (2,))), ".inner.y"),
        (Point(1.0), ""),
    ],
)
def test_the_path_leads_to_the_first_difference(replayed: Any, path: str) -> None:
    found = difference(Settings(name="x", inner=Point(1.0, (2, 3))), replayed)
    assert found is not None
    assert found[0] == path


def test_keys_shapes_and_dtypes_are_compared() -> None:
    assert difference({"a": 1}, {"a": 1, "b": 2}) == ("['b']", "nothing", "2")
    assert difference({"a": 1, "b": 2}, {"a": 1}) == ("['b']", "2", "nothing")
    zeros = np.zeros((2, 3), np.float32)
    found = difference(zeros, zeros.astype(np.float64))
    assert found == ("", "float32 of shape [2, 3]", "float64 of shape [2, 3]")
    changed = zeros.copy()
    changed[1, 2] = 1
    assert difference(zeros, changed) == ("[1][2]", "0.0", "1.0")


def test_measured_times_are_left_out_and_counted() -> None:
    comparison = Comparison()
    before, after = (Settings(name="x", inner=Point(0.0), seconds=at) for at in (1.0, 2.0))
    comparison.compare(before, after)
    comparison.compare({"train_seconds": 1.0, "loss": 2.0}, {"train_seconds": 3.0, "loss": 2.0})
    assert comparison.left_out == {"seconds": 1, "train_seconds": 1}
    assert comparison.values == 4


def test_weights_are_compared_as_the_numbers_that_they_are() -> None:
    def bucket(values: list[float], dtype: str) -> WeightBucket:
        numbers = np.array(values, np.float32).view(np.uint32)
        data = (numbers >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers
        raw = np.frombuffer(data.tobytes(), np.uint8)
        return WeightBucket((TensorSlot("w", dtype, (2,), 0),), raw, int(raw.sum()))

    for dtype in ("float32", "bfloat16"):
        one, other = bucket([1.0, 2.0], dtype), bucket([1.0, 2.25], dtype)
        assert difference(one, bucket([1.0, 2.0], dtype)) is None
        assert difference(one, other, tolerance=0.5) is None
        assert difference(one, other, tolerance=0.1) == (" tensor 'w'[1]", "2.0", "2.25")
