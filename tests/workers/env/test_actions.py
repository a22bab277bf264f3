"""Whatever a policy answers, an environment gets an action that its space contains, or an error."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlinf_async.messages.converting import ActionReader, Bounds
from rlinf_async.workers.env import EnvConfig, EnvError, make_env
from rlinf_async.workers.env.many import batch_of

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS: tuple[type[np.integer], ...] = (
    np.int8,
    np.uint8,
    np.int16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
)
ENVS = 3


@st.composite
def float_boxes(draw: st.DrawFn) -> spaces.Box:
    """Bounds that are numbers of the dtype, some of them infinite, for each number of an action."""
    dtype = np.dtype(draw(st.sampled_from(FLOATS)))
    number = st.floats(allow_nan=False, allow_infinity=False, width=8 * dtype.itemsize)  # type: ignore[arg-type]
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    one, other = (draw(arrays.arrays(dtype, shape, elements=number)) for _ in range(2))
    low, high = np.minimum(one, other), np.maximum(one, other)
    open_at = draw(st.sampled_from(["neither", "low", "high", "both"]))
    if open_at in ("low", "both"):
        low = np.full_like(low, -np.inf)
    if open_at in ("high", "both"):
        high = np.full_like(high, np.inf)
    return spaces.Box(low, high, shape, dtype.type)


@st.composite
def integer_boxes(draw: st.DrawFn) -> spaces.Box:
    """Bounds up to the ends of the dtype."""
    kind = draw(st.sampled_from(INTEGERS))
    dtype, ends = np.dtype(kind), np.iinfo(kind)
    number = st.integers(int(ends.min), int(ends.max)) | st.sampled_from(
        [int(ends.min), int(ends.max), int(ends.max) - 1]
    )
    shape = draw(st.sampled_from([(), (1,), (3,)]))
    one, other = (draw(arrays.arrays(dtype, shape, elements=number)) for _ in range(2))
    return spaces.Box(np.minimum(one, other), np.maximum(one, other), shape, dtype.type)


discretes = st.builds(
    lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
    st.integers(1, 9),
    st.integers(-9, 9),
    st.sampled_from([np.int8, np.int32, np.int64]),
)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    shape = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([np.int8, np.int32, np.int64]))
    counts = draw(arrays.arrays(np.int64, shape, elements=st.integers(1, 9)))
    start = draw(arrays.arrays(np.int64, shape, elements=st.integers(-9, 9)))
    return spaces.MultiDiscrete(counts, dtype=dtype, start=start)  # type: ignore[arg-type]


bools: spaces.Box = spaces.Box(0, 1, (2,), np.bool_)  # type: ignore[arg-type]
boxes = float_boxes() | integer_boxes() | st.just(bools)
choices = discretes | multi_discretes() | st.sampled_from([spaces.MultiBinary(3)])
parts = st.lists(boxes | choices, min_size=1, max_size=3)
composites = parts.map(spaces.Tuple) | parts.map(
    lambda some: spaces.Dict({f"part {at}": part for at, part in enumerate(some)})
)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
near = st.sampled_from([-1.0, -0.5, 0.0, 0.1, 1 / 3, 0.5, 1.0])


@given(boxes | choices | composites, st.sampled_from(["clip", "rescale"]), st.data())
def test_every_finite_answer_becomes_an_action_of_the_space(
    space: spaces.Space[Any], mode: Bounds, data: st.DataObject
) -> None:
    try:
        reader = ActionReader(space, "Any", mode)
    except EnvError as error:
        assert "needs finite bounds" in str(error)  # noqa: PT017 only some have none
        return
    columns = [
        data.draw(
            arrays.arrays(np.float32, (ENVS, factor.size), elements=finite | near)
            if factor.kind == "continuous"
            else arrays.arrays(np.int64, (ENVS, 1), elements=st.integers(0, factor.size - 1))
        )
        for factor in reader.spec.factors
    ]
    answer = columns[0][:, 0] if reader.discrete else np.concatenate(columns, 1)
    if not reader.discrete and any(one.kind == "continuous" for one in reader.spec.factors):
        answer = answer.astype(np.float32)
    actions = reader.read(answer, ENVS)
    assert len(actions) == ENVS
    for action in actions:
        _check_contained(space, action)
    batch = gymnasium.vector.utils.batch_space(space, ENVS)
    assert batch.contains(batch_of(actions))


def _check_contained(space: spaces.Space[Any], action: Any) -> None:
    """Compared by hand, too: a Box also contains what can be cast to its dtype."""
    assert space.contains(action)
    if isinstance(space, spaces.Dict):
        for name, part in space.items():
            _check_contained(part, action[name])
    elif isinstance(space, spaces.Tuple):
        for part, value in zip(space, action, strict=True):
            _check_contained(part, value)
    else:
        assert (action.dtype, action.shape) == (space.dtype, space.shape)
        if isinstance(space, spaces.Box):
            assert np.isfinite(action).all()


@given(boxes, finite, st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_nan_and_infinity_are_no_actions(
    space: spaces.Box, other: float, bad: float, data: st.DataObject
) -> None:
    reader = ActionReader(space, "Arm", "clip")
    answer = np.full((ENVS, reader.size), other, np.float32)
    row = data.draw(st.integers(0, ENVS - 1))
    answer[row, data.draw(st.integers(0, reader.size - 1))] = bad
    with pytest.raises(EnvError, match=rf"env Arm: .* NaN or infinity, .*{bad}.*in row {row} of 3"):
        reader.read(answer, ENVS)


def test_a_bound_that_is_no_float32_holds_in_the_dtype_of_the_space() -> None:
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)
    for mode in ("clip", "rescale"):
        low, high = ActionReader(space, "Arm", mode).read(np.array([[-3], [3]], np.float32), 2)
        assert (low.item(), high.item()) == (-0.1, 0.1)


def test_integers_reach_both_ends_and_are_the_nearest() -> None:
    space = spaces.Box(0, 2**31 - 1, (1,), np.int32)
    answer = np.array([[-1e30], [0.6], [2.0**31], [1e30]], np.float32)
    read = ActionReader(space, "Encoder", "clip").read(answer, 4)
    assert np.ravel(read).tolist() == [0, 1, 2**31 - 1, 2**31 - 1]
    pixels = ActionReader(spaces.Box(0, 255, (1,), np.uint8), "Screen", "rescale")
    shares = np.linspace(-1, 1, 256, dtype=np.float32)[:, None]
    assert np.ravel(pixels.read(shares, 256)).tolist() == list(range(256))


@pytest.mark.parametrize("wrong", [0.5, -1, 2, 1e30])
def test_a_choice_that_is_none_is_refused_beside_numbers_too(wrong: float) -> None:
    space = spaces.Tuple([spaces.Discrete(2, start=5), spaces.Box(-1, 1, (1,))])
    reader = ActionReader(space, "Mixed", "clip")
    assert reader.read(np.array([[1, 0]], np.float32), 1)[0][0] == 6
    with pytest.raises(EnvError, match="env Mixed: the policy chose"):
        reader.read(np.array([[wrong, 0]], np.float32), 1)


class Strict(gymnasium.Env[Any, Any]):
    """Takes actions of its space alone."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Box(-0.1, 0.1, (1,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_every_action_of_a_chunk_lies_in_the_space() -> None:
    env = make_env(EnvConfig(id="Strict", entry_point=f"{__name__}:Strict", action_chunk=3))
    reader = ActionReader(env.action_space, "Strict", "clip")
    chunk = reader.read(np.array([[1, -1, 0.05]], np.float32), 1)[0]
    env.reset()
    assert env.step(chunk)[1] == 0.0
