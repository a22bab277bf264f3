"""A strip shows an episode from its first frame to its last, and is small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rlinf_async.observe.files import VideoError
from rlinf_async.observe.video import GAP, HEIGHT, Strip


def frame(shade: int, height: int = 10, width: int = 20) -> NDArray[np.uint8]:
    """A frame of one shade, with a corner that is black."""
    made = np.full((height, width, 3), shade, np.uint8)
    made[: height // 2, : width // 2] = 0
    return made


def shades(path: Path, width: int) -> list[int]:
    """The shade of each picture in the file."""
    with Image.open(path) as image:
        strip: NDArray[Any] = np.asarray(image.convert("RGB"))
    return [int(value) for value in strip[-1, width - 1 :: width + GAP, 0]]


@pytest.mark.parametrize(
    ("frames", "shown"),
    [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (10, [0, 3, 6, 9]), (200, [0, 64, 144, 199])],
)
def test_pictures_are_evenly_spaced_from_the_first_frame_to_the_last(
    tmp_path: Path, frames: int, shown: list[int]
) -> None:
    path = tmp_path / "strip.png"
    with Strip(path, pictures=4) as strip:
        for number in range(frames):
            strip.add(frame(number + 1))
    assert [shade - 1 for shade in shades(path, 20)] == shown


def test_a_long_episode_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    with Strip(tmp_path / "strip.png", pictures=2) as strip:
        for _ in range(1000):
            strip.add(frame(1))
            assert len(strip._kept) <= 8
    assert (strip.frames, strip.blank_frames) == (1000, 0)


def test_an_array_that_the_env_draws_into_again_is_copied(tmp_path: Path) -> None:
    canvas = frame(10)
    with Strip(tmp_path / "strip.png") as strip:
        strip.add(canvas)
        canvas[:] = frame(90)
        strip.add(canvas)
    assert shades(tmp_path / "strip.png", 20) == [10, 90]


def test_large_frames_are_made_smaller_and_keep_their_form(tmp_path: Path) -> None:
    with Strip(tmp_path / "strip.png") as strip:
        strip.add(frame(7, 2 * HEIGHT, 6 * HEIGHT))
    with Image.open(tmp_path / "strip.png") as image:
        assert image.size == (3 * HEIGHT, HEIGHT)


def test_frames_of_another_size_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="pictures of an episode have one size"):
        _two_sizes(tmp_path / "strip.png")
    assert list(tmp_path.iterdir()) == []


def _two_sizes(path: Path) -> None:
    with Strip(path) as strip:
        strip.add(frame(1))
        strip.add(frame(1, height=11))
