"""Whole runs of the language job: what they leave, and that they are as on-policy as they say."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest

from rlinf_async.messages.language import Prompt, Request, ScoredSample
from rlinf_async.observe.metrics import read_columns
from rlinf_async.runtime.jobs.language.roles import Roles
from rlinf_async.runtime.jobs.language.samples import Collector, Ledger
from rlinf_async.runtime.jobs.view import LiveView
from tests.docs.pages import ROOT
from tests.jobs.language.kit import Job

NOTING = """
def note(what):
    with open({path!r}, "a") as file:
        file.write(what + " ")

note("imported")

def score(answer):
    note("scored")
    return 0.5
"""

LETTERS = "tests.jobs.language.verifiers:letters"


def test_a_run_trains_every_admitted_sample_once_and_leaves_its_results(job: Job) -> None:
    summary = job.succeed()
    assert summary.outcome == "finished"
    assert summary.iterations == 4
    assert summary.samples == 4 * 4 * 2
    assert [int(float(row["samples"])) for row in job.iterations] == [8, 16, 24, 32]
    assert sum(summary.outcomes.values()) == 32
    assert job.checkpoints == ["version-000002", "version-000004"]
    for name in ("learning_curve.png", "timeline.png"):
        assert (job.out / name).read_bytes().startswith(b"\x89PNG")


def test_every_scoring_process_has_its_verifier_before_the_first_sample(
    job: Job, tmp_path: pathlib.Path
) -> None:
    noted, verifier = tmp_path / "noted", tmp_path / "noting.py"
    verifier.write_text(NOTING.format(path=str(noted)))
    job.succeed("--data.verifier", f"{verifier}:score", "--reward.processes", 3)
    lines = noted.read_text().split()
    assert lines.index("scored") == 1 + 3  # this process looks for the verifier, too


def test_without_staleness_every_token_is_of_the_weights_it_trains(job: Job) -> None:
    summary = job.succeed()
    assert summary.staleness is not None
    assert summary.staleness.max == 0
    assert [row["staleness_max"] for row in job.iterations] == ["0"] * 4


@pytest.mark.parametrize("ahead", [1, 2])
def test_staleness_is_used_and_never_exceeded(job: Job, ahead: int) -> None:
    summary = job.succeed("--training.max_staleness", ahead, "--training.iterations", 8)
    assert summary.staleness is not None
    assert 0 < summary.staleness.max <= ahead
    assert summary.samples == 64


TAIL = ("--scheduler.policy", "tail", "--actor.global_batches", 2)


@pytest.mark.parametrize(
    ("ahead", "more"),
    [
        (0, ()),
        (2, ()),
        (0, ("--cluster.placement", "collocated")),
        (1, ("--actor.pipelined", "false", "--actor.global_batches", 2, "--actor.epochs", 2)),
        (1, (*TAIL, "--cluster.rollout_workers", 2)),
        (1, ("--episode.run", "tests.jobs.language.agents:talks", "--cluster.episode_workers", 1)),
        (0, ("--training.accept", "varied", "--data.verifier", LETTERS)),
    ],
)
def test_an_evaluation_in_between_is_of_the_version_that_its_row_says(
    job: Job, ahead: int, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, set[int]] = {}
    answer = Collector._answer

    def noted(collector: Collector, request: Request, scored: ScoredSample) -> None:
        made = scored.sample.generated
        seen.setdefault(request.iteration, set()).update(made.version[made.drawn_mask].tolist())
        answer(collector, request, scored)

    monkeypatch.setattr(Collector, "_answer", noted)
    job.succeed("--evaluation.every", 2, "--training.max_staleness", ahead,
                "--training.iterations", 6, *more)  # fmt: skip
    assert seen == {version: {version} for version in (0, 2, 4, 6)}
    columns = read_columns(job.out / "metrics.csv")
    rows = [row for row, one in enumerate(columns["eval_version"]) if not math.isnan(one)]
    assert [columns["eval_version"][row] for row in rows] == [0, 2, 4, 6]
    assert [columns["step"][row] for row in rows] == [0, 17, 33, 49]
    assert [columns["samples"][row] for row in rows] == [0, 16, 32, 48]
    assert columns["step"] == sorted(set(columns["step"]))


def test_an_iteration_is_trained_while_an_evaluation_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers come only when the iteration beside them is trained, and not before."""
    held: list[tuple[Collector, Request, ScoredSample]] = []
    answer, train = Collector._answer, Roles.train
    trained: list[int] = []

    def holding(collector: Collector, request: Request, scored: ScoredSample) -> None:
        if request.iteration in (0, 6):  # before and after the training
            answer(collector, request, scored)
        else:
            held.append((collector, request, scored))

    async def training(roles: Roles, iteration: int, whole: Any) -> Any:
        found = await train(roles, iteration, whole)
        trained.append(iteration)
        if iteration == 2:
            monkeypatch.setattr(Collector, "_answer", answer)
            for one in held:
                answer(*one)
        return found

    monkeypatch.setattr(Collector, "_answer", holding)
    monkeypatch.setattr(Roles, "train", training)
    job.succeed("--evaluation.every", 2, "--training.iterations", 6)
    assert trained == list(range(6))
    assert {request.iteration for _, request, _ in held} <= {2}


def test_a_long_run_takes_every_word_of_its_rollout_workers(job: Job) -> None:
    assert job.succeed("--training.iterations", 40).iterations == 40


@pytest.mark.parametrize("placement", ["disaggregated", "collocated"])
@pytest.mark.parametrize("pipelined", ["true", "false"])
def test_a_real_model_is_trained_on_policy_in_every_mode(
    tiny: Job, placement: str, pipelined: str
) -> None:
    summary = tiny.succeed(
        *("--cluster.placement", placement, "--actor.pipelined", pipelined),
        *("--training.iterations", 2, "--data.verifier", LETTERS),
    )
    assert summary.samples == 16
    assert summary.staleness is not None
    assert summary.staleness.max == 0
    for row in tiny.iterations:
        assert math.isfinite(float(row["policy_loss"]))


def test_whoever_may_read_a_runs_files_may_read_the_weights_it_leaves(tiny: Job) -> None:
    tiny.succeed(
        *("--training.iterations", 1, "--warm_start.steps", 2, "--warm_start.batch_size", 4),
        *("--evaluation.samples", 0, "--data.verifier", LETTERS),
    )
    for name in ("model", "trained"):
        modes = {path.stat().st_mode for path in (tiny.out / name).iterdir() if path.is_file()}
        assert (tiny.out / name / "model.safetensors").is_file()
        assert len(modes) == 1


def test_log_probs_of_the_actor_and_of_the_reference_pass_through_inference(tiny: Job) -> None:
    summary = tiny.succeed(
        *("--cluster.inference_workers", 1, "--actor.loss.kl_coefficient", 0.1),
        *("--training.iterations", 2, "--actor.optimizer.lr", 1e-2, "--data.verifier", LETTERS),
    )
    assert summary.samples == 16
    assert abs(float(tiny.iterations[0]["ref_kl"])) < 1e-6  # the reference is the first version
    assert float(tiny.iterations[1]["ref_kl"]) > 1e-6


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_kept_is_trained_on_at_every_version(tiny: Job, ahead: int) -> None:
    """With two global batches the inference worker's log-probs, over what was kept, are needed."""
    tiny.succeed(
        *("--rollout.sampling.top_k", 12, "--rollout.sampling.top_p", 0.9),
        *("--rollout.sampling.temperature", 0.8, "--cluster.inference_workers", 1 - ahead),
        *("--training.max_staleness", ahead, "--actor.global_batches", 2),
        *("--actor.loss.entropy_coefficient", 0.01, "--actor.optimizer.lr", 1e-2),
        *("--data.verifier", LETTERS, "--evaluation.samples", 0, "--training.iterations", 3),
    )
    for row in tiny.iterations:
        compared = float(row["engine_actor_tokens"])
        if ahead == 0:  # of the first of two global batches
            assert compared > 0.0
            assert float(row["staleness_max"]) == 0.0
        if compared:
            assert float(row["engine_actor_difference"]) < 1e-5


def test_a_run_in_bfloat16_goes_on_with_the_differences_that_its_rounding_makes(tiny: Job) -> None:
    """With logits of 20 and more, as trained models have them: single tokens differ by tenths."""
    tiny.succeed(
        *("--actor.precision", "bfloat16", "--rollout.transformers.dtype", "bfloat16"),
        *("--actor.publish_precision", "bfloat16", "--model.config.initializer_range", 1.0),
        *("--data.verifier", LETTERS, "--evaluation.samples", 0, "--training.iterations", 2),
    )
    differences = [float(row["engine_actor_difference"]) for row in tiny.iterations]
    assert max(differences) > 1e-3


def test_every_column_of_the_metrics_is_explained(tiny: Job) -> None:
    tiny.succeed(
        *("--cluster.inference_workers", 1, "--actor.loss.kl_coefficient", 0.1),
        *("--actor.loss.off_policy", "truncated", "--actor.loss.early_stop_ratio", 2.0),
        *("--actor.loss.proximal", "step", "--training.max_staleness", 1),
        *("--actor.epochs", 2, "--training.iterations", 1, "--data.verifier", LETTERS),
    )
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    table = page.partition("| column | is |")[2].partition("\n\n")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    columns = set(tiny.iterations[0])
    assert len(columns) > 25
    assert columns <= explained


def test_engine_and_trainer_are_compared_on_training_prompts_where_none_are_held_out(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    trained: list[str] = []
    check, admit = Roles.check_weights, Ledger.admit

    async def checking(roles: Roles, prompts: Sequence[Prompt], version: int) -> float | None:
        compared.extend(one.text for one in prompts)
        return await check(roles, prompts, version)

    def admitting(ledger: Ledger, prompts: Sequence[Prompt]) -> list[Request]:
        trained.extend(one.text for one in prompts)
        return admit(ledger, prompts)

    monkeypatch.setattr(Roles, "check_weights", checking)
    monkeypatch.setattr(Ledger, "admit", admitting)
    tiny.succeed(
        *("--data.held_out", 0, "--evaluation.samples", 0, "--training.iterations", 1),
        *("--data.verifier", LETTERS),
    )
    assert len(compared) == 4
    assert trained == compared  # they are trained on all the same


def test_an_evaluation_says_how_many_answers_are_there(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(
        LiveView,
        "note",
        property(lambda view: notes[-1], lambda view, note: notes.append(note)),
        raising=False,
    )
    job.succeed("--training.iterations", 1)
    counted = [f"evaluating: {done} of 4 answers" for done in range(5)]
    assert [note for note in notes if note.startswith("evaluating")] == counted * 2


def test_a_warm_start_says_how_far_it_has_come(tiny: Job) -> None:
    ended = tiny.train(
        *("--warm_start.steps", 2, "--warm_start.batch_size", 4, "--training.iterations", 1),
        *("--evaluation.samples", 0, "--data.verifier", LETTERS),
    )
    assert ended.code == 0
    assert "tiny (seed 0), warm start: iteration 2/2 | loss" in ended.out
