"""Wrong configurations and entry points: one clear error each; spaces as rows and back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlinf_async.config import ConfigError, MissingExtra, load
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.spaces import choices, continuous, flat_spec
from rlinf_async.workers.env import EnvConfig, EnvError, EnvSpec, describe_env, make_env
from tests.workers.env.toy import counting


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "which environment"),
        ({"id": "CartPole-v1", "envs": 6, "stages": 4}, "6 cannot be divided into stages = 4"),
        ({"id": "CartPole-v1", "envs": 0}, "must be at least 1"),
        ({"id": "CartPole-v1", "seed": -1}, "seed is -1"),
        ({"entry_point": "no_colon"}, "'module:function'"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvConfig(**fields)


@pytest.mark.parametrize("simulator", ["single", "pool", "vector", "envpool"])
@pytest.mark.parametrize("steps", ["ten", True, 2.5, 0, -5])
def test_a_number_of_steps_that_is_none_is_refused_whatever_steps(
    simulator: Any, steps: object
) -> None:
    kwargs = {"max_episode_steps": steps}
    with pytest.raises(ConfigError, match=r"kwargs\.max_episode_steps: expected a whole number"):
        EnvConfig(id="CartPole-v1", simulator=simulator, kwargs=kwargs)
    assert EnvConfig(entry_point="my:make", kwargs=kwargs).kwargs == kwargs  # its own to say


def test_a_config_file_is_refused_with_the_line_at_fault(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('id = "CartPole-v1"\nenvs = 6\nstages = 4\n')
    with pytest.raises(ConfigError, match=r"run\.toml.*cannot be divided"):
        load(file, {}, EnvConfig)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EnvConfig(id="CartPol-v1"), "no env is called 'CartPol-v1'; did you mean 'CartPole-v1'"),
        (EnvConfig(id="CartPole-v1", kwargs={"legs": 3}), "legs"),
        (EnvConfig(entry_point="no_such_module:make"), "'no_such_module' cannot be imported"),
        (EnvConfig(entry_point="nowhere.py:make"), "'nowhere.py' cannot be imported"),
        (EnvConfig(entry_point="tests.workers.env.toy:none"), "has no function 'none'"),
        (
            EnvConfig(entry_point="tests.workers.env.toy:counting"),
            "returned a EnvConfig, not a gym",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_a_config_error(config: EnvConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_env(config)


def test_an_entry_point_that_raises_is_named_with_what_it_was_given() -> None:
    with pytest.raises(EnvError, match=r"toy:make' with \{'legs': 3\} raised TypeError"):
        make_env(counting(legs=3))


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match=r"env CartPole-v1 needs.*rlinf-async\[embodied\]"):
        make_env(EnvConfig(id="CartPole-v1"))


def test_an_entry_point_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.workers.env.toy import make\n")
    spec = describe_env(EnvConfig(entry_point=f"{file}:make"))
    assert spec == EnvSpec(observation=flat_spec(2), action=continuous(1), bounds=((-1e6, 1e6),))


def test_the_example_of_a_custom_env_is_found_by_its_file() -> None:
    place = Path(__file__).parents[3] / "examples" / "custom_env.py"
    config = EnvConfig(entry_point=f"{place}:PushDisc", kwargs={"goal_radius": 0.2})
    assert describe_env(config) == EnvSpec(
        observation=flat_spec(6), action=continuous(2), bounds=((-1.0, 1.0),) * 2
    )


def test_a_description_has_what_a_policy_must_know() -> None:
    assert describe_env(EnvConfig(id="CartPole-v1")) == EnvSpec(
        observation=flat_spec(4), action=choices(2), max_episode_steps=500, bounds=((0.0, 1.0),)
    )


def test_nested_observations_are_one_row_in_the_sorted_order_of_their_keys() -> None:
    space = spaces.Dict(
        {
            "b": spaces.Box(-1, 1, (2, 2)),
            "a": spaces.Discrete(3, start=1),
            "c": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (1,))]),
        }
    )
    writer = ObservationWriter(space, "Nested")
    row = np.full(writer.size, 9, np.float32)
    shown = {"a": 2, "b": [[0.1, 0.2], [0.3, 0.4]], "c": (np.array([1, 0]), np.array([-1.0]))}
    writer.write(shown, row)
    np.testing.assert_allclose(row, [0, 1, 0, 0.1, 0.2, 0.3, 0.4, 1, 0, -1])
    for _ in range(5):
        sample = space.sample()
        writer.write(sample, row)
        expected: Any = gymnasium.spaces.flatten(space, sample)
        np.testing.assert_allclose(row.astype(np.float64), expected, rtol=1e-6)


def test_an_observation_of_another_shape_is_never_broadcast() -> None:
    writer = ObservationWriter(spaces.Box(-1, 1, (3,)), "Wide")
    with pytest.raises(ValueError, match=r"shape \(1,\), the space has \(3,\)"):
        writer.write(np.zeros(1), np.zeros(3, np.float32))


def test_continuous_actions_are_clipped_or_stretched_to_the_bounds() -> None:
    space = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
    answer = np.array([[-3.0, 0.5], [1.0, -1.0]], np.float32)
    clipped = ActionReader(space, "Arm", "clip").read(answer, 2)
    assert _rows(clipped) == [[-2.0, 0.5], [1.0, 0.0]]
    stretched = ActionReader(space, "Arm", "rescale").read(answer, 2)
    assert _rows(stretched) == [[-2.0, 7.5], [2.0, 0.0]]
    assert clipped[0].dtype == space.dtype


def test_actions_keep_the_shape_of_their_space() -> None:
    reader = ActionReader(spaces.Box(-1, 1, (2, 3)), "Matrix", "clip")
    assert reader.size == 6
    assert reader.read(np.zeros((4, 6), np.float32), 4)[0].shape == (2, 3)


def test_choices_begin_where_the_space_begins_and_end_where_it_ends() -> None:
    reader = ActionReader(spaces.Discrete(3, start=-1), "Turn", "clip")
    assert list(reader.read(np.array([0, 2]), 2)) == [-1, 1]
    with pytest.raises(EnvError, match=r"chose \[3\]; choices are 0 to 2"):
        reader.read(np.array([3]), 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ActionReader(spaces.Text(3), "E", "clip"), "action space"),
        (lambda: ObservationWriter(spaces.Graph(spaces.Box(-1, 1), None), "E"), "observation"),
        (lambda: ActionReader(spaces.Box(-np.inf, 1), "E", "rescale"), "needs finite bounds"),
    ],
)
def test_spaces_that_are_not_supported_are_named(make: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        make()


def _rows(vectors: Iterable[Any]) -> list[list[float]]:
    return [vector.tolist() for vector in vectors]
