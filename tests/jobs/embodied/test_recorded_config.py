"""``config.toml`` has every setting as it was run: what was chosen stands there as chosen."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

from rlinf_async.runtime.jobs.embodied import choosing
from rlinf_async.runtime.jobs.embodied.choosing import Choice
from tests.jobs import kit
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob

AUTO = ("--cluster.rollout_workers", "auto", "--env.stages", 1)


@pytest.mark.parametrize("kind", [Job, SacJob])
def test_a_run_from_the_recorded_file_gives_the_same_numbers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], kind: type[Job | SacJob]
) -> None:
    job = kind(tmp_path, capsys)
    job.succeed(*AUTO)
    kept = job.out / "config.toml"
    assert tomllib.loads(kept.read_text())["cluster"]["rollout_workers"] == 0
    again = job.command("train", kept, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    first, second = job.iterations, kit.rows_of(tmp_path / "again")
    assert len(first) == len(second) == 6
    for one, other in zip(first, second, strict=True):
        for name in ("return", "policy_loss", "entropy", "critic_loss", "episodes"):
            assert one.get(name) == other.get(name), name


@pytest.mark.parametrize("count", [0, 1])
def test_what_was_measured_is_recorded(
    job: Job, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A busy host chooses another layout; a run from the file does not ask again."""
    choice = Choice(rollout_workers=count, reason="as measured")
    monkeypatch.setattr(choosing, "decided", lambda *_: choice)
    job.succeed(*AUTO, "--training.total_steps", 64)
    kept = job.out / "config.toml"
    assert tomllib.loads(kept.read_text())["cluster"]["rollout_workers"] == count
    other = Choice(rollout_workers=1 - count, reason="of a busy host")
    monkeypatch.setattr(choosing, "decided", lambda *_: other)
    job.out = job.out.parent / "again"
    assert job.command("train", kept, "--out", job.out).code == 0
    assert (job.out / "config.toml").read_text() == kept.read_text()
