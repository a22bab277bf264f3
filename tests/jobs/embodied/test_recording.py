"""What a scripted policy does is what a policy can do: recorded and executed alike, or refused."""

from __future__ import annotations

import pathlib
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.config import UsageError
from rlinf_async.data.demonstrations import read_episodes
from rlinf_async.messages.converting import ActionReader, Bounds, answer_for
from rlinf_async.runtime.jobs.embodied import EmbodiedConfig, EmbodiedTrainingConfig
from rlinf_async.runtime.jobs.embodied.playing import record_demonstrations
from rlinf_async.runtime.jobs.embodied.settings import DemonstrationsConfig
from rlinf_async.workers.env import EnvConfig
from tests.workers.env.test_actions import integer_boxes

TAKEN: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-0.1, 0.1, (2,), np.float64),
    "integers": spaces.Box(0, 255, (2,), np.uint8),
    "discrete": spaces.Discrete(3, start=5),
}


class Executed(gymnasium.Env[Any, Any]):
    """Shows the action that it executed; episodes of 3 steps, which succeed."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, taken: str, cut: bool = False) -> None:
        self.action_space, self.cut = TAKEN[taken], cut

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.at += 1
        shown = np.full(2, action, np.float32)
        ended, cut = self.at == 3, self.at == 3 and self.cut
        return shown, float(self.at), ended and not cut, cut, {"is_success": True}


class Script:
    """What the scripted policy does."""

    action: Any = None


def script(env: Any, seed: int) -> Any:
    """A scripted policy, which always does the same."""
    return lambda observation: Script.action


def record(
    out: pathlib.Path, taken: str, mode: Bounds, action: Any, *, cut: bool = False
) -> list[Any]:
    """The recorded episodes."""
    Script.action = action
    kwargs = {"taken": taken, "cut": cut}
    config = EmbodiedConfig(
        env=EnvConfig(entry_point=f"{__name__}:Executed", kwargs=kwargs, actions=mode),
        training=EmbodiedTrainingConfig(total_steps=1, steps_per_iteration=1),
    )
    wanted = DemonstrationsConfig(policy=f"{__name__}:script", episodes=2, seed=7)
    record_demonstrations(config, wanted, out)
    return list(read_episodes(out))


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), SystemExit("boom"), KeyboardInterrupt("boom")]
)
@pytest.mark.parametrize("when", ["made", "asked"])
def test_what_a_script_raises_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, when: str
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    def script(env: Any, seed: int) -> Any:
        return fails() if when == "made" else fails

    # As where a worker handles it: else it is the user's own Ctrl-C.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    monkeypatch.setitem(globals(), "script", script)
    where = "" if when == "made" else "in the episode with seed 7, at step 0, "
    said = rf"script',? {where}raised {type(error).__name__}: boom"
    with pytest.raises(UsageError, match=said):
        record(tmp_path / "out", "box", "clip", None)


@pytest.mark.parametrize(
    ("taken", "mode", "action", "wanted", "executed", "clipped"),
    [
        ("box", "clip", np.array([0.05, 5.0]), [0.05, 0.1], [0.05, 0.1], True),
        ("box", "rescale", np.array([0.05, 5.0]), [0.5, 1.0], [0.05, 0.1], True),
        ("box", "clip", np.array([0.1, -0.1], np.float32), [0.1, -0.1], [0.1, -0.1], False),
        ("box", "rescale", [0.1, 0.0], [1.0, 0.0], [0.1, 0.0], False),
        ("integers", "rescale", np.array([255, 0], np.uint8), [1.0, -1.0], [255, 0], False),
        ("integers", "clip", np.array([300, 7]), [255, 7], [255, 7], True),
        ("discrete", "clip", np.int64(6), 1, [6, 6], False),
    ],
)
def test_what_is_recorded_is_what_was_executed(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    taken: str,
    mode: Bounds,
    action: Any,
    wanted: Any,
    executed: list[float],
    clipped: bool,
) -> None:
    for episode in record(tmp_path / "out", taken, mode, action):
        np.testing.assert_allclose(episode.action, [wanted] * 3, rtol=1e-6)
        np.testing.assert_allclose(episode.observation[1:], [executed] * 2, rtol=1e-6)
    said = capsys.readouterr().err
    assert said.count("lies outside of") == clipped
    assert not clipped or "in the episode with seed 7, at step 0: the action" in said


@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut"])
def test_what_follows_an_action_is_recorded(tmp_path: pathlib.Path, cut: bool) -> None:
    first, _ = record(tmp_path / "out", "box", "clip", np.array([0.05, 0.1]), cut=cut)
    assert first.outcome.reward.tolist() == [1.0, 2.0, 3.0]
    assert first.outcome.terminated is not cut
    np.testing.assert_allclose(first.outcome.last_observation, [[0.05, 0.1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("taken", "action", "said"),
    [
        ("box", [np.nan, 0.0], "an action with NaN or infinity"),
        ("box", [np.inf, 0.0], "an action with NaN or infinity"),
        ("box", np.zeros(3), r"float64 of shape \[3\], which is no action of Box"),
        ("box", np.zeros((2, 1)), r"of shape \[2, 1\]"),
        ("box", "left", "which is no action of Box"),
        ("box", [[1], [2, 3]], "raised ValueError"),
        ("discrete", 0, r"no choice of Discrete\(3, start=5\): 0"),
        ("discrete", 8, "no choice of"),
        ("discrete", 5.5, "no choice of"),
    ],
)
def test_what_is_no_action_is_named_with_seed_and_step(
    tmp_path: pathlib.Path, taken: str, action: Any, said: str
) -> None:
    where = "script', in the episode with seed 7, at step 0"
    with pytest.raises(UsageError, match=f"{where}.*{said}"):
        record(tmp_path / "out", taken, "clip", action)


@given(integer_boxes(), st.integers(0, 2**32 - 1))
def test_an_action_of_small_integers_is_taken_by_the_answer_for_it(
    space: spaces.Box, seed: int
) -> None:
    """Up to 2**16, which float32 holds: rescaled to [-1, 1] and back they are the same."""
    if space.low.min() < -(2**16) or space.high.max() > 2**16:
        return
    space.seed(seed)
    action = space.sample()
    for mode in ("clip", "rescale"):
        reader = ActionReader(space, "Small", mode)
        answer = answer_for(space, action, reader.bounds, rescaled=mode == "rescale")
        np.testing.assert_array_equal(reader.read(answer, 1)[0], action)
