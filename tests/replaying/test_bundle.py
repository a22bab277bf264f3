"""A bundle has what one worker needs around a crash, and is played elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlinf_async import Cluster, Restart, WorkerError, run
from rlinf_async.cli import main
from rlinf_async.config import UsageError
from rlinf_async.replaying import bundle_run, opened, replay
from rlinf_async.replaying.bundle import SUFFIX
from tests.replaying.conftest import LIMIT
from tests.replaying.test_replay import fail
from tests.replaying.workers import Adder, Number


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recorded run whose worker fails in iteration 3."""
    folder = tmp_path_factory.mktemp("failed")
    run(fail(folder))
    return folder


def test_a_bundle_around_a_crash_fails_as_the_run_did(failed: Path, tmp_path: Path) -> None:
    made = bundle_run(failed, out=tmp_path / f"crash{SUFFIX}")
    assert made.manifest.worker == "Adder[0]"
    assert made.manifest.error == "ValueError: a number of iteration 3 is negative"
    shutil.copy(made.path, tmp_path / f"elsewhere{SUFFIX}")
    report = run(replay(tmp_path / f"elsewhere{SUFFIX}", "adder"))
    assert report.equal
    assert report.error == made.manifest.error
    with opened(made.path) as source:
        assert {one.name for one in source.folder.iterdir()} >= {"README.md", "recording"}
        assert "is negative" in (source.folder / "README.md").read_text()


def test_a_death_that_the_run_survived_is_not_its_crash(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.process() as cluster:
            cluster.record_into(tmp_path / "recording" / "1", ["all"], LIMIT)
            numbers = cluster.channel(Number, name="numbers")
            sums = cluster.channel(Number, name="sums", capacity=64)
            others = cluster.channel(Number, name="others")
            group = await cluster.launch(Adder, name="Adder", restart=Restart())
            [second] = await cluster.launch(Adder, name="Second")
            call = group[0].call(Adder.run, numbers.receiver, sums.sender)
            await numbers.sender.put(Number(1.0, 0))
            await sums.receiver.get(key=0)
            process = cluster._backend.process("Adder[0]")
            assert process is not None
            process.kill()
            await numbers.sender.put(Number(1.0, 1))
            await sums.receiver.get(key=1)
            numbers.sender.close()
            await call
            failing = second.call(Adder.run_failing, others.receiver, sums.sender)
            await others.sender.put(Number(-1.0, 0))
            await failing

    with pytest.raises(WorkerError, match="is negative"):
        run(main())
    made = bundle_run(tmp_path, out=tmp_path / f"crash{SUFFIX}")
    assert made.manifest.worker == "Second[0]"


def test_a_bundle_is_a_folder_where_that_is_asked_for(failed: Path, tmp_path: Path) -> None:
    bundle_run(failed, out=tmp_path / "folder")
    assert run(replay(tmp_path / "folder", "Adder[0]")).equal
    with pytest.raises(UsageError, match="is there already"):
        bundle_run(failed, out=tmp_path / "folder")


def test_a_bundle_has_the_items_of_its_part_alone(added: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no worker failed"):
        bundle_run(added)
    with pytest.raises(UsageError, match="iterations 0 to 9"):
        bundle_run(added, only="adder", around="12", out=tmp_path / "none")
    made = bundle_run(added, only="adder", around="3", iterations=1, out=tmp_path / "part")
    report = run(replay(made.path, "adder"))
    assert report.equal
    assert 20 <= report.items < 30


def test_the_command_line_plays_a_bundle_and_says_how_it_went(
    failed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"b{SUFFIX}"
    assert main(["bundle", str(failed), "--around", "crash", "--out", str(path)]) == 0
    assert "ValueError: a number of iteration 3 is negative" in capsys.readouterr().out
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "equal" in said
    assert "it failed as in the recording" in said
    assert main(["replay", str(failed), "--only", "nobody"]) == 2
    assert main(["replay", str(failed)]) == 2
    assert main(["replay", str(tmp_path), "--only", "adder"]) == 2


SCRIPT = """
    import sys
    from pathlib import Path
    import msgspec
    import rlinf_async as ra
    from helper_of_the_script import double

    class Item(msgspec.Struct):
        value: float
        iteration: int = 0

    class Doubler(ra.Worker):
        async def run(self, items: ra.Receiver[Item], doubled: ra.Sender[Item]) -> int:
            count = 0
            async for item in items:
                await doubled.put(Item(double(item.value), item.iteration))
                count += 1
            return count

    async def main(folder: Path) -> None:
        async with ra.Cluster.local() as cluster:
            cluster.record_into(folder / "recording" / "1", ["all"], 10_000_000)
            items = cluster.channel(Item, name="items")
            doubled = cluster.channel(Item, name="doubled", capacity=100)
            group = await cluster.launch(Doubler)
            call = group[0].call(Doubler.run, items.receiver, doubled.sender)
            with items.sender as sender:
                for at in range(20):
                    await sender.put(Item(float(at), at // 4))
            await call

    if __name__ == "__main__":
        ra.run(main(Path(sys.argv[1])))
"""


def test_code_of_a_script_goes_along_and_code_that_is_missing_is_named(tmp_path: Path) -> None:
    home, run_folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (home / "script.py").write_text(textwrap.dedent(SCRIPT))
    (home / "helper_of_the_script.py").write_text("def double(value):\n    return 2 * value\n")
    subprocess.run([sys.executable, "script.py", str(run_folder)], cwd=home, check=True)
    out = tmp_path / "bundle"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "rlinf_async",
            "bundle",
            str(run_folder),
            "--only",
            "doubler",
            "--around",
            "3",
            "--out",
            str(out),
        ],
        cwd=home,
        check=True,
    )
    assert sorted(one.name for one in (out / "code").iterdir()) == [
        "helper_of_the_script.py",
        "script.py",
    ]
    shutil.rmtree(home)
    played = subprocess.run(
        [sys.executable, "-m", "rlinf_async", "replay", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert "equal" in played.stdout
    (out / "code" / "script.py").unlink()
    gone = subprocess.run(
        [sys.executable, "-m", "rlinf_async", "replay", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert gone.returncode == 2
    assert "script.py" in gone.stderr
