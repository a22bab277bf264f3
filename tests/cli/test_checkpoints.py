"""``export`` and ``reshard`` as a user meets them: what they print, and what they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tests.backends.checkpoint.kit import assert_same_tensors, model_folder, trained
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
    assert out == f"{tmp_path / 'out'}: 24 tensors, 0.00 GiB\n"
    names = {one.name for one in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_checkpoint_is_cut_there_and_back(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    first = run / "checkpoints" / "version-000001"
    code, out, _ = command_line.run("reshard", first, tmp_path / "a", "--dp", 3, "--tp", 2)
    assert (code, out) == (0, f"{tmp_path / 'a'}: 6 ranks (dp=3 tp=2), 0.00 GiB\n")
    assert command_line.run("reshard", tmp_path / "a", tmp_path / "b")[0] == 0
    assert_same_tensors(tmp_path / "b", first)


def test_what_a_run_keeps_beside_its_checkpoint_is_named_where_it_is_left(
    command_line: CommandLine, run: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(run / "checkpoints" / "version-000001", first)
    (first / "run.msgpack").touch()
    (first / "critic").mkdir()
    code, out, _ = command_line.run("reshard", first, tmp_path / "a", "--dp", 2)
    assert code == 0
    assert out.splitlines()[1].startswith("not taken along: critic, run.msgpack (--resume needs")
    assert not (tmp_path / "a" / "critic").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reshard", "RUN", "OUT", "--tp", 3), "tp=3 does not divide 4 heads; nearest"),
        (("reshard", "OUT", "OUT2"), "is not a checkpoint: it has no metadata.json"),
        (("reshard", "RUN", "RUN"), "is there already: name another"),
        (("export", "RUN", "RUN"), "is there already: name another"),
        (("export", "RUN", "OUT", "--model", "OUT2"), "holds no config.json"),
        (("reshard", "RUN", "OUT", "--dp", 0), "Invalid value for '--dp'"),
    ],
)
def test_wrong_input_is_one_clear_line_and_leaves_nothing(
    command_line: CommandLine,
    run: Path,
    tmp_path: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    places = {"RUN": run, "OUT": tmp_path / "out", "OUT2": tmp_path / "out2"}
    given = [places.get(str(one), one) for one in arguments]
    before = sorted(tmp_path.iterdir())
    code, out, err = command_line.run(*given)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before
