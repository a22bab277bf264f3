"""``rlinf-async evaluate`` of language models: the run's own figures again, folders, refusals."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import msgspec
import pytest

from rlinf_async.config import load
from rlinf_async.observe.evaluations import Evaluated
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.language.answering import only_answering
from rlinf_async.runtime.jobs.language.backends import placed, plan_roles
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.launching import stated_devices
from tests.jobs.language.agents import WITH_TOOLS
from tests.jobs.language.kit import TOY, Job
from tests.jobs.language.test_evaluation import FOUR, with_set

VERIFIERS = "tests.jobs.language.verifiers"
LEARNS = (
    *("--data.verifier", f"{VERIFIERS}:letters", "--actor.optimizer.lr", 1e-2),
    *("--training.iterations", 2, "--training.checkpoint_every", 1, "--evaluation.every", 1),
)


def told(job: Job, *arguments: object) -> dict[str, Any]:
    ended = job.command("evaluate", *arguments, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def figures(found: dict[str, Any]) -> dict[str, Evaluated]:
    return msgspec.convert(found["sets"], dict[str, Evaluated], str_keys=True)


def test_a_run_evaluates_to_its_own_figures_again(tiny: Job) -> None:
    """Greedy and drawn answers, the newest checkpoint and an older one."""
    summary = tiny.succeed(*with_set(tiny, *FOUR), *LEARNS)
    newest = told(tiny, tiny.out)
    assert (newest["checkpoint"], newest["seed"]) == ("version-000002", 0)
    assert figures(newest) == summary.evaluations
    assert set(summary.evaluations) == {"held_out", "more"}
    trained = figures(told(tiny, tiny.out, "--checkpoint", "trained"))
    nameless = {name: msgspec.structs.replace(one, version=None) for name, one in
                summary.evaluations.items()}  # fmt: skip
    assert trained == nameless
    older = told(tiny, tiny.out, "--checkpoint", 1)
    assert {one["version"] for one in older["sets"].values()} == {1}
    row = next(one for one in rows(tiny) if one["eval_version"] == "1")
    assert figures(older)["held_out"].columns() == pytest.approx(
        {name: float(text) for name, text in row.items()
         if name.startswith("eval_") and text and "more" not in name and "wait" not in name}
    )  # fmt: skip
    other = told(tiny, tiny.out, "--seed", 7)
    assert other["sets"]["held_out"] == newest["sets"]["held_out"]  # nothing is drawn
    assert other == told(tiny, tiny.out, "--seed", 7)


def rows(job: Job) -> list[dict[str, str]]:
    with (job.out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_answers_the_prompts_that_are_given(tiny: Job) -> None:
    tiny.succeed(*LEARNS, "--evaluation.samples", 0, "--evaluation.every", 0)
    model = tiny.out / "trained"
    sums = tiny.file.parent / "sums.jsonl"
    data = ("--data.path", sums, "--data.verifier", f"{VERIFIERS}:early")
    drawn = (*data, "--samples", 4, "--temperature", 1, "--prompts", 6, "--max-tokens", 5)
    first = told(tiny, model, *drawn)
    [found] = figures(first).values()
    assert (found.name, found.prompts, found.samples, found.version) == ("data", 6, 24, None)
    assert set(found.pass_at) == {2, 4}
    assert told(tiny, model, *drawn) == first
    run = told(tiny, tiny.out, *drawn)
    assert run["checkpoint"] == "version-000002"
    of_run = {**run["sets"]["data"], "version": None}
    assert of_run == first["sets"]["data"]  # the same model, prompts and seed
    printed = tiny.command("evaluate", model, *drawn)
    assert printed.code == 0
    assert f"{model}: 24 answers, seed 0" in printed.out
    assert found.accuracy is not None
    value, low, high = msgspec.structs.astuple(found.accuracy)
    assert f"{value:.3f}" in printed.out
    assert f"{low:.3f} to {high:.3f}" in printed.out
    assert "pass@4" in printed.out
    assert told(tiny, model, *drawn, "--cluster.backend", "process") == first


def test_episodes_are_played_in_runs_and_folders_with_the_template_that_is_given(
    tiny: Job,
) -> None:
    template = tiny.file.parent / "talk.jinja"
    template.write_text(WITH_TOOLS)
    episodes = (
        *("--episode.run", "tests.jobs.language.agents:talks", "--episode.max_tokens", 60),
        *("--data.chat_template", template),
    )
    least = ("--training.iterations", 1, "--evaluation.samples", 0, "--evaluation.every", 0)
    tiny.succeed(*episodes, *least, "--cluster.episode_workers", 1)
    data = ("--data.path", tiny.file.parent / "sums.jsonl", "--data.verifier", "exact")
    greedy = ("--temperature", 0, "--max-tokens", 6)
    run = told(tiny, tiny.out, *data, *greedy)
    folder = told(tiny, tiny.out / "trained", *data, *greedy, *episodes)
    assert run["sets"]["data"]["prompts"] == 24
    assert {**run["sets"]["data"], "version": None} == folder["sets"]["data"]

    def refused(*settings: object) -> str:
        ended = tiny.command("evaluate", *settings, *data)
        assert ended.code == 2, ended
        return ended.err

    other = tiny.file.parent / "other.jinja"
    other.write_text("{{ messages }}")
    assert "with data.chat_template" in refused(tiny.out, "--data.chat_template", other)
    alone = refused(tiny.out / "trained", "--cluster.episode_workers", 1)
    assert "there are 1 episode workers, but each sample is one answer" in alone
    assert "episode.max_turns: each sample is one answer" in refused(
        tiny.out / "trained", "--episode.max_turns", 3
    )


def test_what_was_not_scored_is_said(tiny: Job) -> None:
    tiny.succeed(*LEARNS, "--evaluation.samples", 0, "--evaluation.every", 0)
    sums = tiny.file.parent / "sums.jsonl"
    data = ("--data.path", sums, "--data.verifier", f"{VERIFIERS}:sometimes")
    ended = tiny.command("evaluate", tiny.out / "trained", *data, "--cluster.backend", "local")
    assert ended.code == 0
    assert "not scored" in ended.out
    assert "data: the first that was not scored: " in ended.err
    assert "no server" in ended.err


def test_wrong_input_is_refused_with_the_setting(
    tiny: Job, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.succeed(*LEARNS, "--evaluation.samples", 0, "--evaluation.every", 0)
    model, sums = tiny.out / "trained", tiny.file.parent / "sums.jsonl"
    data = ("--data.path", sums, "--data.verifier", "numeric")
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((), "Give one folder of a run, or of a model"),
        ((tiny.out, model), "Give one folder of a run, or of a model, found 2"),
        ((tmp_path / "nowhere",), "there is no such folder"),
        ((tiny.out,), "there is nothing to evaluate on: the configuration has neither held-out"),
        ((tiny.out, "--checkpoint", 7), "it has: version-000001, version-000002"),
        ((tiny.out, "--samples", 2), "--samples is of the prompts that --data.path or --data.tas"),
        ((tiny.out, "--actor.optimizer.lr", 1), "--actor.optimizer.lr: an evaluation has no use"),
        ((tiny.out, "--episodes", 3), "--episodes: a language model acts in no environment"),
        ((model,), "which prompts is it to answer? Give --data.path FILE --data.verifier NAME"),
        ((model, *data, "--checkpoint", 1), "is a model, not a run: leave it out"),
        ((model, *data, "--samples", 2), "samples is 2, but at temperature 0 the most likely"),
        ((model, *data, "--data.held_out", 2), "held_out is 2, but all prompts of a set are for"),
        ((model, *data[:2]), "what scores the answers? give verifier"),
        ((model, *data[:2], "--data.verifier", "numerc"), "no verifier is called 'numerc'"),
        ((model, *data, "--rollout.backend", "toy"), "'toy', which has no weights"),
        ((model, *data, "--max-tokens", 10**7), "have to fit the model's context"),
        ((model, *data, "--training.prompts", 2), "--training.prompts: an evaluation has no use"),
    ]
    for arguments, message in wrong:
        ended = tiny.command("evaluate", *arguments)
        assert ended.code == 2, (arguments, ended.err)
        assert message in ended.err, arguments
        assert ended.out == ""
    (model / "config.json").write_text("{")
    ended = tiny.command("evaluate", model, *data)
    assert ended.code == 2
    assert "config.json is damaged" in ended.err


def test_a_run_of_toys_has_no_model(job: Job) -> None:
    job.succeed("--training.iterations", 1)
    ended = job.command("evaluate", job.out)
    assert (ended.code, ended.out) == (2, "")
    assert "'toy', which has no weights: there is no model to evaluate" in ended.err


def test_a_run_that_has_not_ended_has_left_no_model(job: Job) -> None:
    with RunFolder.create(job.out, config_text=TOY.format(data="none.jsonl")):
        ended = job.command("evaluate", job.out, "--checkpoint", "trained")
    assert ended.code == 2
    assert "has left no model: it has not ended" in ended.err


def test_a_run_of_many_actors_is_evaluated_on_one_device(tiny: Job, tmp_path: pathlib.Path) -> None:
    """Rollout workers have all devices, wherever actors and critics were to be."""
    config = load(
        tiny.file,
        {
            "cluster.backend": "process",
            "cluster.actors": "4",
            "cluster.placement.actor": "0-3",
            "cluster.placement.rollout": "0",
        },
        LanguageConfig,
    )
    alone = only_answering(config, tmp_path)
    [device] = stated_devices("1xH100")
    plan = plan_roles(alone, [device], learners=False)
    assert plan.ranks["rollout"] == [(0,)]
    assert "actor" not in plan.ranks
    found = placed(alone, plan)
    assert found.cluster.rollout_workers == 1
    assert found.rollout.engine.weights == "folder"
