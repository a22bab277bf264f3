"""What goes wrong while a run is under way: counted, or ended with its cause; nothing is lost."""

from __future__ import annotations

import gc
import pathlib

import pytest

from rlinf_async.messages.language import Failed, Rejected
from rlinf_async.runtime.jobs.language.reports import NothingScored, warn_of_failures
from tests.jobs.language.kit import Job
from tests.jobs.language.test_ledger import ledger, prompts, scored

VERIFIERS = "tests.jobs.language.verifiers"


def test_samples_that_their_verifier_fails_on_are_counted_reported_once_and_train_nothing(
    job: Job,
) -> None:
    ended = job.train(
        *("--data.verifier", f"{VERIFIERS}:sometimes", "--data.shuffle", "false"),
        *("--evaluation.samples", 0),
    )
    assert ended.code == 0, ended.err
    outcomes = job.summary.outcomes
    assert set(outcomes) == {"scored", "failed"}
    assert sum(outcomes.values()) == job.summary.samples == 32
    assert ended.err.count("RuntimeError: no server") == 1
    assert "were not scored and train nothing" in ended.err


@pytest.mark.parametrize(
    ("verifier", "limit", "cause"),
    [
        ("text", 60.0, "returned 'good: "),
        ("hangs", 0.2, "took longer than the time limit of 0.2 s"),
        ("refuses", 60.0, "rejected: no reference"),
    ],
)
def test_a_verifier_that_fails_on_everything_ends_the_run_with_its_error(
    job: Job, verifier: str, limit: float, cause: str
) -> None:
    ended = job.train(
        *("--data.verifier", f"{VERIFIERS}:{verifier}", "--reward.time_limit", limit),
        *("--training.prompts", 1, "--evaluation.samples", 0),
    )
    assert ended.code == 1
    assert "none of the 2 samples of iteration 0 was scored, the first with:" in ended.err
    assert cause in ended.err
    assert job.summary.outcome == "failed"
    assert "go on with --resume" in str(job.summary.error)


def test_rejections_end_a_run_in_which_nothing_was_ever_scored(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [request, *_] = ledger(count=1).admit(prompts(1))
    groups = [[scored(request, Rejected(reason="no reference"))]]
    with pytest.raises(NothingScored, match="rejected: no reference"):
        warn_of_failures("run", 0, groups, before={"rejected": 2})
    warn_of_failures("run", 5, groups, before={"scored": 3})
    assert "1 of 1 samples of iteration 5 were not scored" in capsys.readouterr().err
    warn_of_failures("run", 6, groups, before={"scored": 3, "rejected": 1})
    assert not capsys.readouterr().err
    broken = [[scored(request, Failed(error="no server"))]]
    with pytest.raises(NothingScored, match=r"no server.*: correct the verifier"):
        warn_of_failures("run", 7, broken, before={"scored": 3})
    with pytest.raises(NothingScored, match=r"correct the agent \(episode.run = 'agent.py:run'\)"):
        warn_of_failures("run", 7, broken, before={"scored": 3}, agent="agent.py:run")


def test_a_run_whose_verifier_was_corrected_goes_on_from_where_it_was(job: Job) -> None:
    job.succeed("--training.iterations", 2)
    more = ("--resume", "--training.iterations", 4, "--data.verifier")
    broken = job.train(*more, f"{VERIFIERS}:text")
    assert broken.code == 1
    assert "samples of iteration 2 was scored" in broken.err
    summary = job.succeed(*more, f"{VERIFIERS}:letters")
    assert summary.samples == 32
    assert [row["iteration"] for row in job.iterations] == ["0", "1", "2", "3"]


def test_groups_without_signal_are_counted_and_change_no_weights(tiny: Job) -> None:
    ended = tiny.train("--data.verifier", f"{VERIFIERS}:equal")
    assert ended.code == 0
    [line] = ended.err.splitlines()  # said once, and nothing of transformers' progress bars
    assert "in each of the 4 groups of iteration 0 all rewards are equal" in line
    assert tiny.summary.outcomes == {"scored": 32}
    assert [float(row["groups_without_signal"]) for row in tiny.iterations] == [1.0] * 4
    assert [float(row["grad_norm"]) for row in tiny.iterations] == [0.0] * 4


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        (1, "ModelOutputError: "),  # the broken weights are published, and the engine sees it
        (2, "TrainingDiverged: "),  # the second step sees it before
    ],
)
def test_a_learning_rate_that_breaks_the_model_ends_the_run_and_says_so(
    tiny: Job, steps: int, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = tiny.train(
        *("--actor.optimizer.lr", "1e30", "--actor.global_batches", steps),
        *("--data.verifier", f"{VERIFIERS}:letters", "--training.group_size", 8),
    )
    assert ended.code == 1
    assert cause in ended.err
    assert "learning rate" in ended.err
    assert tiny.summary.outcome == "failed"
    gc.collect()  # when tasks tell of errors that nobody took from them
    assert "never retrieved" not in caplog.text


def test_data_that_end_too_early_are_refused_though_prompts_are_skipped(job: Job) -> None:
    text = job.file.read_text()
    data = job.file.parent / "sums.jsonl"
    data.write_text(data.read_text().replace("+3=", "+3+0000000000000000="))
    job.file.write_text(text.replace("[data]", '[data]\ntoo_long = "skip"\nmax_prompt_tokens = 8'))
    few = ("--data.epochs", 1, "--training.iterations", 5)
    ended = job.command("check", job.file, *few)
    assert ended.code == 2
    assert "19 records x 1 epochs are 19 prompts, but 5 iterations of 4 need 20" in ended.err


def test_data_that_end_too_early_are_refused_though_prompts_are_those_of_held_out_ones(
    job: Job,
) -> None:
    data = job.file.parent / "sums.jsonl"
    data.write_text(data.read_text() * 2)
    ended = job.command("check", job.file, "--data.epochs", 1, "--training.iterations", 11)
    assert ended.code == 2, ended.err
    assert "40 records x 1 epochs are 40 prompts, but 11 iterations of 4 need 44" in ended.err
    assert job.train("--data.epochs", 1, "--training.iterations", 10).code == 0


def test_a_resumed_run_refuses_other_data_and_loses_nothing(job: Job) -> None:
    job.succeed()
    other = job.train("--resume", "--training.iterations", 6, "--data.held_out", 3)
    assert other.code == 2
    assert "data.held_out (4 in the run, 3 now)" in other.err
    data = job.file.parent / "sums.jsonl"
    kept = data.read_text()
    data.write_text(kept.replace("2+3=", "3+2="))
    changed = job.train("--resume", "--training.iterations", 6)
    assert changed.code == 2
    assert "go on with the same data and settings, or start anew" in changed.err
    data.write_text(kept)
    assert job.succeed("--resume", "--training.iterations", 6).samples == 48


@pytest.mark.parametrize("shown", [False, True])
def test_a_disk_that_fills_up_at_a_checkpoint_is_reported_in_one_line_unless_more_is_wanted(
    tiny: Job, full_disk: pathlib.Path, shown: bool
) -> None:
    tiny.keep_checkpoints_on(full_disk)
    ended = tiny.train("--cluster.backend", "process", *(["--traceback"] if shown else []))
    assert ended.code == 1
    assert f"cannot write the checkpoint {tiny.out}/checkpoints/version-000002: No " in ended.err
    assert ("Traceback" in ended.err) is shown
    if not shown:
        last = ended.err.splitlines()[-2:]
        assert last[0].startswith("error: Actor[0] failed in checkpoint_written (process ")
        assert last[1] == "(--traceback shows where this was raised)"


def test_check_loads_the_verifiers_that_settings_name(job: Job) -> None:
    ended = job.command("check", job.file, "--data.verifier", f"{VERIFIERS}:lettres")
    assert ended.code == 2
    assert "data.verifier" in ended.err
    assert f"'{VERIFIERS}' has no function 'lettres'" in ended.err
    broken = job.file.with_name("broken.py")
    broken.write_text("raise ValueError('half written')\n", encoding="utf-8")
    ended = job.command("check", job.file, "--reward.preload", f"{broken}:score")
    assert ended.code == 2
    assert "reward.preload" in ended.err
    assert "ValueError: half written" in ended.err


def test_check_names_a_variable_that_is_not_there(job: Job) -> None:
    job.file.write_text(job.file.read_text() + '\n[reward]\nenvironment = ["NOT_SET_ANYWHERE"]\n')
    ended = job.command("check", job.file)
    assert ended.code == 2
    assert "reward.environment: there is no environment variable NOT_SET_ANYWHERE" in ended.err


@pytest.mark.parametrize(
    ("verifier", "setting", "value", "said"),
    [
        (f"{VERIFIERS}:letters", "calls", 64, "no verifier of this run is asynchronous"),
        ("exact", "calls", 64, "no verifier of this run is asynchronous"),
        ("exact", "retries", 5, "exact and numeric are neither called again nor remembered"),
        ("exact", "cache", 100, "exact and numeric are neither called again nor remembered"),
        (f"{VERIFIERS}:letters", "retries", 21, "it must be at most 20"),
        (f"{VERIFIERS}:letters", "cache", -1, "it must be at least 0"),
        (f"{VERIFIERS}:judge", "calls", 0, "it must be at least 1"),
    ],
)
def test_check_names_a_setting_of_judges_that_cannot_be_or_has_no_effect(
    job: Job, verifier: str, setting: str, value: int, said: str
) -> None:
    ended = job.command(
        "check", job.file, "--data.verifier", verifier, f"--reward.{setting}", value
    )
    assert ended.code == 2
    assert f"{setting} is {value}" in ended.err
    assert said in ended.err
    assert "reward" in ended.err


def test_a_run_with_a_judge_reports_its_calls_and_its_cost(job: Job) -> None:
    verifier = ("--data.verifier", f"{VERIFIERS}:judge", "--evaluation.samples", 0)
    settings = ("--reward.calls", 64, "--reward.cache", 1000)
    ended = job.command("check", job.file, *verifier, *settings)
    assert ended.code == 0, ended.err
    ended = job.train(*verifier, *settings)
    assert ended.code == 0, ended.err
    for row in job.iterations:
        calls, hits = float(row["judge_calls"]), float(row["judge_cache_hits"])
        assert calls + hits == 8
        assert float(row["judge_cost"] or 0.0) == pytest.approx(0.5 * calls)
        assert float(row["judge_retries"]) == 0.0
