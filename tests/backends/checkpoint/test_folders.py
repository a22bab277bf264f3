"""Which folders stay, which go, and who completes a checkpoint."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rlinf_async.backends.checkpoint import folders
from rlinf_async.backends.checkpoint.folders import (
    METADATA,
    CheckpointError,
    FileRecord,
    RankRecord,
    read_metadata,
)


def complete(checkpoints: Path, *versions: int) -> None:
    for version in versions:
        folder = checkpoints / f"version-{version:06d}"
        folder.mkdir()
        (folder / METADATA).write_text("{}")
        (folder / "rank_0_of_1.safetensors").write_bytes(b"weights")


def versions(checkpoints: Path) -> list[int]:
    return sorted(int(one.name.partition("-")[2]) for one in checkpoints.glob("version-*"))


def test_the_newest_so_many_are_kept_and_later_ones_left_alone(tmp_path: Path) -> None:
    complete(tmp_path, 2, 4, 6, 8)
    folders.keep_newest(tmp_path, "version-000006", 2)
    assert versions(tmp_path) == [4, 6, 8]


def test_a_checkpoint_that_the_run_never_resumed_from_displaces_no_older_one(
    tmp_path: Path,
) -> None:
    complete(tmp_path, 2, 4, 5, 6, 8)
    folders.keep_newest(tmp_path, "version-000006", 2, previous="version-000004")
    assert versions(tmp_path) == [4, 6, 8]
    folders.keep_newest(tmp_path, "version-000006", 2, previous="version-000006")
    assert versions(tmp_path) == [4, 6, 8]


def test_what_somebody_else_has_put_beside_them_is_not_a_runs_to_remove(tmp_path: Path) -> None:
    complete(tmp_path, 2, 4, 6)
    (tmp_path / "version-000002").rename(tmp_path / "version-000002-four")
    folders.keep_newest(tmp_path, "version-000006", 1)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["version-000002-four", "version-000006"]


def test_a_checkpoint_that_is_being_read_is_removed_only_afterwards(tmp_path: Path) -> None:
    complete(tmp_path, 2, 4, 6)
    with (
        folders.being_read(tmp_path / "version-000002"),
        folders.being_read(tmp_path / "version-000002"),
    ):
        folders.keep_newest(tmp_path, "version-000006", 1)
        assert versions(tmp_path) == [2, 6]
        assert (tmp_path / "version-000002" / "rank_0_of_1.safetensors").exists()
    folders.keep_newest(tmp_path, "version-000006", 1)
    assert versions(tmp_path) == [6]


def test_a_checkpoint_stays_while_one_inside_it_is_read(tmp_path: Path) -> None:
    complete(tmp_path, 2)
    folder = tmp_path / "version-000002"
    (folder / "critic").mkdir()
    (folder / "critic" / METADATA).write_text("{}")
    with folders.being_read(folder / "critic"):
        assert not folders.remove(folder)
        assert (folder / "critic" / METADATA).exists()
    assert folders.remove(folder)


def test_what_is_replaced_while_it_is_read_goes_with_the_next_one(tmp_path: Path) -> None:
    path, previous = tmp_path / "checkpoint", tmp_path / ".checkpoint.previous"

    def write() -> None:
        folders.fresh_staging(path)
        folders.rank_done(path, 0, 1, record(0))

    write()
    with folders.being_read(path):
        write()
        assert (previous / METADATA).exists()
        folders.clean(tmp_path)
        assert (previous / METADATA).exists()
    write()
    assert (path / METADATA).exists()
    assert not previous.exists()


def test_who_comes_to_read_what_was_removed_is_told(tmp_path: Path) -> None:
    complete(tmp_path, 2)
    folder = tmp_path / "version-000002"
    assert folders.remove(folder)
    with pytest.raises(CheckpointError, match="is gone"), folders.being_read(folder):
        pass
    folder.mkdir()
    with pytest.raises(CheckpointError, match="was removed before"), folders.being_read(folder):
        pass


def test_what_a_killed_run_left_is_cleaned_and_what_it_replaced_comes_back(tmp_path: Path) -> None:
    complete(tmp_path, 2, 4)
    (tmp_path / "version-000004").rename(tmp_path / ".version-000004.previous")
    complete(tmp_path, 6)
    (tmp_path / "version-000006").rename(tmp_path / ".version-000002.previous")
    for left in (".version-000008.partial", ".version-000008.beside", "..version-8.beside.partial"):
        (tmp_path / left).mkdir()
    (tmp_path / "notes").mkdir()
    folders.clean(tmp_path)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["notes", "version-000002", "version-000004"]
    folders.clean(tmp_path / "nowhere")


def record(rank: int) -> RankRecord:
    return RankRecord(tensors=FileRecord(f"t{rank}", 1, 2), own=FileRecord(f"o{rank}", 3, 4))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_rank_completes_the_folder_whichever_it_is(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    path = tmp_path / "checkpoint"
    folders.fresh_staging(path)
    done = [folders.rank_done(path, rank, 3, record(rank)) for rank in order]
    assert done == [False, False, True]
    assert [one.name for one in read_metadata(path).tensors] == ["t0", "t1", "t2"]  # type: ignore[union-attr]
    assert [one.name for one in path.iterdir()] == [METADATA]


def test_a_rank_whose_folder_is_completed_as_soon_as_its_note_is_seen_is_done_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    folders.fresh_staging(path)
    rename, other = os.rename, []

    def renaming(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name == "rank_1_of_2.json":
            other.append(folders.rank_done(path, 0, 2, record(0)))

    monkeypatch.setattr(os, "rename", renaming)
    assert not folders.rank_done(path, 1, 2, record(1))
    assert other == [True]
    assert len(read_metadata(path).own) == 2  # type: ignore[union-attr]


def test_ranks_that_are_done_at_the_same_moment_complete_it_once(tmp_path: Path) -> None:
    for attempt in range(20):
        path = tmp_path / str(attempt)
        folders.fresh_staging(path)
        together = threading.Barrier(4)
        done: list[bool] = []

        def write(rank: int, path: Path = path, done: list[bool] = done) -> None:
            together.wait(30)  # noqa: B023
            done.append(folders.rank_done(path, rank, 4, record(rank)))

        ranks = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(30)
        assert sorted(done) == [False, False, False, True]
        assert len(read_metadata(path).own) == 4  # type: ignore[union-attr]


def test_a_run_names_its_newest_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    complete(checkpoints, 2, 4)
    (checkpoints / folders.LATEST).write_text('{"checkpoint": "version-000002", "version": 2}')
    expected = checkpoints / "version-000002"
    assert folders.newest_of_run(tmp_path) == expected
    assert folders.newest_of_run(checkpoints) == expected
    assert folders.newest_of_run(checkpoints / "version-000004") == checkpoints / "version-000004"
    (checkpoints / folders.LATEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"latest\.json cannot be read"):
        folders.newest_of_run(tmp_path)
