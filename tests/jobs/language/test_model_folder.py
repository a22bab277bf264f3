"""The model's folder and the trained one hold all of their weights, whenever the run is killed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.language.backends import has_weights
from rlinf_async.runtime.jobs.language.model import export
from tests.jobs.language.kit import TINY, Job

FILES = ("config.json", "model.safetensors")
WARM = (
    *("--warm_start.steps", 2, "--warm_start.batch_size", 4, "--training.iterations", 1),
    *("--evaluation.samples", 0, "--data.verifier", "tests.jobs.language.verifiers:letters"),
)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing in the code under test handles it."""


def write_model(folder: Path, weights: str) -> None:
    for name in FILES:
        (folder / name).write_text(weights)


def read_model(folder: Path) -> str | None:
    """The weights of a whole folder; None where it is not there."""
    if not folder.exists():
        return None
    [weights] = {(folder / name).read_text() for name in FILES}
    return weights


@pytest.mark.parametrize("operations", range(6))
def test_a_whole_model_is_there_after_a_kill_at_any_operation_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    into, previous = tmp_path / "trained", tmp_path / ".trained.previous"
    into.mkdir()
    write_model(into, "old")
    left = operations

    def killing(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*args, **kwargs)

        return counted

    def export_as(weights: str) -> None:
        async def write(folder: Path) -> None:
            write_model(folder, weights)

        asyncio.run(export(write, tmp_path, into))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killing(shutil.rmtree))
        patch.setattr(Path, "rename", killing(Path.rename))
        if operations == 5:  # all of them
            export_as("new")
        else:
            with pytest.raises(Killed):
                export_as("new")
    found = [read_model(folder) for folder in (into, previous)]
    assert found == {3: [None, "old"], 4: ["new", "old"], 5: ["new", None]}.get(
        operations, ["old", None]
    )
    export_as("newer")
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    assert read_model(into) == "newer"


def test_an_export_that_fails_after_a_kill_between_two_renames_leaves_the_model_before(
    tmp_path: Path,
) -> None:
    previous = tmp_path / ".trained.previous"
    previous.mkdir()
    write_model(previous, "old")

    async def write(folder: Path) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        asyncio.run(export(write, tmp_path, tmp_path / "trained"))
    assert read_model(tmp_path / "trained") == "old"


@pytest.fixture
def tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    return Job(tmp_path, capsys, TINY)


def test_a_run_that_ended_while_it_wrote_the_weights_of_its_warm_start_starts_warm_again(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(self: PolicyTrainer, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "save_pretrained", write_half)
        assert tiny.train(*WARM).code == 1
    assert not has_weights(tiny.out / "model")
    ended = tiny.train(*WARM, "--resume")
    assert ended.code == 0, ended.err
    assert "warm start of 2 steps" in ended.out
    assert has_weights(tiny.out / "model")
    assert [path.name for path in tiny.out.glob(".model*")] == []
    ended = tiny.train(*WARM, "--resume", "--training.iterations", 2)
    assert ended.code == 0, ended.err
    assert "warm start of" not in ended.out


def test_a_warm_start_runs_in_a_cluster_of_the_runs_settings_and_log(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Path | None] = []
    make = HostConfig.make_cluster

    def making(self: HostConfig, log: Path | None = None) -> Cluster:
        logs.append(log)
        return make(self, log)

    monkeypatch.setattr(HostConfig, "make_cluster", making)
    summary: LanguageSummary = tiny.succeed(*WARM)
    assert summary.samples == 8
    assert logs == [tiny.out / "workers.log"] * 2  # of the warm start, and of the run
