"""Where training ends before its last iteration, and which checkpoint is the best:
``[training.stop_at]`` and ``[training.keep_best]``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.status import look_at_run
from rlinf_async.runtime.jobs.embodied.run import merged
from rlinf_async.runtime.jobs.targets import Best, KeepBestConfig, Reached, StopAtConfig
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob
from tests.jobs.processes import Start

QUICK = ("--observe.sinks", "[]", "--evaluation.episodes", 1)
STOP = "--training.stop_at."
BEST = "--training.keep_best."


@pytest.fixture
def sac(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> SacJob:
    folder = tmp_path / "sac"
    folder.mkdir()
    return SacJob(folder, capsys)


# ---- what counts


def judged(values: Sequence[float | None], **target: Any) -> list[Reached]:
    """How near each row of a column brings a run to its target."""
    found = Reached(target=StopAtConfig(metric="x", **target))
    every = []
    for iteration, value in enumerate(values):
        found = found.judge(iteration, {} if value is None else {"x": value})
        every.append(found)
    return every


@pytest.mark.parametrize(
    ("target", "values", "times"),
    [
        ({"least": 2.0, "times": 3}, [2, 1, 2, 3, 2], [1, 0, 1, 2, 3]),
        ({"most": 2.0, "times": 3}, [2, 3, 2, 1, 2], [1, 0, 1, 2, 3]),
        ({"least": 2.0, "times": 2}, [2, None, None, 2], [1, 1, 1, 2]),  # it said nothing there
        ({"least": 2.0, "times": 2}, [2, float("nan"), 2, 2], [1, 0, 1, 2]),
        ({"most": 2.0}, [float("nan"), float("inf"), float("-inf")], [0, 0, 1]),
    ],
)
def test_iterations_count_that_reach_the_target_in_a_row(
    target: dict[str, Any], values: list[float | None], times: list[int]
) -> None:
    every = judged(values, **target)
    assert [one.times for one in every] == times
    assert [bool(one.why) for one in every] == [False] * (len(values) - 1) + [True]


def test_under_another_target_the_count_begins_anew() -> None:
    [*_, found] = judged([2, 2], least=2.0, times=3)
    assert found.under(StopAtConfig(metric="x", least=2.0, times=3)).times == 2
    assert found.under(StopAtConfig(metric="x", least=2.0, times=4)).times == 0


@pytest.mark.parametrize(
    ("lowest", "best"), [(False, ["a", "a", "c", "c", "c"]), (True, ["a", "a", "a", "d", "d"])]
)
def test_of_equal_checkpoints_the_earlier_is_the_best(lowest: bool, best: list[str]) -> None:
    found, every = Best(wanted=KeepBestConfig(metric="x", lowest=lowest)), []
    rows = {"a": 2.0, "b": float("nan"), "c": 3.0, "d": 1.0, "e": 1.0 if lowest else 3.0}
    for name, value in rows.items():
        found = found.rank(name, {"x": value})
        every.append(found.checkpoint)
    assert every == best
    assert found.rank("f", {}) == found


# ---- runs


@pytest.mark.parametrize("staleness", [0, 2])
def test_ppo_ends_at_its_target_as_after_its_last_iteration(job: Job, staleness: int) -> None:
    """What was collected ahead is left out; the last checkpoint is of the version that ended it."""
    target = (f"{STOP}metric", "env_steps", f"{STOP}least", 128, f"{STOP}times", 2)
    summary = job.succeed(*QUICK, *target, "--training.max_staleness", staleness)
    job.check_records(3, 64)
    why = "env_steps at least 128 was reached in iteration 2, 2 times in a row: 192"
    assert (summary.reached, summary.outcome) == (why, "finished")
    assert summary.return_ is not None
    status = job.command("status", job.out)
    ended = f"finished after 3 iterations and {summary.train_seconds:.1f} s of training: {why}"
    assert ended in status.out
    again = job.train(*QUICK, *target, "--resume", "--training.max_staleness", staleness)
    assert again.code == 0
    assert f"small: {why}; training goes on under another training.stop_at" in again.err
    job.check_records(3, 64, resumed=True)
    more = ("--training.max_staleness", staleness, "--training.total_steps", 256)
    assert job.succeed(*QUICK, "--resume", *more).reached is None
    job.check_records(4, 64, resumed=True)


def test_the_count_survives_a_resume_from_any_checkpoint(job: Job) -> None:
    """Of five in a row two are of the start before it, and there are but six."""
    target = (f"{STOP}metric", "entropy", f"{STOP}least", 0, f"{STOP}times", 5)
    job.succeed(*QUICK, *target, "--training.keep_checkpoints", 9)
    summary = job.succeed(*QUICK, *target, "--resume", "--checkpoint", 2)
    assert str(summary.reached).startswith("entropy at least 0 was reached in iteration 4, 5 times")
    job.check_records(5, 64, resumed=True)


def test_returns_count_once_the_window_is_full(job: Job) -> None:
    """Of 100 episodes there are none by then: the first few would end the run by chance."""
    target = (f"{STOP}metric", "return", f"{STOP}least", 1, f"{BEST}metric", "return")
    ended = job.train(*QUICK, *target)
    assert ended.code == 0
    assert job.summary.reached is None
    assert job.summary.iterations == 6
    ended = job.command("evaluate", job.out, "--checkpoint", "best")
    assert ended.code == 2
    assert "has no best checkpoint yet: none had a return by then" in ended.err
    summary = job.succeed(
        *QUICK, *target, "--resume", "--training.return_window", 1, "--training.total_steps", 512
    )
    assert str(summary.reached).startswith("return at least 1 was reached in iteration 6: ")


def test_sac_ends_at_its_target_with_its_store(sac: SacJob) -> None:
    target = (f"{STOP}metric", "replay_size", f"{STOP}least", 80, f"{STOP}times", 2)
    summary = sac.succeed(*QUICK, *target)
    assert summary.reached == (
        "replay_size at least 80 was reached in iteration 3, 2 times in a row: 80"
    )
    sac.check_books(4)
    sac.succeed(*QUICK, "--resume")
    sac.check_books(6)


def test_the_best_checkpoint_is_kept_and_has_a_name_everywhere(job: Job) -> None:
    """Of steps the fewest, which is the first checkpoint; two others are kept beside it."""
    best = (f"{BEST}metric", "env_steps", f"{BEST}lowest", "true")
    keep = ("--training.keep_checkpoints", 1, "--training.checkpoint_every", 1)
    summary = job.succeed(*QUICK, *best, *keep)
    first, last = job.checkpoints
    assert (first, last) == ("version-000001", "version-000006")
    assert summary.extra["best"] == "version-000001 (env_steps 64)"
    shown = json.loads(job.command("evaluate", job.out, "--checkpoint", "best", "--json").out)
    assert shown["checkpoint"].endswith(first)
    out = job.out.parent / "left"
    ended = job.command("export", job.out, out, "--checkpoint", "best")
    assert ended.code == 0, ended.err
    assert "version 1, as folder" in ended.out
    source, job.out = job.out, job.out.parent / "second"
    begins = ("--model.path", source, "--model.checkpoint", "best", "--training.total_steps")
    assert str(job.succeed(*QUICK, *begins, 64).extra["began"]).endswith(first)
    assert 'checkpoint = "version-000001"' in (job.out / "config.toml").read_text()
    job.succeed(*QUICK, *begins, 128, "--resume")
    job.out = source
    job.succeed(*QUICK, *best, *keep, "--resume", "--checkpoint", "best")
    job.check_records(6, 64, resumed=True)
    assert job.checkpoints == [first, last]


def test_a_best_checkpoint_that_is_gone_is_said_and_found_anew(job: Job) -> None:
    """From an older checkpoint than the newest: what was best before it has been replaced since."""
    best = (f"{BEST}metric", "env_steps", "--training.keep_checkpoints", 3)
    job.succeed(*QUICK, *best)
    path = job.out / "checkpoints/version-000004/progress.json"
    note = json.loads(path.read_bytes())
    assert note["best"]["checkpoint"] == "version-000004"
    note["best"]["checkpoint"] = "version-000003"
    path.write_text(json.dumps(note))
    ended = job.train(*QUICK, *best, "--resume", "--checkpoint", 4)
    assert ended.code == 0
    assert "its best checkpoint so far, version-000003, is not there any more" in ended.err
    assert job.note["best"]["checkpoint"] == "version-000006"


def test_killed_around_the_stop_and_the_best_checkpoint_each_iteration_is_there_once(
    job: Job, start_driver: Start
) -> None:
    """After a checkpoint is complete and before it is named; and between the target and the end."""
    asked = (
        *(*QUICK, "--training.checkpoint_every", 1, "--training.keep_checkpoints", 1),
        *(f"{BEST}metric", "env_steps", f"{BEST}lowest", "true", "--evaluation.episodes", 10**6),
        *(f"{STOP}metric", "env_steps", f"{STOP}least", 64 * 5, "--training.total_steps", 64 * 100),
    )
    start = partial(
        start_driver,
        "train",
        job.file,
        "--out",
        job.out,
        "--resume",
        "--cluster.backend",
        "process",
    )
    places = job.out / "checkpoints"
    moments = {
        "saving": lambda: any(places.glob("*version-000003*")),
        "evaluating": lambda: _reached(job.out),
    }
    for moment, condition in moments.items():
        driver = start(*asked)
        driver.until(condition, moment)
        driver.kill()
        assert driver.wait() == -9
        assert (places / "version-000001").is_dir()
    ended = job.succeed("--resume", *asked, "--evaluation.episodes", 1)
    assert str(ended.reached).startswith("env_steps at least 320 was reached in iteration 4: ")
    job.check_records(5, 64, resumed=True)
    # Killed after the fifth was named and before the fourth went, it has that, too: it goes with
    # the next one that is written, and here there is none.
    assert {*job.checkpoints} - {"version-000004"} == {"version-000001", "version-000005"}


def _reached(run: pathlib.Path) -> bool:
    """Whether the live view of the run says that its target is reached."""
    status = look_at_run(run).status
    shown = {} if status is None else dict(status.shown.figures)
    return "was reached" in shown.get("target", "")


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("stop_at.metric", "sucess_rate", "stop_at.least", 1),
            "no iteration writes a column 'sucess_rate' (did you mean 'success_rate'?)",
        ),
        (
            ("stop_at.metric", "eval_return", "stop_at.least", 1),
            "'eval_return' is measured once, at the end of the run: take 'return'",
        ),
        (("stop_at.metric", "return"), "training.stop_at.metric: 'return' has to be at least or"),
        (
            ("stop_at.metric", "return", "stop_at.least", 1, "stop_at.most", 2),
            "training.stop_at.metric: 'return' has to be at least or at most a number, and both",
        ),
        (("stop_at.metric", "return", "stop_at.least", "nan"), "stop_at.least: least is nan"),
        (("stop_at.least", 1), "training.stop_at.least: 1.0 was given, but no column"),
        (("stop_at.times", 2), "training.stop_at.times: 2 was given, but no column"),
        (
            ("stop_at.metric", "return", "stop_at.least", 1, "stop_at.times", 7),
            "training.stop_at.times: 7 times in a row are never reached by a run of 6 iterations",
        ),
        (("keep_best.metric", "eval_return"), "training.keep_best.metric: 'eval_return' is"),
        (("keep_best.metric", "replay_size"), "training.keep_best.metric: no iteration writes"),
        (("keep_best.lowest", "true"), "training.keep_best.lowest: true was given, but no column"),
        (
            ("keep_best.metric", "return", "checkpoint_every", 0),
            "training.keep_best.metric: 'return' would choose among checkpoints",
        ),
    ],
)
def test_what_could_never_be_is_refused(job: Job, arguments: tuple[object, ...], said: str) -> None:
    asked = [f"--training.{one}" if at % 2 == 0 else one for at, one in enumerate(arguments)]
    ended = job.command("check", job.file, *asked)
    assert ended.code == 2
    assert said in " ".join(ended.err.split()), ended.err


def test_columns_that_check_knows_are_those_that_are_written(job: Job, sac: SacJob) -> None:
    from rlinf_async.backends.fsdp.config import OF_LOSS
    from rlinf_async.runtime.jobs.embodied.job import OF_TRAINING
    from rlinf_async.runtime.jobs.embodied.run import AT_THE_END, COLUMNS, OF_EPISODES
    from rlinf_async.runtime.jobs.embodied_sac.job import COLUMNS as OF_SAC
    from rlinf_async.runtime.jobs.embodied_sac.job import OF_CRITICS

    for one, columns in ((job, OF_LOSS + OF_TRAINING), (sac, OF_SAC + OF_CRITICS)):
        one.succeed(*QUICK)
        header = (one.out / "metrics.csv").read_text().splitlines()[0].split(",")
        may_lack = {"step", *AT_THE_END, *OF_EPISODES}
        assert {*header} - may_lack == {*COLUMNS, *columns} - may_lack


LOSSES = """
from rlinf_async.algorithms.losses import LossOutput, ppo_loss

def watched(inputs, config):
    loss, metrics = ppo_loss(inputs, config)
    return LossOutput(loss, {**metrics, "seven": 7.0})

def bare(inputs, config):
    return LossOutput(ppo_loss(inputs, config).loss, {"seven": 7.0})

def taken(inputs, config):
    return LossOutput(ppo_loss(inputs, config).loss, {"version": 7.0})

def corrected(inputs, config):
    return LossOutput(ppo_loss(inputs, config).loss, {"off_policy_weight": 7.0})

def fails(inputs, config):
    raise RuntimeError("needs more")
"""


CORRECTED = (f"{STOP}metric", "off_policy_weight", f"{STOP}most", 0.5)
STALE = ("--training.max_staleness", 1)
BEHAVIOUR = ("--actor.ppo.loss.proximal", "behaviour")


def test_metrics_of_a_loss_are_columns_that_end_training(job: Job) -> None:
    file = job.file.with_name("losses.py")
    file.write_text(LOSSES)

    def loss(name: str) -> tuple[object, ...]:
        return "--actor.ppo.loss.name", f"{file}:{name}"

    until_7 = (f"{STOP}metric", "seven", f"{STOP}least", 7)
    summary = job.succeed(*QUICK, *loss("watched"), *until_7)
    assert summary.reached == "seven at least 7 was reached in iteration 0: 7"
    [row] = job.iterations
    assert (row["seven"], row["updates"]) == ("7", "8")
    assert row["approx_kl"]
    for refused, said in (
        ((*loss("bare"), f"{BEST}metric", "entropy"), "no iteration writes a column 'entropy'"),
        ((*loss("bare"), "--actor.ppo.target_kl", 0.1), "actor.ppo.target_kl: 0.1 is a limit of"),
        (loss("taken"), "a metric 'version', which an iteration has already"),
        (loss("corrected"), "a metric 'off_policy_weight', which an iteration has already"),
        (CORRECTED, "no iteration writes a column 'off_policy_weight'"),
        ((*CORRECTED, *STALE, *BEHAVIOUR), "no iteration writes a column 'off_policy_weight'"),
        ((*loss("fails"), *until_7), "for a small batch it raised RuntimeError: needs more"),
    ):
        ended = job.command("check", job.file, *refused)
        assert ended.code == 2
        assert said in ended.err
    assert job.command("check", job.file, *CORRECTED, *STALE).code == 0


def test_ranks_whose_losses_have_other_metrics_are_an_error() -> None:
    parts = [
        TrainReport(
            iteration=3,
            version=4,
            metrics={"x": 1.0, name: 2.0},
            env_steps=8,
            lag_mean=0.0,
            lag_max=0,
            duplicates=0,
            episode_return=[],
            episode_length=[],
            episode_success=[],
        )
        for name in ("a", "b")
    ]
    assert merged([parts[0], parts[0]]).metrics == {"x": 1.0, "a": 2.0}
    with pytest.raises(ValueError, match="iteration 3 with different metrics: not all have a, b"):
        merged(parts)


def test_a_target_for_a_success_that_is_never_reported_is_said(job: Job) -> None:
    ended = job.train(*QUICK, f"{STOP}metric", "success_rate", f"{STOP}least", 0.5)
    assert ended.code == 0
    assert "training.stop_at.metric is success_rate, but CartPole-v1 has reported no" in ended.err


def test_commands_say_that_there_is_no_best_checkpoint(job: Job) -> None:
    job.succeed(*QUICK, "--training.total_steps", 64)
    for command in (("evaluate", job.out), ("export", job.out, job.out.parent / "left")):
        ended = job.command(*command, "--checkpoint", "best")
        assert ended.code == 2
        assert "has kept no best checkpoint: training.keep_best.metric says which" in ended.err
    ended = job.command("export", job.out / "checkpoints/version-000001", "x", "--checkpoint", 1)
    assert "is not the folder of a run: leave it out" in ended.err
