"""Of a run in another process it is known whether it goes on, and only that process is stopped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.progress import ProgressState
from rlinf_async.observe.run_folder import RunFolder, newest_run
from rlinf_async.observe.run_lock import Driver, LockHolder, LockState, look_at_lock
from rlinf_async.observe.status import RunResult, Status, look_at_run, state_of, write_status
from tests.observe.holding import holding
from tests.observe.test_files import full_disk_after

ELSEWHERE = LockHolder(host="alpha", pid=7, boot="another kernel")
SHOWN = ProgressState(
    run="reach", iteration=3, figures=[], channels=[], edges=[], workers=[], waits=[]
)
STATUS = Status(time=100.0, ending=False, grace_seconds=25.0, shown=SHOWN)
ENDING = msgspec.structs.replace(STATUS, ending=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def driver(run: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that holds the folder `run`."""
    with holding(run) as process:
        yield process


def own_words(run: Path, **changes: object) -> None:
    """Change what the holder of the folder has written about itself."""
    holder = look_at_lock(run).holder
    assert holder is not None
    (run / ".lock").write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, **changes)))


@pytest.mark.parametrize(
    ("lock", "status", "state"),
    [
        (LockState(ELSEWHERE, held=True, pid=0), None, "starting"),
        (LockState(ELSEWHERE, held=True, pid=0), STATUS, "running"),
        (LockState(None, held=True, pid=7), STATUS, "running"),
        (LockState(ELSEWHERE, held=True, pid=0), ENDING, "ending"),
        (LockState(ELSEWHERE, held=False, pid=0), STATUS, "killed"),
        (LockState(ELSEWHERE, held=False, pid=0), None, "killed"),
        (LockState(None, held=False, pid=0), None, "ended"),
        (LockState(None, held=False, pid=0), STATUS, "ended"),
    ],
)
def test_lock_and_status_say_together_how_a_run_goes_on(
    tmp_path: Path, lock: LockState, status: Status | None, state: str
) -> None:
    (tmp_path / "summary.json").write_text(
        '{"outcome": "finished", "iterations": 3, "train_seconds": 1.5, "of_its_job": 7}'
    )
    seen = state_of(tmp_path, lock, status, now=90.0)
    result = RunResult(outcome="finished", iterations=3, train_seconds=1.5)
    assert seen.state == state
    assert seen.result == (result if state == "ended" else None)
    assert seen.seconds_ago in (None, 0.0), "the clock of another host may be ahead"


def test_a_run_is_followed_from_its_start_to_its_end(
    run: Path, driver: subprocess.Popen[str]
) -> None:
    seen = look_at_run(run)
    assert (seen.state, seen.pid, seen.here) == ("starting", driver.pid, True)
    assert look_at_lock(run).pid == driver.pid
    write_status(run / "status.json", STATUS)
    assert look_at_run(run).status == STATUS
    driver.communicate()
    assert look_at_run(run).state == "ended"
    assert not (run / "status.json").exists()


def test_a_killed_run_is_known_as_such_until_it_is_started_again(
    run: Path, driver: subprocess.Popen[str]
) -> None:
    write_status(run / "status.json", STATUS)
    driver.kill()
    driver.wait()
    seen = look_at_run(run)
    assert (seen.state, seen.pid, seen.status) == ("killed", driver.pid, STATUS)
    with pytest.raises(RunFolderError, match="no run goes on in"):
        Driver(run)
    with RunFolder.create(run, config_text="held", resume=True) as folder:
        assert not folder.status.exists(), "it tells of a start before"
    assert look_at_run(run).state == "ended"


def test_the_process_that_holds_the_folder_is_stopped(
    run: Path, driver: subprocess.Popen[str]
) -> None:
    own_words(run, pid=1)  # its number in a container
    with Driver(run) as holder:
        assert not holder.wait(0.0)
        holder.terminate()
        assert holder.wait(300.0)
    assert driver.wait() == -15


def test_a_process_that_holds_the_folder_no_longer_is_not_signalled(
    run: Path, driver: subprocess.Popen[str]
) -> None:
    with Driver(run) as holder:
        driver.communicate()
        with holding(run.with_name("other")), pytest.raises(RunFolderError, match="no run goes on"):
            holder.terminate()
        assert holder.wait(0.0)
    assert driver.returncode == 0


def test_a_process_of_another_host_is_not_signalled(
    run: Path, driver: subprocess.Popen[str]
) -> None:
    own_words(run, host="alpha", boot="another kernel")
    with pytest.raises(RunFolderError, match=rf"process {driver.pid} on alpha runs in .* there"):
        Driver(run)
    assert look_at_run(run).here is False
    driver.communicate()
    assert driver.returncode == 0


def test_a_status_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    write_status(path, STATUS)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full_disk_after(2))
        write_status(path, ENDING)
    write_status(tmp_path / "absent" / "status.json", STATUS)
    assert msgspec.json.decode(path.read_bytes(), type=Status) == STATUS
    assert [*tmp_path.iterdir()] == [path]


def test_the_newest_run_is_the_one_that_was_started_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "absent") is newest_run(tmp_path) is None
    for name in ("b", "a"):
        RunFolder.create(tmp_path / name, config_text="").close()
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "run.json").write_text("not ours")
    assert newest_run(tmp_path) == tmp_path / "a"
    RunFolder.create(tmp_path / "b", config_text="", resume=True).close()
    assert newest_run(tmp_path) == tmp_path / "b"
