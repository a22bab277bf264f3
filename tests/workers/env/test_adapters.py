"""Simulators behind adapters: what an environment of theirs shows, and whose picture it is.

Where a package is not installed its tests are skipped: they are in virtualenvs of their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.workers.env.adapters import libero, rendering, robosuite
from rlinf_async.workers.env.adapters.rendering import drawing, replacing_context

HERE = {name: importlib.util.find_spec(name) is not None for name in ("robosuite", "libero")}
has_robosuite = pytest.mark.skipif(
    not HERE["robosuite"] or HERE["libero"], reason="needs the extra robosuite"
)
has_libero = pytest.mark.skipif(not HERE["libero"], reason="needs the extra libero")

pytestmark = pytest.mark.filterwarnings("ignore")  # both import what is deprecated

Made = Callable[..., Any]


class Context:
    """An OpenGL context with its objects, both of which note what happens to them."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.gl_ctx, self.con = self, self
        self._name, self._events = name, events

    def make_current(self) -> None:
        self._events.append(f"{self._name} is current")

    def free(self) -> None:
        self._events.append(f"{self._name} frees")


class Simulation:
    def __init__(self, context: Context | None) -> None:
        self._render_context_offscreen = context


class Task:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim


def test_objects_of_a_context_that_is_replaced_are_freed_in_that_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(rendering, "_clear_context", lambda: events.append("none is current"))
    task = Task(Simulation(Context("old", events)))
    with replacing_context(task):
        events.append("reset")
        task.sim = Simulation(Context("new", events))
    assert events == [
        "old is current",
        "reset",
        "none is current",
        "old is current",
        *["old frees"] * 2,  # its objects, and itself
        "none is current",
    ]


def test_a_context_that_stays_and_a_simulation_without_one_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(rendering, "_clear_context", lambda: None)
    with replacing_context(Task(Simulation(Context("one", events)))):
        pass
    assert events == ["one is current"]
    blind = Simulation(None)
    with drawing(blind), replacing_context(Task(blind)):
        pass


@pytest.mark.parametrize("adapter", ["robosuite", "libero"])
def test_a_missing_package_says_what_to_install(adapter: str) -> None:
    if HERE[adapter]:
        pytest.skip(f"{adapter} is installed")
    make: Made = robosuite.make if adapter == "robosuite" else libero.make
    with pytest.raises(MissingExtra, match=rf"rlinf-async\[{adapter}\]"):
        make("Lift")


@has_robosuite
def test_robosuite_shows_state_and_images_and_the_seed_decides_how_it_begins() -> None:
    env = robosuite.make("Lift", cameras=["agentview"], horizon=3)
    _check(env, cuts_after=3)


@has_robosuite
def test_robosuite_shows_the_instruction_that_it_is_given() -> None:
    env = robosuite.make("Lift", cameras=["agentview"], instruction="lift the cube", horizon=3)
    assert env.reset(seed=0)[0]["instruction"] == "lift the cube"
    _check(env, cuts_after=3)


@has_robosuite
def test_environments_of_robosuite_in_one_process_see_their_own_pictures() -> None:
    _check_own_pictures(
        robosuite.make("Lift", cameras=["agentview"]),
        robosuite.make("Lift", render_mode="rgb_array"),
    )


@has_libero
def test_libero_shows_state_images_and_the_instruction() -> None:
    env = libero.make("libero_object", 1, horizon=3)
    assert env.reset(seed=0)[0]["instruction"].startswith("pick up the ")
    _check(env, cuts_after=3)


@has_libero
def test_environments_of_libero_in_one_process_see_their_own_pictures() -> None:
    _check_own_pictures(
        libero.make(), libero.make(task=3, image_size=32, hard_reset=True, render_mode="rgb_array")
    )


@has_libero
@pytest.mark.parametrize(
    ("suite", "task", "message"),
    [
        ("libero_spacial", 0, "there are: .*libero_spatial"),
        ("libero_goal", 10, "the tasks 0 to 9"),
    ],
)
def test_a_suite_or_task_that_is_none_is_named(suite: str, task: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        libero.make(suite, task)


def _check(env: Any, *, cuts_after: int) -> None:
    first, _ = env.reset(seed=1)
    other, _ = env.reset(seed=2)
    again, _ = env.reset(seed=1)
    assert env.observation_space.contains(first)
    assert first["agentview"].std() > 10
    np.testing.assert_allclose(again["state"], first["state"], atol=1e-4)
    assert not np.allclose(other["state"], first["state"], atol=1e-3)
    outcomes = [env.step(env.action_space.sample()) for _ in range(cuts_after)]
    assert [(terminated, truncated) for *_, terminated, truncated, _ in outcomes] == [
        *[(False, False)] * (cuts_after - 1),
        (False, True),
    ]
    assert outcomes[-1][-1]["is_success"] is False
    env.close()


def _check_own_pictures(env: Any, other: Any) -> None:
    """Whatever another environment draws, resets and closes, and in another thread, too."""
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(env.reset, seed=1).result()[0]["agentview"].astype(int)
    for seed in range(2):
        other.reset(seed=seed)
        other.step(other.action_space.sample())
        assert other.render().std() > 10
        seen = env.step(np.zeros(env.action_space.shape))[0]["agentview"]
        assert np.abs(seen - before).mean() < 5
    other.close()
    seen = env.step(np.zeros(env.action_space.shape))[0]["agentview"]
    assert np.abs(seen - before).mean() < 5
    env.close()
