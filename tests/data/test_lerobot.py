"""Demonstrations in LeRobot's format."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import check_demonstrations, chunks_of, read_episodes
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

STATE = ObservationPart(name="state", kind="state", shape=(2,))
FRONT = ObservationPart(name="front", kind="image", shape=(4, 4, 3))
WORDS = ObservationPart(name="instruction", kind="text", shape=(6,))
SPEC = ObservationSpec((STATE, FRONT, WORDS))


def pictures(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)


def png(pixels: Any) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return {"bytes": file.getvalue(), "path": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two episodes, of 3 and 5 steps, with a task each."""
    features = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "observation.images.front": {"dtype": "image", "shape": [4, 4, 3]},
        "action": {"dtype": "float32", "shape": [2]},
    }
    (tmp_path / "meta").mkdir()
    info = {"total_episodes": 2, "chunks_size": 1000, "features": features}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    tasks = [{"task_index": 0, "task": "red"}, {"task_index": 1, "task": "go green"}]
    (tmp_path / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "data/chunk-000").mkdir(parents=True)
    for number, steps in enumerate((3, 5)):
        rows = np.arange(2.0 * steps).reshape(steps, 2).tolist()
        table = {
            "observation.state": rows,
            "observation.images.front": [png(one) for one in pictures(number, steps)],
            "action": [[value / 10 for value in row] for row in rows],
            "task_index": [number] * steps,
        }
        path = tmp_path / f"data/chunk-000/episode_{number:06d}.parquet"
        parquet.write_table(pyarrow.table(table), path)
    return tmp_path


def test_episodes_are_read_with_pictures_and_instructions(folder: Path) -> None:
    info = check_demonstrations(folder, SPEC, 2, discrete=False)
    first, second = read_episodes(folder, SPEC)
    assert (info.episodes, len(first.action), len(second.action)) == (2, 3, 5)
    assert np.array_equal(second.observation["front"], pictures(1, 5))
    assert bytes(first.observation["instruction"][0]) == b"red\0\0\0"
    assert bytes(second.observation["instruction"][4]) == b"go gre"
    assert second.observation["state"][4].tolist() == [8.0, 9.0]
    assert second.action[4].tolist() == pytest.approx([0.8, 0.9])


def test_every_step_gives_the_actions_that_follow_it(folder: Path) -> None:
    samples = chunks_of(list(read_episodes(folder, SPEC)), 2)
    assert samples.action.shape == (8, 2, 2)
    assert samples.there.tolist() == [[True, True]] * 2 + [[True, False]] + [
        *[[True, True]] * 4,
        [True, False],
    ]
    assert samples.action[2, 1].tolist() == [0.0, 0.0]


def test_images_of_another_size_are_refused(folder: Path) -> None:
    wanted = ObservationSpec(
        (STATE, ObservationPart(name="front", kind="image", shape=(8, 8, 3)), WORDS)
    )
    with pytest.raises(DataError, match=r"show .*image 'front' \[4, 4, 3\].* shows .*\[8, 8, 3\]"):
        check_demonstrations(folder, wanted, 2, discrete=False)


def test_a_camera_that_is_not_there_is_refused(folder: Path) -> None:
    wanted = ObservationSpec(
        (STATE, ObservationPart(name="wrist", kind="image", shape=(4, 4, 3)), WORDS)
    )
    with pytest.raises(DataError, match="image 'wrist'"):
        check_demonstrations(folder, wanted, 2, discrete=False)


def test_actions_of_another_size_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="have 2 numbers, but the environment takes 3 numbers"):
        check_demonstrations(folder, SPEC, 3, discrete=False)


def test_pictures_in_videos_are_refused(folder: Path) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.images.front"]["dtype"] = "video"
    (folder / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="in videos, which are not read"):
        check_demonstrations(folder, SPEC, 2, discrete=False)


def test_a_damaged_episode_is_named(folder: Path) -> None:
    (folder / "data/chunk-000/episode_000001.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"episode_000001\.parquet"):
        list(read_episodes(folder, SPEC))
