"""Demonstrations in LeRobot's format."""

from __future__ import annotations

import importlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlinf_async.cli import main
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    check_demonstrations,
    chunks_of,
    read_episodes,
    write_episode,
    write_info,
)
from rlinf_async.data.lerobot_export import write_lerobot
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec

pyarrow: Any = importlib.import_module("pyarrow")
parquet: Any = importlib.import_module("pyarrow.parquet")

STATE = ObservationPart(name="state", kind="state", shape=(2,))
FRONT = ObservationPart(name="front", kind="image", shape=(4, 4, 3))
WORDS = ObservationPart(name="instruction", kind="text", shape=(8,))
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
    assert bytes(first.observation["instruction"][0]) == b"red\0\0\0\0\0"
    assert bytes(second.observation["instruction"][4]) == b"go green"
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


SIZES = (5, 2, 7)
"""steps of the episodes of `packed`"""
CAMERA = "observation.images.front"
FILMED = ObservationPart(name="front", kind="image", shape=(16, 24, 3))


def shades(number: int, steps: int) -> list[int]:
    """The grey of each picture of an episode."""
    return [40 * number + 10 * step + 20 for step in range(steps)]


def film(path: Path, greys: list[int]) -> None:
    """Write a video of 10 pictures a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
    writer = ffmpeg.write_frames(str(path), (24, 16), fps=10, codec="libx264", macro_block_size=8)
    writer.send(None)
    for grey in greys:
        writer.send(np.full((16, 24, 3), grey, np.uint8).tobytes())
    writer.close()


def described(folder: Path, version: str, **more: Any) -> None:
    features = {
        "observation.state": {"dtype": "float32", "shape": [1]},
        CAMERA: {
            "dtype": "video",
            "shape": [3, 16, 24],
            "names": ["channels", "height", "width"],
        },
        "action": {"dtype": "float32", "shape": [1]},
    }
    info = {"total_episodes": 3, "fps": 10, "codebase_version": version, "features": features}
    (folder / "meta").mkdir()
    (folder / "meta/info.json").write_text(json.dumps(info | more))


def rows(number: int, steps: int) -> Any:
    """What lerobot writes of numbers with one value: no lists."""
    return {
        "observation.state": [100.0 * number + step for step in range(steps)],
        "action": [number + step / 10 for step in range(steps)],
        "task_index": [number % 2] * steps,
        "episode_index": [number] * steps,
    }


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Version 3: three episodes in two tables and two videos, cut in other places."""
    described(
        tmp_path,
        "v3.0",
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    tables, videos, starts = (0, 0, 1), (0, 1, 1), (0.0, 0.0, 0.2)
    for at in (0, 1):
        made = [rows(one, SIZES[one]) for one in range(3) if tables[one] == at]
        joined = {name: list(itertools.chain(*(one[name] for one in made))) for name in made[0]}
        path = tmp_path / f"data/chunk-000/file-{at:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(joined), path)
        greys = [shades(one, SIZES[one]) for one in range(3) if videos[one] == at]
        film(
            tmp_path / f"videos/{CAMERA}/chunk-000/file-{at:03d}.mp4", list(itertools.chain(*greys))
        )
    episodes = {
        "episode_index": [0, 1, 2],
        "length": list(SIZES),
        "data/chunk_index": [0, 0, 0],
        "data/file_index": list(tables),
        f"videos/{CAMERA}/chunk_index": [0, 0, 0],
        f"videos/{CAMERA}/file_index": list(videos),
        f"videos/{CAMERA}/from_timestamp": list(starts),
        "stats/action/mean": [[0.0]] * 3,
    }
    path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(episodes), path)
    tasks = {"task_index": [0, 1], "__index_level_0__": ["red", "go green"]}
    parquet.write_table(pyarrow.table(tasks), tmp_path / "meta/tasks.parquet")
    return tmp_path


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Version 2.1: a table and a video for each episode."""
    described(tmp_path, "v2.1")
    for number, steps in enumerate(SIZES):
        path = tmp_path / f"data/chunk-000/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(rows(number, steps)), path)
        video = tmp_path / f"videos/chunk-000/{CAMERA}/episode_{number:06d}.mp4"
        film(video, shades(number, steps))
    tasks = [{"task_index": 0, "task": "red"}, {"task_index": 1, "task": "go green"}]
    (tmp_path / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return tmp_path


NUMBER = ObservationPart(name="state", kind="state", shape=(1,))
OF_VIDEOS = ObservationSpec((NUMBER, FILMED, WORDS))


@pytest.mark.parametrize("version", ["packed", "apart"])
def test_every_step_has_its_own_picture_of_a_video(
    request: pytest.FixtureRequest, version: str
) -> None:
    folder: Path = request.getfixturevalue(version)
    check_demonstrations(folder, OF_VIDEOS, 1, discrete=False)
    for number, one in enumerate(read_episodes(folder, OF_VIDEOS)):
        seen, steps = one.observation, SIZES[number]
        assert one.action[:, 0].tolist() == pytest.approx(rows(number, steps)["action"])
        assert seen["state"][:, 0].tolist() == rows(number, steps)["observation.state"]
        assert bytes(seen["instruction"][0]) == (b"go green" if number % 2 else b"red\0\0\0\0\0")
        pictures = seen["front"].astype(float)
        assert pictures.shape == (steps, 16, 24, 3)
        greys = np.array(shades(number, steps))[:, None, None, None]
        assert np.abs(pictures - greys).max() < 5  # a video loses a little


def test_a_video_that_is_not_there_or_ends_too_early_is_named(packed: Path) -> None:
    video = packed / f"videos/{CAMERA}/chunk-000/file-001.mp4"
    film(video, [*shades(1, 2), *shades(2, 6)])
    check_demonstrations(packed, OF_VIDEOS, 1, discrete=False)  # it reads no video
    with pytest.raises(DataError, match=r"file-001\.mp4' has 6 pictures from second 0\.2 .* the 7"):
        list(read_episodes(packed, OF_VIDEOS))
    video.write_bytes(b"no")
    with pytest.raises(DataError, match=r"file-001\.mp4' cannot be read"):
        list(read_episodes(packed, OF_VIDEOS))
    video.unlink()
    with pytest.raises(DataError, match=r"file-001\.mp4', the video of episode 1, is not there"):
        check_demonstrations(packed, OF_VIDEOS, 1, discrete=False)
    numbers = ObservationSpec((NUMBER,))
    assert len(list(read_episodes(packed, numbers))) == 3  # what is not wanted is not looked at


def test_pictures_of_another_size_than_the_description_says_are_refused(packed: Path) -> None:
    info = json.loads((packed / "meta/info.json").read_text())
    info["features"][CAMERA] |= {"shape": [8, 24, 3], "names": ["height", "width", "channels"]}
    (packed / "meta/info.json").write_text(json.dumps(info))
    other = ObservationSpec((ObservationPart(name="front", kind="image", shape=(8, 24, 3)),))
    with pytest.raises(DataError, match=r"are 16 x 24, but meta/info.json says 8 x 24"):
        list(read_episodes(packed, other))


def test_a_recording_that_was_cut_off_and_other_versions_are_refused(packed: Path) -> None:
    info = json.loads((packed / "meta/info.json").read_text())
    for changed, said in (
        ({"total_episodes": 4}, r"has 3 episodes and not number 3, of 4 .* cut off"),
        ({"codebase_version": "v1.6"}, r"is of version v1\.6 .* versions 2 and 3 are read"),
    ):
        (packed / "meta/info.json").write_text(json.dumps(info | changed))
        with pytest.raises(DataError, match=said):
            check_demonstrations(packed, OF_VIDEOS, 1, discrete=False)


def test_a_damaged_episode_is_named(folder: Path) -> None:
    (folder / "data/chunk-000/episode_000001.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"episode_000001\.parquet"):
        list(read_episodes(folder, SPEC))


WRITTEN = ObservationSpec(
    (
        ObservationPart(name="state", kind="state", shape=(3,)),
        ObservationPart(name="front", kind="image", shape=(4, 6, 3)),
        ObservationPart(name="grey", kind="image", shape=(4, 4)),
        WORDS,
    )
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Three episodes of this framework's own format, with what transitions have."""
    folder, drawn = tmp_path / "recorded", np.random.default_rng(0)
    folder.mkdir()
    for number, steps in enumerate(SIZES):
        seen = WRITTEN.empty(steps + 1)
        seen["state"] = drawn.normal(size=(steps + 1, 3))
        seen["front"] = drawn.integers(0, 256, (steps + 1, 4, 6, 3))
        seen["grey"] = drawn.integers(0, 256, (steps + 1, 4, 4))
        seen["instruction"] = np.frombuffer((b"go up\0\0\0", b"down\0\0\0\0")[number % 2], np.uint8)
        outcome = Outcome(np.arange(steps, dtype=np.float32), seen[-1:], number != 1)
        action = drawn.normal(size=(steps, 2)).astype(np.float32)
        write_episode(folder, number, DemonstratedEpisode(seen[:-1], action, outcome))
    write_info(
        folder,
        DemonstrationsInfo(
            env="Reach-v0", observation=WRITTEN, action_size=2, episodes=3, transitions=True
        ),
    )
    return folder


def test_what_is_written_is_read_back_bit_for_bit(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write_lerobot(recorded, out, fps=20, file_bytes=800) == sum(SIZES)
    assert len(list(out.glob("data/*/*.parquet"))) == 2  # a table ends when it has so many bytes
    check_demonstrations(out, WRITTEN, 2, discrete=False)
    pairs = zip(read_episodes(recorded), read_episodes(out, WRITTEN), strict=True)
    for one, other in pairs:
        assert np.array_equal(one.action, other.action)
        assert one.observation.tobytes() == other.observation.tobytes()


def test_a_reward_that_is_of_the_last_step_alone_is_not_left_out_without_a_word(
    recorded: Path, tmp_path: Path
) -> None:
    """The second episode was cut, and paid in its last step, which is left out then."""
    out = tmp_path / "out"
    write_lerobot(recorded, out, fps=20)
    said = r"all of its reward \(1\) is that of its last step"
    with pytest.raises(DataError, match=said):
        list(read_episodes(out, WRITTEN, transitions=True))
    with pytest.raises(DataError, match=said):
        check_demonstrations(out, WRITTEN, 2, discrete=False, transitions=True)


def test_a_written_data_set_has_what_others_look_for(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_lerobot(recorded, out, fps=20)
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 20, "Reach-v0")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 14, 2)
    assert info["features"]["observation.images.grey"]["shape"] == [4, 4, 1]
    table = parquet.read_table(out / "data/chunk-000/file-000.parquet").to_pydict()
    assert table["index"] == list(range(14))
    assert table["frame_index"] == [*range(5), *range(2), *range(7)]
    assert table["timestamp"][6] == pytest.approx(1 / 20)
    assert table["task_index"] == [0] * 5 + [1] * 2 + [0] * 7
    assert [at for at, done in enumerate(table["next.done"]) if done] == [4, 13]  # one was only cut
    episodes = parquet.read_table(out / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [one["dataset_from_index"] for one in episodes] == [0, 5, 7]
    assert [one["tasks"] for one in episodes] == [["go up"], ["down"], ["go up"]]
    figures = json.loads((out / "meta/stats.json").read_text())
    shown = np.concatenate([one.observation for one in read_episodes(recorded)])
    pixels = shown["front"].astype(np.float64).reshape(-1, 3) / 255
    for name, rows, got in (
        ("state", shown["state"].astype(np.float64), figures["observation.state"]),
        ("front", pixels, figures["observation.images.front"]),
    ):
        for figure, expected in (
            ("mean", rows.mean(0)),
            ("std", rows.std(0)),
            ("min", rows.min(0)),
            ("max", rows.max(0)),
            ("q50", np.quantile(rows, 0.5, axis=0)),
        ):
            found = np.array(got[figure]).reshape(-1)
            np.testing.assert_allclose(found, expected, atol=1e-6 if name == "state" else 2 / 255)
        assert got["count"] == [14]


def test_a_recording_of_lerobot_that_was_killed_is_none(recorded: Path, tmp_path: Path) -> None:
    """What describes it is written last."""
    (recorded / "episode_000002.npz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"episode_000002\.npz"):
        write_lerobot(recorded, tmp_path / "out", fps=20)
    with pytest.raises(DataError, match="holds no demonstrations"):
        check_demonstrations(tmp_path / "out", WRITTEN, 2, discrete=False)


def test_demonstrations_leave_by_the_command(
    recorded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def told(*arguments: object) -> str:
        code = main(["export", *map(str, arguments)])
        shown = capsys.readouterr()
        assert code == (0 if not shown.err else 2)
        return shown.err or shown.out

    assert "say --to lerobot" in told(recorded, out)
    assert "--dtype: is of a checkpoint" in told(recorded, out, "--dtype", "float32")
    assert "--fps: is of demonstrations" in told(folder, out, "--fps", 3)
    assert "14 steps, a data set in LeRobot's format" in told(recorded, out, "--to", "lerobot")
    assert "out exists already" in told(recorded, out, "--to", "lerobot")


def test_choices_are_written_and_read_back(tmp_path: Path) -> None:
    spec = ObservationSpec((NUMBER,))
    seen = spec.empty(4)
    seen[:] = 0.5
    source, out = tmp_path / "choices", tmp_path / "out"
    source.mkdir()
    outcome = Outcome(np.ones(4, np.float32), seen[:1], True)
    write_episode(source, 0, DemonstratedEpisode(seen, np.array([0, 2, 1, 1]), outcome))
    write_info(
        source,
        DemonstrationsInfo(
            env="Cart", observation=spec, action_size=1, episodes=1, discrete=True, transitions=True
        ),
    )
    write_lerobot(source, out, fps=5)
    check_demonstrations(out, spec, 1, discrete=True)
    [one] = read_episodes(out, spec)
    assert one.action.dtype == np.int64
    assert one.action.tolist() == [0, 2, 1, 1]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((WORDS, ObservationPart(name="hint", kind="text", shape=(6,))), "has one text for a step"),
        ((ObservationPart(name="front", kind="image", shape=(4, 4, 6)),), "with 6 channels"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(
    tmp_path: Path, parts: tuple[ObservationPart, ...], said: str
) -> None:
    info = DemonstrationsInfo(
        env="X", observation=ObservationSpec(parts), action_size=1, episodes=0
    )
    write_info(tmp_path, info)
    with pytest.raises(DataError, match=said):
        write_lerobot(tmp_path, tmp_path / "out", fps=5)


def test_pictures_become_those_of_the_environment_or_are_named(folder: Path) -> None:
    """Palettes and alpha become colours; 16 bits and other sizes are no pictures of 8 bits."""
    path = folder / "data/chunk-000/episode_000000.parquet"
    table = parquet.read_table(path).to_pydict()

    def changed(picture: Image.Image) -> Any:
        file = io.BytesIO()
        picture.save(file, "png")
        cells = [{"bytes": file.getvalue(), "path": ""}] * 3
        parquet.write_table(pyarrow.table(table | {"observation.images.front": cells}), path)
        return next(read_episodes(folder, SPEC)).observation["front"]

    plain = Image.fromarray(pictures(7, 1)[0])
    assert np.array_equal(changed(plain.convert("RGBA"))[1], pictures(7, 1)[0])
    few = plain.convert("P")
    assert np.array_equal(changed(few)[0], np.asarray(few.convert("RGB")))
    with pytest.raises(DataError, match=r"episode_000000.* mode 'I;16'"):
        changed(Image.fromarray(np.full((4, 4), 1000, np.uint16)))
    with pytest.raises(DataError, match=r"episode_000000.*'front' are \[8, 8, 3\], but meta/info"):
        changed(plain.resize((8, 8)))


def test_tasks_that_are_damaged_or_longer_than_a_text_are_named(folder: Path) -> None:
    longer = ObservationPart(name="instruction", kind="text", shape=(4,))
    with pytest.raises(DataError, match=r"task 'go green' has 8 bytes, but .* at most 4"):
        list(read_episodes(folder, ObservationSpec((STATE, longer))))
    (folder / "meta/tasks.jsonl").write_text('{"task_index": 0, "ta')
    with pytest.raises(DataError, match=r"the tasks in .*meta"):
        list(read_episodes(folder, SPEC))
