"""``actor.loss.off_policy`` as a whole table: a cell is refused, or it changes what is learnt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.jobs.language.kit import Job
from tests.jobs.language.test_runs import LETTERS

CELLS = list(
    itertools.product(
        ("truncated", "decoupled"),
        ("auto", "behaviour", "current", "step"),
        (0, 1),
        (0, 2),
        (1, 2),
    )
)
"""off_policy, proximal, inference workers, max_staleness, mini-batches"""
Cell = tuple[str, str, int, int, int]


def arguments(cell: Cell) -> tuple[Any, ...]:
    off_policy, proximal, inference, staleness, batches = cell
    return (
        *("--actor.loss.off_policy", off_policy, "--actor.loss.proximal", proximal),
        *("--cluster.inference_workers", inference, "--training.max_staleness", staleness),
        *("--actor.global_batches", batches, "--training.iterations", 6),
    )


def measured(cell: Cell) -> bool:
    """Whether it is to be accepted with toys, whose weights move between iterations only."""
    _, proximal, inference, staleness, _ = cell
    return proximal in ("current", "step") and staleness > 0 and not inference


@pytest.mark.parametrize("cell", [one for one in CELLS if not measured(one)], ids=str)
def test_a_correction_that_changes_nothing_is_refused(job: Job, cell: Cell) -> None:
    ended = job.command("check", job.file, *arguments(cell))
    assert ended.code == 2, ended.out
    _, proximal, inference, staleness, _ = cell
    idle = proximal in ("current", "step") and staleness and inference
    assert ("cluster.inference_workers" if idle else "actor.loss") in ended.err
    assert "set" in ended.err


@pytest.mark.parametrize("cell", [one for one in CELLS if measured(one)], ids=str)
def test_a_correction_that_is_accepted_changes_weights(job: Job, cell: Cell) -> None:
    job.succeed(*arguments(cell), "--evaluation.samples", 0)
    stale = [row for row in job.iterations if float(row["staleness_mean"]) > 0]
    assert stale
    assert all(float(row["off_policy_change"]) > 1e-3 for row in stale)


@pytest.mark.parametrize("name", ["icepop", "truncated_sequence"])
def test_every_weight_is_named_and_measured(job: Job, name: str) -> None:
    job.succeed(*arguments((name, "step", 0, 2, 1)), "--evaluation.samples", 0)
    stale = [row for row in job.iterations if float(row["staleness_mean"]) > 0]
    assert all(float(row["off_policy_change"]) > 1e-3 for row in stale)


MASKS = {
    "off_policy_geometric": "[0.999, 1.001]",
    "off_policy_product": "[0.99, 1.01]",
    "off_policy_veto": "0.999",
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_would_leave_out_nothing_is_refused(job: Job, mask: str) -> None:
    setting = (f"--actor.loss.{mask}", MASKS[mask])
    for proximal, staleness, said in [("current", 2, "'step'"), ("step", 0, "max_staleness")]:
        ended = job.command(
            *("check", job.file, *setting, "--actor.loss.proximal", proximal),
            *("--training.max_staleness", staleness),
        )
        assert ended.code == 2, ended.out
        assert mask in ended.err
        assert said in ended.err


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_real_model_leaves_out_samples_that_it_is_far_from(tiny: Job, epochs: int) -> None:
    """With a weight beside the masks: all three hold at once."""
    tiny.succeed(
        *arguments(("truncated", "step", 0, 2, 2)),
        *("--actor.epochs", epochs, "--evaluation.samples", 0, "--actor.loss.name", "cispo"),
        *("--actor.optimizer.lr", 1e-2, "--data.verifier", LETTERS, "--actor.micro_batch_size", 2),
        *(part for name, value in MASKS.items() for part in (f"--actor.loss.{name}", value)),
    )
    shares = [float(row["off_policy_left_out"]) for row in tiny.iterations]
    fresh = [float(row["staleness_mean"]) == 0 for row in tiny.iterations]
    assert max(shares) > 0.1
    assert all(share == 0 for share, new in zip(shares, fresh, strict=True) if new)
    trained = [float(row["trained_tokens"]) for row in tiny.iterations]
    assert trained[shares.index(max(shares))] < max(trained)


@pytest.mark.parametrize("pipelined", ["true", "false"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_real_model_is_corrected_for_staleness_over_several_mini_batches(
    tiny: Job, pipelined: str, epochs: int
) -> None:
    tiny.succeed(
        *arguments(("truncated", "step", 0, 2, 2)),
        *("--actor.pipelined", pipelined, "--actor.epochs", epochs, "--evaluation.samples", 0),
        *("--actor.optimizer.lr", 1e-2, "--data.verifier", LETTERS, "--actor.micro_batch_size", 2),
    )
    stale = [row for row in tiny.iterations if float(row["staleness_mean"]) > 0]
    assert stale
    assert any(float(row["off_policy_change"]) > 1e-3 for row in stale)


def test_a_run_says_once_where_the_correction_changed_nothing_for_stale_samples(tiny: Job) -> None:
    ended = tiny.train(
        *arguments(("truncated", "step", 0, 2, 1)),
        *("--actor.optimizer.lr", 1e-30, "--data.verifier", LETTERS, "--evaluation.samples", 0),
    )
    assert ended.code == 0, ended.err
    assert ended.err.count("actor.loss.off_policy weighted each token by 1") == 1


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ((), 2),
        (("--actor.publish_precision", "bfloat16"), 0),
        (("--actor.precision", "bfloat16"), 0),
        (("--rollout.transformers.dtype", "bfloat16"), 0),
    ],
    ids=str,
)
def test_without_staleness_the_correction_is_for_engines_that_compute_otherwise(
    tiny: Job, other: tuple[str, ...], code: int
) -> None:
    settings = ("--actor.loss.off_policy", "truncated", "--actor.loss.proximal", "step")
    ended = tiny.command("check", tiny.file, *settings, *other)
    assert ended.code == code, ended.err
    if code:
        assert "training.max_staleness" in ended.err


def test_a_run_that_an_earlier_version_began_without_effect_goes_on_with_one_or_without_it(
    tiny: Job,
) -> None:
    short = ("--data.verifier", LETTERS, "--evaluation.samples", 0, "--training.max_staleness", 1)
    tiny.succeed(*short, "--training.iterations", 1)
    started = tiny.out / "config.toml"
    text = started.read_text(encoding="utf-8")
    assert 'off_policy = "none"' in text
    started.write_text(text.replace('off_policy = "none"', 'off_policy = "truncated"'))
    for iterations, now in [(2, ()), (3, arguments(("truncated", "step", 0, 1, 1)))]:
        ended = tiny.train(*short, *now, "--training.iterations", iterations, "--resume")
        assert ended.code == 0, ended.err
        assert "actor.loss.off_policy" in ended.err


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_log_probs_of_inference_workers_correct_for_the_precision_of_the_engine_alone(
    tiny: Job, precision: str
) -> None:
    ended = tiny.train(
        *arguments(("truncated", "auto", 1, 0, 1))[:-2],
        *("--rollout.transformers.dtype", precision, "--model.config.initializer_range", 1.0),
        *("--data.verifier", LETTERS, "--evaluation.samples", 0, "--training.iterations", 1),
    )
    assert ended.code == (0 if precision == "bfloat16" else 2), ended.err
    if not ended.code:
        assert float(tiny.iterations[0]["off_policy_change"]) > 1e-3
