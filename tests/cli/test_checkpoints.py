"""``export`` and ``reshard`` as a user meets them: what they print, and what they refuse."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.backends.checkpoint.kit import assert_same_tensors, model_folder, noted, trained
from tests.cli.conftest import CommandLine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    trained(model_folder(folder / "model"), folder / "checkpoints" / "version-000001")
    note = {"checkpoint": "version-000001"}
    (folder / "checkpoints" / "latest.json").write_bytes(msgspec.json.encode(note))
    return folder


def test_the_newest_checkpoint_of_a_run_is_exported(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    code, out, err = command_line.run("export", run, tmp_path / "out", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size / 1024
    found = re.fullmatch(r"(.*): 24 tensors, (\d+\.\d\d) KiB\n", out)
    assert found is not None
    assert found[1] == str(tmp_path / "out")
    assert size - 4 < float(found[2]) < size  # but for the header
    names = {one.name for one in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_checkpoint_is_cut_there_and_back(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    first = run / "checkpoints" / "version-000001"
    code, out, _ = command_line.run("reshard", first, tmp_path / "a", "--dp", 3, "--tp", 2)
    assert code == 0
    assert re.fullmatch(rf"{tmp_path}/a: 6 ranks \(dp=3 tp=2\), \d+\.\d\d [KM]iB\n", out)
    assert command_line.run("reshard", tmp_path / "a", tmp_path / "b")[0] == 0
    assert_same_tensors(tmp_path / "b", first)


@pytest.mark.parametrize(
    ("arguments", "doing"),
    [(("reshard", "--dp", 2), "resharding to dp=2 tp=1"), (("export",), "exporting")],
)
def test_a_terminal_shows_that_it_is_checked_and_how_much_of_it_is_done(
    command_line: CommandLine,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    doing: str,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    code, _, err = command_line.run(arguments[0], run, tmp_path / "out", *arguments[1:])
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert f"checking {run}" in plain
    assert doing in plain.partition("checking")[2]
    assert "100" in plain or "0:00:00" in plain


def test_what_lies_beside_a_checkpoint_goes_along(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(run / "checkpoints" / "version-000001", first)
    shutil.copytree(run / "checkpoints" / "version-000001", first / "critic")
    (first / "run.msgpack").write_bytes(b"position")
    (first / ".run.partial").touch()
    (first / "notes").mkdir()
    (first / "notes" / "why.txt").write_text("a trial")
    (first / "link").symlink_to("notes")
    code, out, _ = command_line.run("reshard", first, tmp_path / "a", "--dp", 2, "--tp", 2)
    assert code == 0
    assert out.splitlines()[1:] == ["cut too: critic", "copied: link, notes, run.msgpack"]
    made = tmp_path / "a"
    assert_same_tensors(made / "critic", first)
    assert noted(made / "critic").strategy.tp == 2
    assert (made / "run.msgpack").read_bytes() == b"position"
    assert (made / "notes" / "why.txt").read_text() == "a trial"
    assert (made / "link").readlink() == first / "notes"
    assert not (made / ".run.partial").exists()


def test_out_of_a_run_comes_a_run_at_its_newest_checkpoint(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    first = tmp_path / "run"
    shutil.copytree(run, first)
    shutil.copytree(first / "checkpoints/version-000001", first / "checkpoints/version-000002")
    (first / ".lock").touch()
    (first / "metrics.csv").write_text("step\n1\n")
    code, out, _ = command_line.run("reshard", first, tmp_path / "a", "--dp", 2)
    assert code == 0
    assert out.splitlines()[-1].endswith(f"rlinf-async train FILE.toml --resume --out {tmp_path}/a")
    assert {one.name for one in (tmp_path / "a").iterdir()} == {
        *("checkpoints", "model", "metrics.csv")
    }
    assert sorted(one.name for one in (tmp_path / "a" / "checkpoints").iterdir()) == [
        *("latest.json", "version-000001")
    ]
    code, _, _ = command_line.run("reshard", first / "checkpoints", tmp_path / "b")
    assert code == 0
    assert_same_tensors(
        tmp_path / "b" / "version-000001", tmp_path / "a/checkpoints/version-000001"
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from rlinf_async.backends.checkpoint import exporting
rename = os.rename
def dying(*given):
    left.append(given)
    if len(left) == {last}:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*given)
left = []
os.rename = dying
Path.rename = lambda self, target: dying(self, target)
exporting.Resharding(Path(sys.argv[1]), dp=2, tp=1).run(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_kill_before_the_last_rename_leaves_nothing_of_that_name(
    command_line: CommandLine, run: Path, tmp_path: Path, last: int
) -> None:
    # The renames: the checkpoint's metadata, the run's note, the folder itself.
    script = KILLED.format(last=last)
    done = subprocess.run([sys.executable, "-c", script, run, tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == [".out.partial"]
    assert command_line.run("reshard", run, tmp_path / "out")[0] == 0
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["out"]


def _placed(word: str, places: dict[str, Path]) -> str:
    first, slash, rest = word.partition("/")
    return f"{places.get(first, first)}{slash}{rest}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reshard", "RUN", "OUT", "--tp", 3), "tp=3 does not divide 4 heads; nearest"),
        (("reshard", "OUT", "OUT2"), "out is not a checkpoint: there is nothing of that name"),
        (("reshard", "RUN", "RUN"), "exists already: name another"),
        (("export", "RUN", "RUN"), "exists already: name another"),
        (("export", "RUN", "OUT", "--model", "OUT2"), "holds no config.json"),
        (("reshard", "RUN", "OUT", "--dp", 0), "Invalid value for '--dp'"),
        (("reshard", "FILE", "OUT"), "is not a checkpoint: it has no metadata.json"),
        (
            ("reshard", "BEGUN", "OUT"),
            "has no complete checkpoint: there is no checkpoints/latest.json",
        ),
        (
            ("export", "BEGUN", "OUT"),
            "has no complete checkpoint: there is no checkpoints/latest.json",
        ),
        (("reshard", "OUT", "LINK"), "exists already: name another"),
        (("reshard", "RUN", "FILE/out"), "a part of that path is a file"),
        (("reshard", "RUN", "RUN/out"), "which is only read: name a folder elsewhere"),
        (("export", "RUN", "FILE/out"), "a part of that path is a file"),
        (("export", "RUN", "OUT", "--shard-size", "nan"), "--shard-size nan"),
        (("export", "RUN", "OUT", "--shard-size", "inf"), "--shard-size inf"),
        (("reshard", "RUN", "OUT", "--dp", "10000000"), "not in the range"),
    ],
)
def test_wrong_input_is_one_clear_line_and_leaves_nothing(
    command_line: CommandLine,
    run: Path,
    tmp_path: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    places = {"RUN": run, "OUT": tmp_path / "out", "OUT2": tmp_path / "out2"}
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    places |= {"BEGUN": tmp_path / "begun"}
    places |= {"FILE": command_line.file, "LINK": tmp_path / "link"}
    given = [_placed(str(one), places) for one in arguments]
    before = sorted(tmp_path.iterdir())
    code, out, err = command_line.run(*given)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before
