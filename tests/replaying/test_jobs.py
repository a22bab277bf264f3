"""Each worker of a recorded run of a job, played again alone, does what it did."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlinf_async import run
from rlinf_async.cli import main
from rlinf_async.replaying import ReplayReport, bundle_run, opened, replay
from rlinf_async.replaying.history import lives_of
from rlinf_async.replaying.run import _later, _request_of
from tests.jobs.embodied.kit import SMALL
from tests.jobs.language.kit import TINY

TOLERANCE = 1e-6


def again(folder: Path, only: str, **options: object) -> ReplayReport:
    """The report of a replay."""
    return run(replay(folder, only, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded GRPO run of 3 iterations: a real model, the transformers engine."""
    folder = tmp_path_factory.mktemp("language")
    data = folder / "sums.jsonl"
    lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
    data.write_text("\n".join(lines))
    (folder / "job.toml").write_text(TINY.format(data=data))
    out = folder / "run"
    wanted = ["--training.iterations", "3", "--training.checkpoint_every", "1"]
    assert (
        main(["train", str(folder / "job.toml"), "--record", "all", *wanted, "--out", str(out)])
        == 0
    )
    return out


@pytest.fixture(scope="module")
def embodied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded PPO run of 3 iterations, with a rollout worker."""
    folder = tmp_path_factory.mktemp("embodied")
    (folder / "job.toml").write_text(SMALL)
    out = folder / "run"
    wanted = ["--training.total_steps", "192", "--training.checkpoint_every", "1"]
    assert (
        main(["train", str(folder / "job.toml"), "--record", "all", *wanted, "--out", str(out)])
        == 0
    )
    return out


@pytest.mark.parametrize("role", ["actor", "rollout", "reward"])
def test_each_worker_of_a_grpo_run_does_the_same_again(language: Path, role: str) -> None:
    report = again(language, role)
    assert report.first_difference is None
    assert report.equal
    assert report.largest <= TOLERANCE
    # Losses and weights of 3 iterations, and the weights before; 24 samples and 4 of evaluations.
    assert report.items >= (4 if role == "actor" else 24)


@pytest.mark.parametrize("role", ["actor", "rollout", "env"])
def test_each_worker_of_a_ppo_run_does_the_same_again(embodied: Path, role: str) -> None:
    report = again(embodied, role)
    assert report.first_difference is None
    assert report.equal
    assert report.largest <= TOLERANCE
    assert report.items >= 4


def test_a_reward_worker_begins_at_the_iteration_that_is_asked_for(language: Path) -> None:
    report = again(language, "reward", first=2)
    assert report.equal
    assert report.skipped == 0
    assert report.items < again(language, "reward").items


@pytest.mark.parametrize("first", [1, 2])
def test_a_rollout_worker_begins_with_the_weights_of_the_iteration_that_is_asked_for(
    language: Path, first: int, tmp_path: Path
) -> None:
    report = again(language, "rollout", first=first)
    assert report.equal, report.first_difference
    assert report.forced == 0
    assert 0 < report.items < again(language, "rollout").items
    out = tmp_path / "rollout.tar.zst"
    made = bundle_run(language, only="rollout", around=str(first), iterations=1, out=out)
    report = again(made.path, "rollout")
    assert report.equal, report.first_difference


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_answers_to_what_was_given_before_the_beginning_are_not_asked_for(
    language: Path, role: str
) -> None:
    with opened(language) as source:
        start, worker = source.worker(role, None)
        [life] = lives_of(worker, lambda: source.events(start), source.decoder(start))
        answer = [one for one in life.outputs if one.channel in ("generated", "scored")][9]
        later = _later(life, answer.number)  # its question came before
        given = {_request_of(body.value()) for one in later.inputs for body in one.items}
        answers = [one.body.value() for one in later.outputs if one.channel == answer.channel]
    assert answer not in later.outputs
    assert len(answers) > 5
    assert {_request_of(one) for one in answers} <= given


def test_nothing_of_the_run_is_changed_by_a_replay(embodied: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in embodied.rglob("*")}
    again(embodied, "actor")
    assert {path: path.stat().st_mtime_ns for path in embodied.rglob("*")} == before


def test_another_verifier_scores_the_samples_of_the_recording(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier = tmp_path / "mine.py"
    verifier.write_text("def score(answer):\n    return 0.5\n")
    command = ["replay", str(language), "--only", "reward", "--data.verifier"]
    assert main([*command, f"{verifier}:score"]) == 0
    said = capsys.readouterr().out
    assert "mean 0.5000, 0 samples without one" in said
    assert "recorded: " in said
    assert main([*command, "nowhere.py:score"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_what_was_before_an_iteration_is_played_so_that_the_rest_is_exact(
    embodied: Path,
) -> None:
    report = again(embodied, "actor", first=2)
    assert report.equal
    assert (report.items, report.skipped) == (1, 3)  # the weights that came of it


def test_a_bundle_of_an_actor_begins_from_its_checkpoint(language: Path, tmp_path: Path) -> None:
    made = bundle_run(
        language, only="actor", around="2", iterations=1, out=tmp_path / "actor.tar.zst"
    )
    report = again(made.path, "actor")
    assert report.equal
    assert report.notes == ["begun from its checkpoint version-000002"]
    assert report.items == 1


@pytest.fixture(scope="module")
def resumed(language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run, copied, and resumed for two more iterations; its only checkpoint is the last."""
    folder = tmp_path_factory.mktemp("resumed")
    out = Path(shutil.copytree(language, folder / "run"))
    more = ["--training.iterations", "5", "--training.checkpoint_every", "50", "--resume"]
    job = str(language.with_name("job.toml"))
    assert main(["train", job, "--record", "all", *more, "--out", str(out)]) == 0
    return out


def test_a_bundle_of_a_resumed_run_has_the_checkpoint_that_it_was_resumed_from(
    resumed: Path, tmp_path: Path
) -> None:
    made = bundle_run(resumed, only="actor", around="4", iterations=1, out=tmp_path / "actor")
    hidden = resumed.rename(resumed.with_name("hidden"))
    try:
        report = again(made.path, "actor")
    finally:
        hidden.rename(resumed)
    assert report.equal
    assert report.items >= 1


def test_a_checkpoint_that_is_not_kept_is_named(
    resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(resumed, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "version-000003")
    for command in (["replay", str(run)], ["bundle", str(run), "--around", "4"]):
        assert main([*command, "--only", "actor"]) == 2
        said = capsys.readouterr().err
        assert "Actor[0] was started from the checkpoint" in said
        assert "version-000003, which is not there any more" in said
    assert again(run, "reward").equal  # needs none


def test_a_bundle_has_the_beginning_where_a_checkpoint_does_not_say_all(
    embodied: Path, tmp_path: Path
) -> None:
    made = bundle_run(embodied, only="actor", around="2", iterations=1, out=tmp_path / "actor")
    report = again(made.path, "actor")  # rewards are normalised
    assert report.equal
    assert not report.notes
