"""An mp4 that grows by a frame at a time, through the ffmpeg that comes with imageio-ffmpeg."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

from rlinf_async.observe.errors import VideoError
from rlinf_async.observe.frames import Frame, Frames


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
