"""Files of demonstrations that are damaged are found before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    check_demonstrations,
    read_episodes,
    write_episode,
    write_info,
)
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec

SPEC = ObservationSpec(
    (
        ObservationPart(name="camera", kind="image", shape=(4, 4, 3)),
        ObservationPart(name="state", kind="state", shape=(2,)),
    )
)
STEPS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two episodes."""
    for number in range(2):
        seen = SPEC.empty(STEPS)
        seen["camera"], seen["state"] = number, 0.5
        write_episode(tmp_path, number, DemonstratedEpisode(seen, np.zeros((STEPS, 3), np.float32)))
    info = DemonstrationsInfo(env="table", observation=SPEC, action_size=3, episodes=2)
    write_info(tmp_path, info)
    return tmp_path


def check(folder: Path, *, transitions: bool = False) -> DemonstrationsInfo:
    bounds = [(-1.0, 1.0)] * 3
    return check_demonstrations(
        folder, SPEC, 3, discrete=False, bounds=bounds, transitions=transitions
    )


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
        ({"action": np.full((STEPS, 3), "0.5")}, "its actions are <U3 .* not 3 numbers each"),
        ({"action": np.zeros((0, 3), np.float32)}, "it has no steps"),
        (
            {"state": np.full((STEPS, 2), np.inf)},
            "'state' has NaN or infinity as float32, at step 0",
        ),
        (
            {"action": np.eye(STEPS, 3, -2) * 1.5},
            r"step 2, \[1\.5, 0\.0, 0\.0\], lies outside of the policy's range \[-1, 1\]",
        ),
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


def test_a_choice_that_there_is_not_is_named_with_its_step(tmp_path: Path) -> None:
    info = DemonstrationsInfo(
        env="table", observation=SPEC, action_size=1, discrete=True, episodes=1
    )
    seen = SPEC.empty(STEPS)
    seen["camera"], seen["state"] = 0, 0.0
    write_info(tmp_path, info)
    for last, fits in ((2, True), (3, False), (-1, False)):
        write_episode(tmp_path, 0, DemonstratedEpisode(seen, np.array([0, 1, 2, 0, last])))
        if fits:
            check_demonstrations(tmp_path, SPEC, 1, discrete=True, bounds=[(0.0, 2.0)])
            continue
        with pytest.raises(DataError, match=rf"000000\.npz' .*step 4, \[{last}\.0\], lies outside"):
            check_demonstrations(tmp_path, SPEC, 1, discrete=True, bounds=[(0.0, 2.0)])


def test_actions_of_another_mode_or_other_bounds_are_refused(folder: Path) -> None:
    info = DemonstrationsInfo(
        env="table", observation=SPEC, action_size=3, episodes=2, bounds=((-0.1, 0.1),) * 3
    )
    write_info(folder, info)
    with pytest.raises(DataError, match=r"within \[-0\.1, 0\.1\], but .* within \[-1, 1\]: record"):
        check(folder)
    assert check_demonstrations(folder, SPEC, 3, discrete=False, bounds=info.bounds) == info


def test_a_bound_that_is_no_float32_holds_its_float32(folder: Path) -> None:
    assert float(np.float32(0.1)) > 0.1
    seen = SPEC.empty(STEPS)
    seen["camera"], seen["state"] = 0, 0.0
    write_episode(folder, 0, DemonstratedEpisode(seen, np.full((STEPS, 3), 0.1, np.float32)))
    check_demonstrations(folder, SPEC, 3, discrete=False, bounds=[(-0.1, 0.1)] * 3)
    beyond = np.nextafter(np.float32(0.1), np.float32(1))
    write_episode(folder, 0, DemonstratedEpisode(seen, np.full((STEPS, 3), beyond, np.float32)))
    with pytest.raises(DataError, match="lies outside"):
        check_demonstrations(folder, SPEC, 3, discrete=False, bounds=[(-0.1, 0.1)] * 3)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """One episode with all that a transition has."""
    seen, last = SPEC.empty(STEPS), SPEC.empty(1)
    seen["camera"], seen["state"] = 1, 0.5
    last["camera"], last["state"] = 2, 0.75
    outcome = Outcome(np.arange(STEPS, dtype=np.float32), last, terminated=True)
    write_episode(tmp_path, 0, DemonstratedEpisode(seen, np.zeros((STEPS, 3), np.float32), outcome))
    info = DemonstrationsInfo(
        env="table", observation=SPEC, action_size=3, episodes=1, transitions=True
    )
    write_info(tmp_path, info)
    return tmp_path


def test_what_followed_the_actions_is_kept(whole: Path) -> None:
    assert check(whole, transitions=True).transitions
    [episode] = read_episodes(whole)
    assert episode.outcome is not None
    assert episode.outcome.reward.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert episode.outcome.last_observation["camera"].shape == (1, 4, 4, 3)
    assert episode.outcome.last_observation["state"].tolist() == [[0.75, 0.75]]
    assert episode.outcome.terminated is True


def test_a_folder_of_an_earlier_version_is_cloned_from_and_has_no_transitions(folder: Path) -> None:
    path = folder / "demonstrations.json"
    info = json.loads(path.read_bytes())
    del info["transitions"]
    path.write_text(json.dumps(info))
    assert check(folder).episodes == 2
    assert [one.outcome for one in read_episodes(folder)] == [None, None]
    with pytest.raises(DataError, match=r"have no rewards, .*: record them again"):
        check(folder, transitions=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"next.reward": None}, "next.reward"),
        ({"next.reward": np.zeros(4, np.float32)}, r"is float32 \[4\], not float32 \[5\]"),
        ({"next.reward": np.array([0, 0, np.nan, 0, 0])}, "NaN or infinity as float32, at step 2"),
        ({"next.terminated": np.zeros(STEPS, np.bool_)}, r"bool \[5\], not one truth value"),
        ({"next.terminated": np.float32(0.0)}, r"float32 \[\], not one truth value"),
        ({"last.state": np.zeros((2, 2), np.float32)}, r"'last.state' is float32 \[2, 2\], not"),
        ({"last.state": np.full((1, 2), np.inf)}, "'last.state' has NaN or infinity"),
        ({"last.camera": None}, "last.camera"),
    ],
)
def test_an_outcome_of_another_form_is_named(
    whole: Path, change: dict[str, Any], said: str
) -> None:
    path = whole / "episode_000000.npz"
    arrays = dict(np.load(path)) | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=rf"episode_000000\.npz' is no episode.*{said}"):
        check(whole)
