"""A video of a policy in its environment, or pictures of it.

Everything happens in the calling thread, on an env that is made here: an OpenGL context belongs to
the thread that made it, and rendering from another one gives black frames without an error. So do
not call this by ``asyncio.to_thread``, nor after other rendering envs of this process were closed;
the runtime gives it a process of its own. Black frames that come all the same are an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, SupportsFloat

import msgspec
import numpy as np

from rlinf_async.config.errors import raised
from rlinf_async.messages.success import success_of
from rlinf_async.observe.errors import VideoError
from rlinf_async.observe.files import replacing
from rlinf_async.observe.frames import Frame, Frames
from rlinf_async.observe.mp4 import Mp4
from rlinf_async.observe.strip import Strip

_DEFAULT_FPS: Final = 25.0
_MOST_BLANK: Final = 0.5  # share of frames of one colour; above it the renderer is at fault


class RenderedEnv(Protocol):
    """What is used of a Gymnasium env, made with ``render_mode="rgb_array"``."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]: ...

    def render(self) -> Any: ...

    def close(self) -> None: ...


class VideoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the video shows."""

    path: str
    frames: int
    blank_frames: int
    """Frames of a single colour."""
    fps: float
    returns: list[float]
    """Undiscounted return of each episode."""
    successes: list[bool | None]
    """Whether each episode ended in success; None where the env does not say."""
    cut: bool
    """Whether the time limit ended the last of them."""


def record_video(
    make_env: Callable[[], RenderedEnv],
    act: Callable[[Any], Any],
    path: Path,
    *,
    episodes: int = 3,
    seed: int | None = None,
    max_steps: int = 1000,
    time_limit: float | None = None,
    until_success: bool = False,
    on_episode: Callable[[], None] | None = None,
) -> VideoReport:
    """Play episodes and write them: as an mp4 (H.264) at the env's own frame rate, or, where the
    name of the file ends with ``.png``, as a strip of pictures.

    Sets ``MUJOCO_GL=egl`` for this process where there is no display and nothing else was chosen.

    Args:
        make_env: makes the env, with ``render_mode="rgb_array"``; called here, and closed here.
        act: observation -> action. What it raises goes through as it is.
        max_steps: of one episode, for an env that does not end.
        time_limit: seconds, after which the video ends with the frames that it has; None: no limit.
        until_success: an episode ends with the step that first succeeds; some go on to their
            time limit, and nothing more is seen of them.
        on_episode: called before each episode.

    Raises:
        VideoError: the env could not be made, did not step or render, or rendered blank frames;
            or ffmpeg is missing or failed. No file is left then.
        RunFolderError: the disk is full, or the like.
    """
    choose_headless_renderer()
    seeds = [seed, *[None] * (episodes - 1)]
    played: list[tuple[float, bool | None]] = []
    started = time.monotonic()

    def film() -> bool:
        """Add a frame; whether there is time for another."""
        video.add(_render(env))
        return time_limit is None or time.monotonic() - started < time_limit

    cut = False
    with (
        _made(make_env) as env,
        replacing(path) as partial,
        _film(partial, path, env) as video,
    ):
        fps = _fps(env)
        for one in seeds:
            if on_episode is not None:
                on_episode()
            total, success, cut = _play(
                env, act, film, max_steps, seed=one, until_success=until_success
            )
            played.append((total, success))
            if cut:
                break
        _refuse_blank(video)
    return VideoReport(
        path=str(path),
        frames=video.frames,
        blank_frames=video.blank_frames,
        fps=fps,
        returns=[total for total, _ in played],
        successes=[success for _, success in played],
        cut=cut,
    )


def _film(partial: Path, path: Path, env: RenderedEnv) -> Mp4 | Strip:
    """What takes the frames; ``path`` is the name that ``partial`` will have."""
    if path.suffix == ".png":
        return Strip(partial)
    return Mp4(partial, fps=_fps(env), shown_as=path)


def choose_headless_renderer() -> None:
    """Let MuJoCo render by EGL on a Linux host without a display, unless the user chose."""
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not has_display:
        os.environ.setdefault("MUJOCO_GL", "egl")


@contextlib.contextmanager
def _made(make_env: Callable[[], RenderedEnv]) -> Iterator[RenderedEnv]:
    """The env, closed afterwards. What went wrong before the closing is what is raised."""
    with _naming("make the env"):
        env = make_env()
    try:
        yield env
    except BaseException:
        with contextlib.suppress(Exception):
            env.close()
        raise
    with _naming("close the env"):
        env.close()


def _play(
    env: RenderedEnv,
    act: Callable[[Any], Any],
    film: Callable[[], bool],
    max_steps: int,
    *,
    seed: int | None,
    until_success: bool,
) -> tuple[float, bool | None, bool]:
    """One episode: its return, whether it ended in success, and whether ``film`` ended it."""
    with _naming("reset the env"):
        observation, info = env.reset(seed=seed)
    total, goes_on = 0.0, film()
    for _ in range(max_steps if goes_on else 0):
        action = act(observation)
        with _naming("step the env"):
            observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        goes_on = film()
        done = until_success and success_of(info) is True
        if terminated or truncated or done or not goes_on:
            break
    return total, success_of(info), not goes_on


def _render(env: RenderedEnv) -> Frame:
    """One frame ``[height, width, rgb]``."""
    with _naming("render the env"):
        frame = env.render()
    if frame is None:
        raise VideoError(
            "the env rendered nothing (render() gave None); make it with render_mode='rgb_array'"
        )
    image = np.asarray(frame)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise VideoError(
            f"the env rendered {image.dtype} of shape {image.shape}; a frame is uint8 "
            "[height, width, 3], as render_mode='rgb_array' gives it"
        )
    return image


def _fps(env: RenderedEnv) -> float:
    """The env's own rate, where it says one."""
    fps = env.metadata.get("render_fps")
    return float(fps) if isinstance(fps, int | float) and fps > 0 else _DEFAULT_FPS


def _refuse_blank(video: Frames) -> None:
    if video.blank_frames > _MOST_BLANK * video.frames:
        raise VideoError(
            f"{video.blank_frames} of {video.frames} frames are of a single colour: the renderer "
            "does not work here. Render in the thread that made the env, in a process in which no "
            "other rendering env was closed; or try another MUJOCO_GL "
            f"(it is {os.environ.get('MUJOCO_GL')!r}; egl, osmesa, glfw)"
        )


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say which step failed. An env may raise anything, so anything is caught, and chained."""
    try:
        yield
    except Exception as error:
        raise VideoError(
            f"no video: could not {what}: {raised(error)} (to render, an env needs "
            f"a display, EGL or OSMesa; MUJOCO_GL is {os.environ.get('MUJOCO_GL')!r})"
        ) from error
