"""The progress of a run, and the checkpoint that it names."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import threading
from typing import Any

import pytest

from rlinf_async.backends.checkpoint import folders
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.files import RunFolderError
from rlinf_async.runtime.jobs.checkpoints import load_progress, make_latest
from rlinf_async.runtime.jobs.embodied.run import EmbodiedProgress, merged


def report(iteration: int, **fields: Any) -> TrainReport:
    values: dict[str, Any] = {
        "metrics": {"loss": 1.0},
        "env_steps": 10,
        "lag_mean": 0.0,
        "lag_max": 0,
        "duplicates": 0,
        **fields,
    }
    return TrainReport(iteration=iteration, version=iteration + 1, **values)


def test_the_reports_of_all_ranks_make_one() -> None:
    first = merged(
        [
            report(0, lag_mean=1.0, lag_max=1, episode_return=[1.0], duplicates=1),
            report(0, lag_mean=2.0, lag_max=3, episode_return=[2.0, 3.0], duplicates=2),
        ]
    )
    assert (first.iteration, first.env_steps, first.lag_mean, first.lag_max) == (0, 20, 1.5, 3)
    assert first.episode_return == [1.0, 2.0, 3.0]
    assert first.duplicates == 3


def test_the_metrics_of_all_ranks_are_averaged() -> None:
    parts = [report(0, metrics={"loss": loss, "lr": 0.1}) for loss in (1.0, 2.0)]
    assert merged(parts).metrics == {"loss": 1.5, "lr": 0.1}


def test_every_second_trajectory_is_counted_once() -> None:
    progress = EmbodiedProgress()
    for iteration, duplicates in enumerate([0, 2, 0, 1]):
        progress.take(report(iteration, duplicates=duplicates), 1.0, window=2)
    assert (progress.version, progress.env_steps, progress.duplicates) == (4, 40, 3)


def test_only_the_last_episodes_are_kept() -> None:
    progress = EmbodiedProgress()
    progress.take(report(0, episode_return=[1.0, 2.0], episode_success=[True]), 1.0, window=2)
    progress.take(report(1, episode_return=[3.0]), 1.0, window=2)
    assert (progress.returns, progress.successes, progress.episodes) == ([2.0, 3.0], [True], 3)


@dataclasses.dataclass
class Checkpoints:
    """A folder of them, as actors leave them."""

    path: pathlib.Path

    def write(self, *versions: int) -> None:
        for version in versions:
            (self.path / f"version-{version:06d}").mkdir()

    def keep(self, version: int, count: int) -> list[int]:
        """Make a version the latest; the versions that are there then."""
        folder = f"{self.path}/version-{version:06d}"
        progress = EmbodiedProgress(version=version).at(folder)
        asyncio.run(make_latest(self.path, folder, progress, count))
        return sorted(int(one.name.partition("-")[2]) for one in self.path.glob("version-*"))


@pytest.fixture
def checkpoints(tmp_path: pathlib.Path) -> Checkpoints:
    return Checkpoints(tmp_path)


def test_the_newest_checkpoints_are_kept(checkpoints: Checkpoints) -> None:
    checkpoints.write(2, 4, 6)
    assert checkpoints.keep(6, 2) == [4, 6]


def test_the_latest_checkpoint_is_kept_though_the_next_is_already_there(
    checkpoints: Checkpoints,
) -> None:
    checkpoints.write(2, 4, 6)
    assert checkpoints.keep(4, 1) == [4, 6]
    progress = load_progress(checkpoints.path, EmbodiedProgress)
    assert progress is not None
    assert (progress.version, progress.checkpoint) == (4, "version-000004")


def test_a_checkpoint_that_was_never_named_the_latest_displaces_none_that_was(
    checkpoints: Checkpoints,
) -> None:
    checkpoints.write(2, 4)
    checkpoints.keep(2, 2)
    checkpoints.keep(4, 2)
    checkpoints.write(5)  # the run is killed before it is named, and goes on from version 4
    checkpoints.write(6)
    assert checkpoints.keep(6, 2) == [4, 6]


@pytest.mark.parametrize("left", [".version-000004.partial", None])
def test_a_checkpoint_that_is_not_complete_does_not_become_the_latest(
    checkpoints: Checkpoints, left: str | None
) -> None:
    checkpoints.write(2)
    checkpoints.keep(2, 1)
    if left is not None:  # of ranks that write elsewhere, beside what was there before
        checkpoints.write(4)
        (checkpoints.path / left).mkdir()
    with pytest.raises(RunFolderError, match=r"version-000004 is not complete.*the same disk"):
        checkpoints.keep(4, 1)
    progress = load_progress(checkpoints.path, EmbodiedProgress)
    assert progress is not None
    assert progress.checkpoint == "version-000002"


def test_old_checkpoints_are_removed_beside_the_event_loop(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing = list[threading.Thread]()

    def remove(folder: pathlib.Path) -> bool:
        removing.append(threading.current_thread())
        return False

    monkeypatch.setattr(folders, "remove", remove)
    checkpoints.write(2, 4)
    checkpoints.keep(4, 1)
    assert len(removing) == 1
    assert removing[0] is not threading.current_thread()


def test_a_run_without_a_latest_checkpoint_begins_anew(checkpoints: Checkpoints) -> None:
    checkpoints.write(2)
    assert load_progress(checkpoints.path, EmbodiedProgress) is None


@pytest.mark.parametrize("content", [b"{", b"[]", EmbodiedProgress().at("gone")])
def test_a_damaged_latest_json_is_an_error_that_names_it(
    checkpoints: Checkpoints, content: bytes
) -> None:
    note = checkpoints.path / "latest.json"
    note.write_bytes(content)
    with pytest.raises(RunFolderError, match=str(note)):
        load_progress(checkpoints.path, EmbodiedProgress)
