"""A run that was cut anew offline goes on as it would have from its own folder."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import msgspec
import pytest

from rlinf_async.backends.checkpoint.folders import Metadata, read_metadata
from tests.jobs.language.kit import LOSSES, TINY, Job
from tests.jobs.language.test_critic import GAE, LETTERS
from tests.jobs.language.test_resumed import Killed, die_after

SETTINGS = (*GAE, *LETTERS, "--training.iterations", 5, "--actor.pipelined", "false")
OF_CRITIC = ("critic_loss", "critic_value", "critic_grad_norm")


@pytest.fixture
def killed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """A run with a critic that has checkpoints and was killed after iteration 3."""
    job = Job(tmp_path, capsys, TINY.replace("sinks = []", 'sinks = ["tensorboard"]'))
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 3)
        with pytest.raises(Killed):
            job.train(*SETTINGS)
    return job


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file, by its place."""
    return {
        str(one.relative_to(folder)): one.read_bytes()
        for one in sorted(folder.rglob("*"))
        if one.is_file()
    }


def strategy(folder: pathlib.Path) -> tuple[int, int]:
    found = read_metadata(folder)
    assert isinstance(found, Metadata)
    return found.strategy.dp, found.strategy.tp


@pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
def test_losses_after_resuming_from_what_was_cut_are_those_after_resuming_from_the_run(
    killed: Job, dp: int, tp: int
) -> None:
    # The vocabulary of the arithmetic tokenizer is divided by two.
    before, out = contents(killed.out), killed.out.parent / "cut"
    done = killed.command("reshard", killed.out, out, "--dp", dp, "--tp", tp)
    assert done.code == 0, done.err
    assert "cut too: critic" in done.out
    assert "copied: progress.json, run.msgpack" in done.out
    assert contents(killed.out) == before
    checkpoint = out / "checkpoints" / killed.checkpoints[-1]
    assert strategy(checkpoint) == strategy(checkpoint / "critic") == (dp, tp)
    same = ("run.json", "config.toml", "metrics.csv", "checkpoints/latest.json")
    for name in (*same, f"checkpoints/{killed.checkpoints[-1]}/run.msgpack"):
        assert contents(out)[name] == before[name], name
    assert contents(out / "tensorboard") == contents(killed.out / "tensorboard")
    assert contents(out / "model") == contents(killed.out / "model")
    killed.succeed(*SETTINGS, "--resume")
    expected = killed.iterations
    killed.out = out
    killed.succeed(*SETTINGS, "--resume")
    assert [row["iteration"] for row in killed.iterations] == ["0", "1", "2", "3", "4"]
    for mine, theirs in zip(killed.iterations, expected, strict=True):
        for name in (*LOSSES, *OF_CRITIC):
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=1e-6), name


def test_a_checkpoint_by_itself_takes_critic_and_position_along(killed: Job) -> None:
    first = killed.out / "checkpoints" / killed.checkpoints[-1]
    for dp, tp, of, name in ((2, 1, first, "two"), (1, 1, killed.out.parent / "two", "one")):
        done = killed.command("reshard", of, killed.out.parent / name, "--dp", dp, "--tp", tp)
        assert done.code == 0, done.err
        assert "--resume" not in done.out
    # The way back gives the same bytes, and so may take the checkpoint's place.
    assert contents(killed.out.parent / "one") == contents(first)


def test_a_run_whose_newest_checkpoint_lost_its_critic_says_so(killed: Job) -> None:
    shutil.rmtree(killed.out / "checkpoints" / killed.checkpoints[-1] / "critic")
    done = killed.command("reshard", killed.out, killed.out.parent / "cut")
    assert (done.code, "cut too" in done.out) == (0, False)
    killed.out = killed.out.parent / "cut"
    ended = killed.train(*SETTINGS, "--resume")
    assert ended.code == 2
    assert "was written by a run without a critic" in ended.err


def note(job: Job, **changes: Any) -> None:
    path = job.out / "checkpoints" / "latest.json"
    known = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(known | changes))


def damage_the_critic(job: Job) -> None:
    [path] = (job.out / "checkpoints" / job.checkpoints[-1] / "critic").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def lose_the_checkpoint(job: Job) -> None:
    shutil.rmtree(job.out / "checkpoints" / job.checkpoints[-1])


def point_elsewhere(job: Job) -> None:
    note(job, checkpoint="../model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_the_critic, "critic/rank_0_of_1.safetensors is damaged"),
        (lose_the_checkpoint, "version-000002 is not a checkpoint"),
        (point_elsewhere, "latest.json names no folder beside it, but '../model'"),
    ],
)
def test_a_damaged_run_is_named_and_nothing_is_written(
    killed: Job, damage: Any, message: str
) -> None:
    damage(killed)
    done = killed.command("reshard", killed.out, killed.out.parent / "cut", "--dp", 2)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert not list(killed.out.parent.glob("*cut*"))


def test_on_a_full_disk_one_line_says_so_and_nothing_is_left(
    killed: Job, full_disk: pathlib.Path
) -> None:
    done = killed.command("reshard", killed.out, full_disk / "cut", "--dp", 2)
    assert (done.code, done.out) == (2, "")
    assert f"error: cannot write {full_disk}" in done.err
    assert "No space left on device; free some space" in done.err
    assert len(done.err.splitlines()) == 1
    assert list(full_disk.iterdir()) == []
