"""Files of demonstrations that are damaged are found before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.data.demonstrations import (
    DemonstrationsInfo,
    Episode,
    check_demonstrations,
    read_episodes,
    write_episode,
    write_info,
)
from rlinf_async.data.errors import DataError
from rlinf_async.messages.spaces import ObservationSpec, Part

SPEC = ObservationSpec(
    (
        Part(name="camera", kind="image", shape=(4, 4, 3)),
        Part(name="state", kind="state", shape=(2,)),
    )
)
STEPS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two episodes."""
    for number in range(2):
        seen = SPEC.empty(STEPS)
        seen["camera"], seen["state"] = number, 0.5
        write_episode(tmp_path, number, Episode(seen, np.zeros((STEPS, 3), np.float32)))
    info = DemonstrationsInfo(env="table", observation=SPEC, action_size=3, episodes=2)
    write_info(tmp_path, info)
    return tmp_path


def check(folder: Path) -> DemonstrationsInfo:
    return check_demonstrations(folder, SPEC, 3, discrete=False)


def test_what_was_written_is_right(folder: Path) -> None:
    assert check(folder).episodes == 2
    first, second = read_episodes(folder)
    assert (first.observation["camera"] == 0).all()
    assert (second.observation["camera"] == 1).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"action": np.zeros((STEPS, 2), np.float32)}, r"shape \[5, 2\], not 3 numbers each"),
        ({"action": np.full((STEPS, 3), np.nan, np.float32)}, "an action is NaN or infinite"),
        (
            {"state": np.zeros((4, 2), np.float32)},
            r"'state' is float32 \[4, 2\], not",
        ),
        ({"camera": np.zeros((STEPS, 4, 4, 3), np.float32)}, "'camera' is float32 .* not uint8"),
        ({"camera": None}, "camera"),
    ],
)
def test_an_episode_of_another_form_is_named(
    folder: Path, change: dict[str, Any], said: str
) -> None:
    path = folder / "episode_000001.npz"
    arrays = dict(np.load(path)) | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=rf"episode_000001\.npz' is no episode.*{said}"):
        check(folder)


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_or_missing_file_is_named(folder: Path, content: bytes | None) -> None:
    path = folder / "episode_000001.npz"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"episode_000001\.npz' is no episode"):
        check(folder)
