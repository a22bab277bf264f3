"""A video of a policy in its environment, or pictures of it side by side.

Everything happens in the calling thread, on an env that is made here: an OpenGL context belongs to
the thread that made it, and rendering from another one gives black frames without an error. So do
not call this by ``asyncio.to_thread``, nor after other rendering envs of this process were closed;
the runtime gives it a process of its own. Black frames that come all the same are an error.

An mp4 grows by a frame at a time, through the ffmpeg that comes with imageio-ffmpeg; pictures of an
episode are one PNG, for a page, a paper or a pull request.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self, SupportsFloat

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlinf_async.config.registry import raised
from rlinf_async.messages.embodied import success_of
from rlinf_async.observe.files import VideoError, replacing

Frame = NDArray[np.uint8]


class Frames(abc.ABC):
    """Checks and counts frames; a subclass makes a file of them."""

    one_size: ClassVar[str]
    """part of messages that says that all frames have one size"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = 0
        self.blank_frames = 0
        """Frames of a single colour."""
        self._shape: tuple[int, ...] = ()

    def add(self, frame: Frame) -> None:
        """Append a frame ``[height, width, rgb]``, of the size of the first.

        Raises:
            VideoError: the size is another, or the frame cannot be taken.
        """
        self._shape = self._shape or frame.shape
        if frame.shape != self._shape:
            raise VideoError(
                f"frame {self.frames} is {frame.shape}, the first one was {self._shape}: "
                f"{self.one_size}"
            )
        self.frames += 1
        self.blank_frames += not frame.std() > 0
        self._take(frame)

    @abc.abstractmethod
    def _take(self, frame: Frame) -> None:
        """Take the newest frame. Its array may be drawn into again afterwards."""


class Mp4(Frames):
    """Writes H.264 that every player and browser shows. ffmpeg starts with the first frame.

    Leaving the block ends the file; it is whole then, or a `VideoError` carries what ffmpeg said.
    """

    one_size = "a video has one size"

    def __init__(self, path: Path, *, fps: float, shown_as: Path) -> None:
        super().__init__(path)
        self._shown_as = shown_as  # in messages: ``path`` may be a name that is not to stay
        self.fps = fps
        self._ffmpeg: subprocess.Popen[bytes] | None = None
        # A file, because a pipe that nobody reads would stop an ffmpeg with much to say.
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115, closed when the block is left

    def _take(self, frame: Frame) -> None:
        """Raises `VideoError`: ffmpeg is missing or failed."""
        if self._ffmpeg is None:
            self._ffmpeg = self._start()
        assert self._ffmpeg.stdin is not None
        try:
            self._ffmpeg.stdin.write(np.ascontiguousarray(frame).tobytes())
        except OSError as error:
            self._ffmpeg.wait()
            raise VideoError(self._failure()) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._messages:
            code = self._finish()
            if kind is None and code != 0:
                raise VideoError(self._failure())

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            library = importlib.import_module("imageio_ffmpeg")
        except ModuleNotFoundError as error:
            raise VideoError(
                "a video needs imageio-ffmpeg: pip install 'rlinf-async[embodied]'"
            ) from error
        try:
            return subprocess.Popen(
                [library.get_ffmpeg_exe(), *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
            )
        except (OSError, RuntimeError) as error:
            raise VideoError(f"ffmpeg did not start: {error}") from error

    def _arguments(self) -> list[str]:
        height, width = self._shape[:2]
        frames = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {self.fps:g} -i -"
        # H.264 with the usual colours asks for even sides.
        even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
        coded = f"-vf {even} -c:v libx264 -pix_fmt yuv420p -crf 20 -movflags +faststart"
        return ["-y", "-loglevel", "error", *frames.split(), *coded.split(), str(self.path)]

    def _finish(self) -> int:
        """End the file and ffmpeg, and say how it ended."""
        if self._ffmpeg is None:
            return 0
        assert self._ffmpeg.stdin is not None
        # It may have ended before it had read everything; its exit status says so then.
        with contextlib.suppress(OSError):
            self._ffmpeg.stdin.close()
        return self._ffmpeg.wait()

    def _failure(self) -> str:
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").splitlines() or ["no message"]
        # The first line has the cause, behind the address of the part of ffmpeg that speaks.
        cause = lines[0].rpartition("] ")[2].replace(str(self.path), str(self._shown_as))
        return f"ffmpeg failed to write {self._shown_as} at frame {self.frames}: {cause}"


HEIGHT: Final = 160
"""pixels of a picture; frames that are higher are made smaller"""
COLOURS: Final = 128
"""colours of the whole strip: a rendered scene needs no more, and the file is a third as large"""
GAP: Final = 4
"""white pixels between two pictures"""


class Strip(Frames):
    """Takes the frames of an episode one by one, and writes ``pictures`` of them, evenly spaced,
    with the first and the last.

    Leaving the block writes the file. However long the episode is, at most four times as many
    frames as pictures are kept.
    """

    one_size = "pictures of an episode have one size"

    def __init__(self, path: Path, *, pictures: int = 6) -> None:
        super().__init__(path)
        self._pictures = pictures
        self._kept: list[Frame] = []
        self._stride = 1
        """number of frames of which one is kept"""
        self._last: Frame | None = None

    def _take(self, frame: Frame) -> None:
        self._last = frame.copy()
        if (self.frames - 1) % self._stride == 0:
            self._kept.append(self._last)
        if len(self._kept) > 4 * self._pictures:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._last is not None:
            self._write(self._last)

    def _write(self, last: Frame) -> None:
        frames = self._kept if self._kept[-1] is last else [*self._kept, last]
        chosen = np.linspace(0, len(frames) - 1, min(self._pictures, len(frames))).round()
        pictures = [_smaller(frames[int(place)]) for place in chosen]
        width, height = pictures[0].size
        strip = Image.new("RGB", (len(pictures) * (width + GAP) - GAP, height), "white")
        for place, picture in enumerate(pictures):
            strip.paste(picture, (place * (width + GAP), 0))
        strip.quantize(COLOURS, dither=Image.Dither.NONE).save(
            self.path, format="PNG", optimize=True
        )


def _smaller(frame: Frame) -> Image.Image:
    image = Image.fromarray(frame)
    if image.height <= HEIGHT:
        return image
    return image.resize((max(1, image.width * HEIGHT // image.height), HEIGHT))


_DEFAULT_FPS: Final = 25.0
_MOST_BLANK: Final = 0.5  # share of frames of one colour; above it the renderer is at fault


class RenderedEnv(Protocol):
    """The part of a Gymnasium env, made with ``render_mode="rgb_array"``, that is used."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any, /) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]: ...

    def render(self) -> Any: ...

    def close(self) -> None: ...


class VideoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a video."""

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
        max_steps: most steps of one episode, for an env that does not end.
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
    with _naming_step("make the env"):
        env = make_env()
    try:
        yield env
    except BaseException:
        with contextlib.suppress(Exception):
            env.close()
        raise
    with _naming_step("close the env"):
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
    with _naming_step("reset the env"):
        observation, info = env.reset(seed=seed)
    total, goes_on = 0.0, film()
    for _ in range(max_steps if goes_on else 0):
        action = act(observation)
        with _naming_step("step the env"):
            observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        goes_on = film()
        done = until_success and success_of(info) is True
        if terminated or truncated or done or not goes_on:
            break
    return total, success_of(info), not goes_on


def _render(env: RenderedEnv) -> Frame:
    """One frame ``[height, width, rgb]``."""
    with _naming_step("render the env"):
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
def _naming_step(what: str) -> Iterator[None]:
    """Say which step failed. An env may raise anything, so anything is caught, and chained."""
    try:
        yield
    except Exception as error:
        raise VideoError(
            f"no video: could not {what}: {raised(error)} (to render, an env needs "
            f"a display, EGL or OSMesa; MUJOCO_GL is {os.environ.get('MUJOCO_GL')!r})"
        ) from error
