"""What an evaluation reports: accuracy where answers are right or wrong, and of all answers."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlinf_async as ra
from rlinf_async.messages.language import Failed, Outcome, Rejected, Request, Scored, ScoredSample
from rlinf_async.observe.evaluations import pass_at_k
from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.language.config import EvaluationConfig, EvaluationSetConfig
from rlinf_async.runtime.jobs.language.evaluation import reaches, summed_up
from rlinf_async.runtime.jobs.language.samples import Collector
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.docs.pages import ROOT
from tests.docs.test_documentation import defaults, written
from tests.jobs.language.kit import Job
from tests.workers.reward.kit import Channels, sample

VERIFIERS = "tests.jobs.language.verifiers"

UNSCORED: list[Outcome] = [Failed(error="no server"), Rejected(reason="no answer")]
right_or_wrong = st.sampled_from([0.0, 1.0]).map(lambda reward: Scored(reward=reward))
shaped = st.floats(-5, 5, allow_nan=False).map(lambda reward: Scored(reward=reward))
unscored = st.sampled_from(UNSCORED)


@given(st.lists(st.one_of(right_or_wrong, unscored), min_size=1))
def test_accuracy_is_the_share_of_right_ones_among_all_that_were_asked_for(
    outcomes: list[Outcome],
) -> None:
    found = summed_up(outcomes)
    right = sum(one == Scored(reward=1.0) for one in outcomes)
    missing = sum(not isinstance(one, Scored) for one in outcomes)
    assert (found.samples, found.unscored) == (len(outcomes), missing)
    if missing == len(outcomes):
        assert found.accuracy is None
        assert found.reward is None
    else:
        assert found.accuracy is not None
        assert found.accuracy.value == pytest.approx(float(Fraction(right, len(outcomes))))
    assert bool(found.why) == bool(missing)


@given(st.lists(st.one_of(right_or_wrong, shaped), min_size=1), st.data())
def test_an_answer_that_is_not_scored_raises_no_accuracy_and_reaches_no_target(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    whole = summed_up(outcomes)
    at = data.draw(st.integers(0, len(outcomes) - 1))
    holed = summed_up([*outcomes[:at], data.draw(unscored), *outcomes[at + 1 :]])
    if whole.accuracy is not None and holed.accuracy is not None:
        assert holed.accuracy.value <= whole.accuracy.value
    assert not reaches(holed, EvaluationConfig(target_reward=-1e9))
    if whole.accuracy is not None:
        assert reaches(whole, EvaluationConfig(target_accuracy=whole.accuracy.value))
    assert whole.reward is not None
    assert reaches(whole, EvaluationConfig(target_reward=whole.reward.value))


@given(st.lists(shaped, min_size=1))
def test_the_mean_of_shaped_rewards_is_no_accuracy(outcomes: list[Outcome]) -> None:
    found = summed_up(outcomes)
    rewards = [one.reward for one in outcomes if isinstance(one, Scored)]
    assert found.reward is not None
    assert found.reward.value == pytest.approx(sum(rewards) / len(rewards))
    assert (found.accuracy is None) == bool(set(rewards) - {0.0, 1.0})
    assert set(found.columns()) >= {"eval_reward", "eval_unscored"}


@pytest.mark.parametrize("verifier", ["sometimes", "rejects"])
def test_a_verifier_that_leaves_wrong_answers_unscored_makes_no_run_succeed(
    job: Job, verifier: str
) -> None:
    ended = job.train(
        *("--data.verifier", f"{VERIFIERS}:{verifier}", "--evaluation.target_accuracy", 0.9),
        *("--training.iterations", 1, "--data.held_out", 8, "--evaluation.samples", 8),
    )
    assert ended.code == 1
    summary = job.summary
    assert summary.outcome == "fell short"
    assert summary.evaluation_samples == 8
    assert summary.evaluation_unscored is not None
    assert 0 < summary.evaluation_unscored < 8
    assert summary.eval_accuracy == 1 - summary.evaluation_unscored / 8
    assert summary.eval_reward == 1.0
    said = f"{summary.evaluation_unscored} of 8 answers were not scored: they count as not right"
    assert ended.err.count(said) == 1
    assert "no server" in ended.err
    assert f"{summary.evaluation_unscored} of 8 not scored" in ended.out
    assert "of them not scored" in ended.out


def test_a_shaped_reward_has_a_mean_and_a_target_of_its_own(job: Job) -> None:
    less = ("--training.iterations", 1, "--data.verifier", f"{VERIFIERS}:letters")
    ended = job.train(*less, "--evaluation.target_accuracy", 0.1)
    assert (ended.code, job.summary.outcome) == (1, "fell short")
    assert "set evaluation.target_reward instead" in ended.err
    assert job.summary.eval_accuracy is None
    mean = job.summary.eval_reward
    assert mean is not None
    assert f"mean reward {mean:.2f} (before: " in ended.out
    assert "accuracy" not in ended.out
    again = ("--resume", *less, "--evaluation.target_reward")
    assert job.train(*again, mean).code == 0
    assert job.train(*again, mean + 0.01).code == 1


def test_held_out_prompts_that_are_all_too_long_are_refused_and_some_are_counted(job: Job) -> None:
    text = job.file.read_text()
    job.file.write_text(text.replace("[data]", '[data]\ntoo_long = "skip"\nmax_prompt_tokens = 1'))
    ended = job.train()
    assert ended.code == 2
    assert (
        "data.held_out: all 4 held-out prompts are longer than max_prompt_tokens = 1" in ended.err
    )
    job.file.write_text(text.replace("[data]", '[data]\ntoo_long = "skip"\nmax_prompt_tokens = 6'))
    skipped = job.succeed("--training.iterations", 1, "--data.held_out", 20).dropped
    assert skipped["held-out prompts that are too long"] > 0


# ---- sets

MORE = ("--evaluation.sets.more.data.verifier", f"{VERIFIERS}:early")


def with_set(job: Job, *settings: object) -> tuple[object, ...]:
    """Settings of a set of six prompts, which are not those of the run."""
    more = job.file.parent / "more.jsonl"
    lines = [json.dumps({"prompt": f"{a}-{a}=", "answer": "0"}) for a in range(6)]
    more.write_text("\n".join(lines) + "\n")
    return ("--evaluation.sets.more.data.path", more, *MORE, *settings)


FOUR = ("--evaluation.sets.more.samples", 4, "--evaluation.sets.more.temperature", 1.0)


def test_the_figures_of_a_set_are_those_of_the_answers_that_are_kept(job: Job) -> None:
    ended = job.train(*with_set(job, *FOUR), "--evaluation.every", 2)
    assert ended.code == 0, ended.err
    kept = read_samples(job.out, kind="evaluation")
    of_set = [one for one in kept if one.get("evaluation_set") == "more"]
    assert len(kept) - len(of_set) == 3 * 4
    columns = read_columns(job.out / "metrics.csv")
    at = [row for row, one in enumerate(columns["eval_more_version"]) if not math.isnan(one)]
    assert [columns["eval_more_version"][row] for row in at] == [0, 2, 4]
    for row, version in zip(at, (0, 2, 4), strict=True):
        answers = [one for one in of_set if one["iteration"] == version]
        assert len({one["name"] for one in answers}) == len(answers) == 24
        assert {number for one in answers for number in one["versions"]} == {version}
        by_prompt: dict[str, list[float]] = {}
        for one in answers:
            by_prompt.setdefault(one["prompt"], []).append(one["reward"])
        right = [int(sum(one)) for one in by_prompt.values()]
        assert [len(one) for one in by_prompt.values()] == [4] * 6
        assert 0 < sum(right) < 24
        assert columns["eval_more_accuracy"][row] == pytest.approx(sum(right) / 24)
        for k in (2, 4):
            mean = sum(pass_at_k(4, one, k) for one in right) / 6
            assert columns[f"eval_more_pass_at_{k}"][row] == pytest.approx(mean)
    last = job.summary.evaluations["more"]
    assert (last.version, last.prompts, last.samples) == (4, 6, 24)
    assert last.accuracy is not None
    assert f"more {last.accuracy.value:.2f}" in ended.out
    assert job.summary.evaluations["held_out"].samples == 4


def test_the_answers_to_a_set_do_not_depend_on_the_run_beside_it(job: Job) -> None:
    def texts(*settings: object) -> list[str]:
        job.succeed(*with_set(job, *FOUR, "--training.iterations", 1), *settings)
        kept = read_samples(job.out, kind="evaluation")
        return [one["completion"] for one in kept if one.get("evaluation_set")]

    first = texts()
    job.out = job.out.with_name("other")
    assert texts("--evaluation.samples", 0, "--data.seed", 3) == first
    assert len(set(first[:24])) > 6


def test_the_first_prompts_of_a_set_are_those_of_its_seed_whatever_the_run_has(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    expect = Collector.expect

    def noted(collector: Collector, requests: list[Request]) -> Any:
        asked.append([one.prompt.text for one in requests if one.evaluation_set])
        return expect(collector, requests)

    monkeypatch.setattr(Collector, "expect", noted)
    settings = with_set(job, "--evaluation.sets.more.prompts", 3, "--training.iterations", 1)
    for number, more in enumerate(((), ("--seed", 5), ("--evaluation.sets.more.data.seed", 1))):
        job.out = job.out.with_name(f"run{number}")
        job.succeed(*settings, *more)
    assert [len(one) for one in asked] == [3] * 6
    assert asked[0] == asked[2] != asked[4]


@pytest.mark.parametrize("kind", ["reasoning_gym", "episodes", "processes"])
def test_a_set_of_tasks_or_of_episodes_is_answered_too(job: Job, kind: str) -> None:
    tasks = (
        *("--evaluation.sets.sums.data.tasks", '["chain_sum"]', "--training.iterations", 1),
        *("--evaluation.sets.sums.prompts", 5, "--evaluation.samples", 0),
    )
    talks = ("--episode.run", "tests.jobs.language.agents:talks", "--cluster.episode_workers", 1)
    settings = {
        "reasoning_gym": tasks,
        "episodes": with_set(job, *FOUR, *talks, "--training.iterations", 1),
        "processes": (*tasks, "--cluster.backend", "process"),
    }
    job.succeed(*settings[kind])
    [found] = [one for name, one in job.summary.evaluations.items() if name != "held_out"]
    assert found.version == 1
    assert found.samples == {"episodes": 24}.get(kind, 5)


async def test_a_swapped_verifier_does_not_score_the_answers_of_a_set() -> None:
    of_set = sample(1, verifier="numeric")
    of_set.request = msgspec.structs.replace(of_set.request, evaluation=True, evaluation_set="more")
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, RewardConfig(), "exact")
        running = channels.start(rewards)
        await channels.put(sample(0, verifier="numeric", text="4.0"))
        swapped = await channels.next()
        await channels.put(of_set)
        own = await channels.next()
        channels.samples.close()
        await running
    assert (swapped.verifier, own.verifier) == ("exact", "")
    assert (swapped.outcome, own.outcome) == (Scored(reward=0.0), Scored(reward=1.0))


def test_a_prompt_that_is_trained_on_is_said(job: Job) -> None:
    same = ("--evaluation.sets.same.data.path", job.file.parent / "sums.jsonl")
    ended = job.train(
        *same, "--evaluation.sets.same.data.verifier", "numeric", "--training.iterations", 1
    )
    assert ended.code == 0
    assert "24 of the 24 prompts of evaluation.sets.same are among the records of" in ended.err
    job.out = job.out.with_name("other")
    assert "are among the records" not in job.train(*with_set(job)).err


def test_an_answer_of_other_weights_ends_the_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Collector._answer

    def aged(collector: Collector, request: Request, scored: ScoredSample) -> None:
        generated = scored.sample.generated
        scored.sample.generated = msgspec.structs.replace(generated, version=generated.version - 1)
        answer(collector, request, scored)

    monkeypatch.setattr(Collector, "_answer", aged)
    assert job.train().code == 1
    assert "of the evaluation of version 0 has tokens of the versions [-1]" in str(
        job.summary.error
    )


SET = "--evaluation.sets.more."
WRONG: list[tuple[tuple[object, ...], str]] = [
    ((f"{SET}samples", 0), "samples is 0; it must be at least 1"),
    ((f"{SET}samples", 4), "samples is 4, but at temperature 0 the most likely token is taken"),
    ((f"{SET}top_k", 4), "top_k is 4, but at temperature 0"),
    ((f"{SET}top_p", 0.9), "top_p is 0.9, but at temperature 0"),
    ((f"{SET}temperature", 0.001), "temperature is 0.001; it must be a number from 0.01 on"),
    ((*FOUR, f"{SET}top_p", 2), "top_p is 2.0; it must lie above 0 and be at most 1"),
    ((f"{SET}prompts", -1), "prompts is -1; it must be at least 0"),
    ((f"{SET}max_tokens", 0), "max_tokens is 0; it must be at least 1"),
    ((f"{SET}max_tokens", 99, "--rollout.toy.context", 64), "more.max_tokens: max_tokens is 99"),
    ((f"{SET}data.held_out", 2), "more.data.held_out: held_out is 2, but all prompts of a set"),
    ((f"{SET}data.epochs", 2), "more.data.epochs: epochs is 2, but all prompts of a set"),
    ((f"{SET}data.verifier", "numerc"), "more.data.verifier: no verifier is called 'numerc'"),
    ((f"{SET}data.verifier", "none"), "more.data.verifier: no answer is right or wrong with"),
    ((f"{SET}data.verifier", "no.module:f"), "more.data.verifier: 'no.module:f'"),
    ((f"{SET}data.path", "no.jsonl"), "more.data.path"),
    ((f"{SET}data.prompt_column", "question"), "more.data: "),
    ((f"{SET}data.max_prompt_tokens", 3), "more.data: "),
    (
        (f"{SET}data.max_prompt_tokens", 3, f"{SET}data.too_long", "skip"),
        "more.data: ",
    ),
    (("--evaluation.sets.held_out.data.path", "a.jsonl", "--evaluation.sets.held_out.data.verifier",
      "exact"), "'held_out' cannot name a set: that is the set of data.held_out"),
    (("--evaluation.sets.a b.data.path", "a.jsonl", "--evaluation.sets.a b.data.verifier", "exact"),
     "'a b' cannot name a set: it names columns"),
]  # fmt: skip


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[f"{at}" for at in range(len(WRONG))])
def test_a_set_that_cannot_be_evaluated_is_refused_before_anything_starts(
    job: Job, settings: tuple[object, ...], message: str
) -> None:
    ended = job.command("check", job.file, *with_set(job), *settings)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert "evaluation" in ended.err


@pytest.mark.usefixtures("no_cluster")
def test_sets_and_episodes_that_do_not_fit_are_refused(job: Job) -> None:
    numbered = ("--evaluation.sets.own.data.environment_tasks", 4)
    refused = job.command("check", job.file, *numbered)
    assert refused.code == 2
    assert "own.data.environment_tasks: no environment makes these tasks" in refused.err
    talks = ("--episode.run", "tests.jobs.language.agents:talks", "--cluster.episode_workers", 1)
    refused = job.command("check", job.file, *with_set(job, f"{SET}data.chat", "false", *talks))
    assert refused.code == 2
    assert "more.data.chat: an episode is a conversation" in refused.err
    options = (f"{SET}data.chat_options.enable_thinking", "false")
    refused = job.command("check", job.file, *with_set(job, *options, *talks))
    assert refused.code == 2
    assert "more.data.chat_options: episodes render their conversations" in refused.err


def test_every_setting_of_a_set_and_every_column_is_explained() -> None:
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    part = page.partition("### A set: `[evaluation.sets.NAME]`")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", part, re.MULTILINE)
    own = {name: written(cell.strip("`")) for name, cell in rows}
    expected = {
        name: value
        for name, value in defaults(EvaluationSetConfig).items()
        if not name.startswith("data.")
    }
    assert own == {"data": "required", **expected}
    columns = re.findall(r"`eval_NAME_(\w+)`", page)
    assert set(columns) >= {"accuracy", "reward", "unscored", "version", "pass_at_K"}
