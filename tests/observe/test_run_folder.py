"""A run folder belongs to one run, and to one process at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.run_folder import RunFolder
from tests.observe.holding import holding
from tests.observe.test_files import full_disk_after

CONFIG = "[train]\nseed = 0\n"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs in ``tmp_path / "run"``."""
    with holding(tmp_path / "run") as process:
        yield process


def test_a_fresh_folder_is_made_with_its_parents_and_records_the_configuration(
    tmp_path: Path,
) -> None:
    with RunFolder.create(tmp_path / "runs" / "a", config_text=CONFIG) as folder:
        assert folder.config.read_text() == CONFIG
        assert folder.checkpoints.is_dir()
        assert folder.tensorboard.is_dir()
        assert not folder.resumed
        assert folder.notes == ()


@pytest.mark.parametrize("there_before", [True, False])
def test_a_run_that_could_not_begin_leaves_the_place_as_it_was(
    tmp_path: Path, there_before: bool
) -> None:
    place = tmp_path / "a"
    if there_before:
        place.mkdir()
    folder = RunFolder.create(place, config_text=CONFIG)
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config.json").touch()
    folder.discard()
    assert place.exists() == there_before
    assert not there_before or not any(place.iterdir())
    RunFolder.create(place, config_text=CONFIG).close()


def test_a_run_that_is_gone_on_with_is_never_discarded(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config_text=CONFIG).close()
    again = RunFolder.create(tmp_path, config_text=CONFIG, resume=True)
    again.discard()
    assert again.config.read_text() == CONFIG
    RunFolder.create(tmp_path, config_text=CONFIG, resume=True).close()  # and is let go of


def test_the_layout_has_the_documented_names(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a", config_text=CONFIG) as folder:
        named = (
            folder.metrics,
            folder.learning_curve,
            folder.video,
            folder.trace,
            folder.timeline,
            folder.summary,
            folder.workers_log,
        )
        assert [path.name for path in named] == [
            "metrics.csv",
            "learning_curve.png",
            "video.mp4",
            "trace.json.gz",
            "timeline.png",
            "summary.json",
            "workers.log",
        ]
        assert all(path.parent == folder.path for path in named)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, config_text=CONFIG) as folder:
        assert not folder.resumed


def test_a_folder_in_which_only_an_empty_folder_is_is_taken(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    out.mkdir()
    (out / "checkpoints").symlink_to(disk, target_is_directory=True)
    with RunFolder.create(out, config_text=CONFIG) as folder:
        assert not folder.resumed
    (out / "run.json").unlink()
    (disk / "mine").touch()
    with pytest.raises(RunFolderError, match="it holds 'checkpoints'"):
        RunFolder.create(out, config_text=CONFIG)


def test_a_folder_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for resume in (False, True):
        with pytest.raises(RunFolderError, match=r"not a run folder \(it holds 'thesis\.tex'\)"):
            RunFolder.create(tmp_path, config_text=CONFIG, resume=resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_is_not_overwritten_without_resume(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config_text=CONFIG).close()
    with pytest.raises(RunFolderError, match="already holds a run; go on with it") as caught:
        RunFolder.create(tmp_path, config_text=CONFIG)
    assert str(tmp_path) in str(caught.value)


def test_a_run_can_be_resumed_again_and_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config_text=CONFIG).close()
    for _ in range(2):
        with RunFolder.create(tmp_path, config_text=CONFIG, resume=True) as folder:
            assert folder.resumed
            assert folder.notes == ()
    assert len(msgspec.json.decode((tmp_path / "run.json").read_bytes())["starts"]) == 3


def test_a_changed_configuration_is_noted_and_the_old_one_kept(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, config_text="first").close()
    RunFolder.create(tmp_path, config_text="second", resume=True).close()
    with RunFolder.create(tmp_path, config_text="third", resume=True) as folder:
        assert "config.2.toml" in folder.notes[0]
    kept = {path.name: path.read_text() for path in tmp_path.glob("config*.toml")}
    assert kept == {"config.toml": "third", "config.1.toml": "first", "config.2.toml": "second"}


def test_resuming_what_never_began_starts_fresh_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".partial-4711-run.json").write_text("{")
    for name in ("run", "absent"):
        with RunFolder.create(tmp_path / name, config_text=CONFIG, resume=True) as folder:
            assert not folder.resumed
            assert "nothing to resume" in folder.notes[0]


def test_two_processes_never_share_a_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(RunFolderError, match="another process is running in"):
        RunFolder.create(tmp_path / "run", config_text=CONFIG, resume=True)


def test_a_killed_process_lets_go_of_its_folder(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    with RunFolder.create(tmp_path / "run", config_text=CONFIG, resume=True) as folder:
        assert folder.resumed


def test_a_marker_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(RunFolderError, match="is not the marker of a rlinf_async run"):
        RunFolder.create(tmp_path, config_text=CONFIG, resume=True)


def test_a_path_below_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot make the run folder .*: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", config_text=CONFIG)


def test_a_folder_on_a_full_disk_is_a_clear_error_and_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full_disk_after(0))
        with pytest.raises(RunFolderError, match=r"cannot write .*run\.json: No space left"):
            RunFolder.create(tmp_path, config_text=CONFIG)
    RunFolder.create(tmp_path, config_text=CONFIG).close()


STATUS = b'{"shown": {"run": "a", "workers": [{"name": "Env[0]", "restarts": 2}, {"name": "B"}]}}'
SUMMARY = b'{"run": "a", "outcome": "terminated", "restarts": {"Env[0]": 1, "Actor[0]": 3}}'


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({}, {}),
        ({"summary.json": SUMMARY}, {"Env[0]": 1, "Actor[0]": 3}),
        ({"summary.json": SUMMARY, "status.json": STATUS}, {"Env[0]": 2, "Actor[0]": 3}),
        ({"summary.json": SUMMARY, "status.json": b"{"}, {"Env[0]": 1, "Actor[0]": 3}),
    ],
    ids=["nothing", "ended", "killed", "torn"],
)
def test_restarts_of_earlier_starts_are_known_however_those_ended(
    tmp_path: Path, files: dict[str, bytes], known: dict[str, int]
) -> None:
    RunFolder.create(tmp_path / "a", config_text="").close()
    for name, content in files.items():
        (tmp_path / "a" / name).write_bytes(content)
    with RunFolder.create(tmp_path / "a", config_text="", resume=True) as folder:
        assert folder.restarts_before == known
