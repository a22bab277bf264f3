"""Advantages, losses and verifiers of a user's own, in runs with processes."""

from __future__ import annotations

import pathlib

import pytest

from rlinf_async.algorithms.language.advantages import group_advantages
from rlinf_async.algorithms.language.losses import language_losses
from tests.jobs.language import own_parts
from tests.jobs.language.kit import Job

OWN = pathlib.Path(own_parts.__file__).read_text()


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("way", ["file", "registered"])
def test_a_run_trains_with_parts_of_your_own(
    tiny: Job,
    way: str,
    backend: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    names = {"advantage": "mine.py:centred", "loss": "mine.py:plain"}
    if way == "registered":
        names = {"advantage": "centred", "loss": "plain"}
        monkeypatch.setitem(group_advantages._entries, "centred", own_parts.centred)
        monkeypatch.setitem(language_losses._entries, "plain", own_parts.plain)
    arguments = (
        *("--actor.advantage.name", names["advantage"], "--actor.loss.name", names["loss"]),
        *("--data.verifier", "mine.py:letters", "--cluster.backend", backend),
        *("--training.iterations", 1, "--evaluation.samples", 0, "--training.export", "false"),
    )
    ended = tiny.command("check", tiny.file, *arguments)
    assert ended.code == 0, ended.err
    assert tiny.succeed(*arguments).outcomes == {"scored": 8}
    assert float(tiny.iterations[0]["grad_norm"]) > 0.0


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("actor.advantage.name", "nowhere.py:x", "'nowhere.py' cannot be imported"),
        ("actor.loss.name", "nowhere.py:x", "'nowhere.py' cannot be imported"),
        ("data.verifier", "nowhere.py:x", "'nowhere.py' cannot be imported"),
        ("actor.advantage.name", "mine.py:letters", "takes other arguments"),
        ("actor.loss.name", "mine.py:letters", "takes other arguments"),
        ("data.verifier", "mine.py:plain", "takes other arguments"),
        ("actor.loss.name", "mine.py:nothing", "has no function 'nothing'"),
    ],
)
def test_check_says_what_is_wrong_with_a_part_of_your_own(
    job: Job,
    setting: str,
    name: str,
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    ended = job.command("check", job.file, f"--{setting}", name)
    assert ended.code == 2
    assert message in ended.err
    assert setting in ended.err
