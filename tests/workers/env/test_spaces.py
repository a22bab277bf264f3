"""Observations with images and texts, and actions of several factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from rlinf_async.channels.wire.codec import Decoder, encode
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.embodied import Observations
from rlinf_async.messages.spaces import (
    ActionSpec,
    Factor,
    all_finite,
    choices,
    numbers_of,
    texts_of,
)
from rlinf_async.workers.env import EnvError

KITCHEN = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        "task": spaces.Text(12),
        "arm": spaces.Box(-1, 1, (3,)),
        "drawer": spaces.MultiDiscrete([2, 3]),
    }
)


def test_images_and_texts_are_fields_beside_one_vector_of_all_numbers() -> None:
    writer = ObservationWriter(KITCHEN, "Kitchen")
    assert str(writer.spec) == "state 'state' [8], image 'camera' [4, 5, 3], text 'task' [12]"
    rows = writer.spec.empty(2)
    shown = KITCHEN.sample() | {"task": "open it", "drawer": np.array([1, 2])}
    for row in rows:
        writer.write(shown, row)
    assert rows["camera"].dtype == np.uint8
    np.testing.assert_array_equal(rows["camera"][1], shown["camera"])
    np.testing.assert_array_equal(rows["state"][1], [*shown["arm"], 0, 1, 0, 0, 1])
    assert texts_of(rows["task"]) == ["open it", "open it"]
    np.testing.assert_array_equal(numbers_of(rows), rows["state"])


def test_structured_observations_cross_the_wire_as_they_are() -> None:
    writer = ObservationWriter(KITCHEN, "Kitchen")
    rows = writer.spec.empty(3)
    for row in rows:
        writer.write(KITCHEN.sample(), row)
    asked = Observations(
        env_rank=0, stage=1, incarnation=0, sequence=2, observation=rows, min_version=0
    )
    got = Decoder(Observations).decode(encode(asked))
    assert got.observation.dtype == rows.dtype
    assert (got.observation == rows).all()


def test_an_image_alone_is_a_field_too_and_names_that_meet_are_told_apart() -> None:
    image = spaces.Box(0, 255, (4, 4), np.uint8)
    assert [part.name for part in ObservationWriter(image, "Alone").spec.parts] == ["image"]
    both = spaces.Dict({"left": spaces.Dict({"rgb": image}), "right": spaces.Dict({"rgb": image})})
    names = [part.name for part in ObservationWriter(both, "Both").spec.parts]
    assert names == ["left.rgb", "right.rgb"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"camera": np.zeros((4, 4, 3), np.uint8)}, r"an image of shape \(4, 4, 3\)"),
        ({"camera": np.zeros((4, 5, 3))}, "dtype float64"),
        ({"task": "open all the drawers"}, "20 bytes, the space has at most 12"),
        ({"drawer": np.array([0, 3])}, "the space has"),
    ],
)
def test_what_does_not_fit_its_field_is_refused(wrong: dict[str, Any], said: str) -> None:
    writer = ObservationWriter(KITCHEN, "Kitchen")
    with pytest.raises(ValueError, match=said):
        writer.write(KITCHEN.sample() | wrong, writer.spec.empty(1)[0])


def test_actions_of_several_factors_are_read_column_by_column() -> None:
    space = spaces.Dict(
        {
            "grip": spaces.Discrete(2, start=1),
            "arm": spaces.Box(-1, 1, (2,)),
            "keys": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([3, 4])]),
        }
    )
    reader = ActionReader(space, "Many", "clip")
    two, three, four = (Factor("choice", count) for count in (2, 3, 4))
    assert reader.spec == ActionSpec((Factor("continuous", 2), two, two, two, three, four))
    assert (reader.spec.columns, reader.spec.outputs, reader.spec.shape) == (7, 15, (7,))
    answer = np.array([[5.0, -0.5, 1, 0, 1, 2, 3], [0, 0, 0, 1, 1, 0, 0]], np.float32)
    first, second = reader.read(answer, 2)
    assert first["arm"].tolist() == [1.0, -0.5]
    assert (first["grip"], second["grip"]) == (2, 1)
    assert first["keys"][0].tolist() == [0, 1]
    assert first["keys"][1].tolist() == [2, 3]
    assert space.contains(first)
    assert space.contains(second)


def test_choices_of_a_multidiscrete_stay_integers_and_are_checked() -> None:
    reader = ActionReader(spaces.MultiDiscrete([2, 3]), "Two", "clip")
    assert reader.spec == choices(2, 3)
    assert np.asarray(reader.read(np.array([[1, 2], [0, 0]]), 2)).tolist() == [[1, 2], [0, 0]]
    with pytest.raises(EnvError, match=r"chose \[\[2, 0\]\]; choices are 0 to 1 and 2"):
        reader.read(np.array([[2, 0]]), 1)
    with pytest.raises(EnvError, match="in several factors"):
        reader.read(np.array([1, 2]), 2)


@given(
    st.sampled_from([np.float32, np.float64, np.int64]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(max_dims=2, max_side=6, min_side=0))
    )
)
def test_numbers_are_finite_where_each_is_however_large_their_sum(numbers: NDArray[Any]) -> None:
    assert all_finite(numbers) == np.isfinite(numbers).all()
    assert all_finite(numbers.T[::2]) == np.isfinite(numbers.T[::2]).all()
