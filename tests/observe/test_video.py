"""A video is of the env, and is not black; all else is an error with its cause."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe  # type: ignore[import-untyped]
from numpy.typing import NDArray

from rlinf_async.observe.files import VideoError
from rlinf_async.observe.video import VideoReport, choose_headless_renderer, record_video

RECORD_FETCH = """
import sys
from pathlib import Path
import gymnasium, gymnasium_robotics, numpy
from rlinf_async.observe.video import record_video

gymnasium.register_envs(gymnasium_robotics)
report = record_video(
    lambda: gymnasium.make("FetchReachDense-v4", render_mode="rgb_array", max_episode_steps=8),
    lambda observation: numpy.zeros(4, dtype=numpy.float32),
    Path(sys.argv[1]),
    episodes=2,
    seed=0,
)
assert report.frames == 18 and report.blank_frames == 0, report
assert report.successes == [False, False] and all(r < 0 for r in report.returns), report
"""


class FakeEnv:
    """An env of three steps; tests replace what is to go wrong."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"render_fps": 10}
        self.closed = False
        self.steps = 0
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        self.steps = 0
        self.seeds.append(seed)
        return 0, {}

    def step(self, action: int, /) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.steps, float(action), self.steps == 3, False, {"is_success": self.steps == 3}

    def render(self) -> Any:
        frame = np.zeros((48, 64, 3), dtype=np.uint8)
        frame[: 10 * (self.steps + 1)] = 200
        return frame

    def close(self) -> None:
        self.closed = True


class BlackEnv(FakeEnv):
    def render(self) -> Any:
        return np.zeros((48, 64, 3), dtype=np.uint8)


class PlainAtFirstEnv(FakeEnv):
    def render(self) -> Any:
        return super().render() if self.steps else np.full((48, 64, 3), 255, dtype=np.uint8)


class OddEnv(FakeEnv):
    def render(self) -> Any:
        return super().render()[:47, :63]


class HumanModeEnv(FakeEnv):
    def render(self) -> Any:
        return None


class FloatFramesEnv(FakeEnv):
    def render(self) -> Any:
        return np.zeros((48, 64, 3))


class GrowingEnv(FakeEnv):
    def render(self) -> Any:
        return np.zeros((48 + 2 * self.steps, 64, 3), dtype=np.uint8)


class NoContextEnv(FakeEnv):
    def render(self) -> Any:
        raise RuntimeError("no OpenGL context")


class BrokenEnv(FakeEnv):
    def step(self, action: int, /) -> tuple[int, float, bool, bool, dict[str, Any]]:
        raise ZeroDivisionError("physics")

    def close(self) -> None:
        raise OSError("already gone")


def frames_of(path: Path, height: int, width: int) -> NDArray[np.uint8]:
    """The frames of a video, ``[frames, height, width, rgb]``."""
    command = f"{get_ffmpeg_exe()} -loglevel error -i {path} -f rawvideo -pix_fmt rgb24 -".split()
    raw = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, height, width, 3)


def record(env: FakeEnv, path: Path, **options: Any) -> VideoReport:
    return record_video(lambda: env, lambda observation: observation + 1, path, **options)


def test_episodes_are_played_and_shown_frame_by_frame(tmp_path: Path) -> None:
    env = FakeEnv()
    report = record(env, tmp_path / "video.mp4", episodes=2, seed=7)
    assert report.frames == 8
    assert report.fps == 10
    assert report.returns == [6.0, 6.0]
    assert report.successes == [True, True]
    assert env.seeds == [7, None]
    assert env.closed
    film = frames_of(tmp_path / "video.mp4", 48, 64)
    assert len(film) == 8
    brightness = film.mean(axis=(1, 2, 3))
    assert (np.diff(brightness[:4]) > 10).all()


def test_an_env_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    assert record(FakeEnv(), tmp_path / "video.mp4", episodes=1, max_steps=2).frames == 3


def test_an_episode_that_goes_on_after_its_success_is_shown_up_to_it(tmp_path: Path) -> None:
    class Early(FakeEnv):
        def step(self, action: int, /) -> tuple[int, float, bool, bool, dict[str, Any]]:
            *step, _ = super().step(action)
            return (*step, {"is_success": self.steps >= 2})  # type: ignore[return-value]

    assert record(Early(), tmp_path / "whole.mp4", episodes=1).frames == 4
    report = record(Early(), tmp_path / "video.mp4", episodes=2, until_success=True)
    assert (report.frames, report.successes) == (6, [True, True])


def test_a_time_limit_ends_the_video_with_the_frames_that_it_has(tmp_path: Path) -> None:
    whole = record(FakeEnv(), tmp_path / "whole.mp4", episodes=2)
    assert not whole.cut
    cut = record(FakeEnv(), tmp_path / "cut.mp4", time_limit=0.0, episodes=2)
    assert cut.cut
    assert (cut.frames, len(cut.returns)) == (1, 1)
    assert (tmp_path / "cut.mp4").stat().st_size > 0


def test_black_frames_are_an_error_and_leave_no_file(tmp_path: Path) -> None:
    env = BlackEnv()
    with pytest.raises(VideoError, match="4 of 4 frames are of a single colour"):
        record(env, tmp_path / "video.mp4", episodes=1)
    assert list(tmp_path.iterdir()) == []
    assert env.closed


def test_a_single_blank_frame_is_counted_and_no_error(tmp_path: Path) -> None:
    assert record(PlainAtFirstEnv(), tmp_path / "video.mp4", episodes=1).blank_frames == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (HumanModeEnv, "make it with render_mode='rgb_array'"),
        (FloatFramesEnv, r"rendered float64 of shape \(48, 64, 3\)"),
        (GrowingEnv, "a video has one size"),
        (NoContextEnv, "could not render the env: RuntimeError: no OpenGL context"),
        (BrokenEnv, "could not step the env: ZeroDivisionError: physics"),
    ],
)
def test_an_env_that_does_not_play_along_is_a_clear_error(
    tmp_path: Path, make: Callable[[], FakeEnv], message: str
) -> None:
    with pytest.raises(VideoError, match=message):
        record(make(), tmp_path / "video.mp4")
    assert list(tmp_path.iterdir()) == []


def test_an_env_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    def make() -> FakeEnv:
        raise ImportError("no simulator here")

    with pytest.raises(VideoError, match="could not make the env: ImportError: no simulator here"):
        record_video(make, lambda observation: 0, tmp_path / "video.mp4")


def test_what_the_policy_raises_goes_through(tmp_path: Path) -> None:
    env = FakeEnv()

    def act(observation: int) -> int:
        raise LookupError("policy")

    with pytest.raises(LookupError, match="policy"):
        record_video(lambda: env, act, tmp_path / "video.mp4")
    assert env.closed
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"ffmpeg failed to write .*video\.mp4.*No such file"):
        record(FakeEnv(), tmp_path / "absent" / "video.mp4")


def test_frames_of_odd_size_are_padded(tmp_path: Path) -> None:
    record(OddEnv(), tmp_path / "video.mp4", episodes=1)
    assert len(frames_of(tmp_path / "video.mp4", 48, 64)) == 4


def test_a_host_without_a_display_renders_by_egl_unless_configured_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("DISPLAY", ":0")
        choose_headless_renderer()
        assert "MUJOCO_GL" not in os.environ
    with monkeypatch.context() as patch:
        patch.setenv("MUJOCO_GL", "osmesa")
        choose_headless_renderer()
        assert os.environ["MUJOCO_GL"] == "osmesa"
    choose_headless_renderer()
    assert os.environ["MUJOCO_GL"] == "egl"


def test_the_robot_arm_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium_robotics")
    path = tmp_path / "video.mp4"
    command = [sys.executable, "-W", "ignore", "-c", RECORD_FETCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    film = frames_of(path, 480, 480)
    assert len(film) == 18
    assert film.std(axis=(1, 2, 3)).min() > 10
