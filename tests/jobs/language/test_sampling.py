"""Settings of samples in whole runs: what is sampled is what is trained, judged and resumed."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import pytest

from rlinf_async.observe.samples import read_samples
from tests.jobs.language.kit import LOSSES, Job
from tests.jobs.language.test_resumed import whole_and_killed

EVERYTHING: tuple[object, ...] = (
    *("--rollout.sampling.min_p", 0.05, "--rollout.sampling.top_k", 12),
    *("--rollout.sampling.top_p", 0.95, "--rollout.sampling.temperature", 0.9),
    *("--rollout.sampling.logit_bias", "[[3, 1.5], [4, -100]]"),
    *("--rollout.sampling.stop", '["7", "1+"]', "--rollout.sampling.stop_token_ids", "[5]"),
)
SET = "--evaluation.sets.other"
OF_A_SET = (
    *(f"{SET}.data.verifier", "numeric", f"{SET}.max_tokens", 4, f"{SET}.prompts", 4),
    *(f"{SET}.repetition_penalty", 1.2, f"{SET}.temperature", 0.7, f"{SET}.min_p", 0.1),
)


def test_answers_end_at_the_stops_of_a_run_whatever_its_engine(job: Job) -> None:
    told = ("--rollout.sampling.stop", '["e", "op"]', "--rollout.toy.mean_tokens", 30)
    job.succeed(*told, "--training.group_size", 4)
    kept = read_samples(job.out)
    assert {one["kind"] for one in kept} == {"training", "evaluation"}  # also of the greedy ones
    ended = [one for one in kept if one["finish"] == "stop"]
    assert 0 < len(ended) < len(kept)
    for one in kept:
        assert "e" not in one["completion"]
        assert "op" not in one["completion"]
        assert one["size"] == len(one["tokens"]) == len(one["log_probs"])
        assert one["size"] <= 8
    cut = [one for one in ended if one["tokens"][-1] % 26 == 4]
    assert cut
    assert all(len(one["completion"]) == one["size"] - 1 for one in cut)


def test_a_stop_text_that_no_answer_can_have_is_refused(job: Job) -> None:
    """The engines' text has no special tokens: it would never be found."""
    ended = job.command("check", job.file, "--rollout.sampling.stop", '["7", "7<user>"]')
    assert ended.code == 2
    assert (
        "rollout.sampling.stop: '7<user>' would end no response: '<user>' is a special token"
    ) in ended.err
    assert "set rollout.sampling.stop_token_ids to [4] instead" in ended.err


@pytest.mark.parametrize("inference", [0, 1])
def test_a_run_trains_what_every_setting_samples(tiny: Job, inference: int) -> None:
    tiny.succeed(
        *(*EVERYTHING, "--cluster.inference_workers", inference),
        *(*OF_A_SET, f"{SET}.data.path", tiny.file.parent / "sums.jsonl"),
        *("--training.iterations", 2, "--evaluation.every", 1),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
    )
    for row in tiny.iterations:
        assert float(row["ratio"]) == pytest.approx(1.0, abs=1e-5)
        assert float(row["engine_actor_difference"]) < 1e-5
        assert float(row["clip_fraction"]) == 0.0
    training = read_samples(tiny.out, kind="training")
    assert all(4 not in one["tokens"] for one in training)
    assert all(not {5} & set(one["tokens"][:-1]) for one in training)
    if inference:
        for one in training:
            assert one["prev_log_probs"] == pytest.approx(one["log_probs"], abs=2e-5)
    asked = read_samples(tiny.out, kind="evaluation")
    assert {one["size"] > 4 for one in asked} == {True, False}
    assert all(4 not in one["tokens"] for one in asked)


def test_a_run_with_every_setting_is_resumed_to_the_same_losses(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (
        *EVERYTHING,
        *("--training.iterations", 4, "--actor.pipelined", "false"),
        *("--data.verifier", "tests.jobs.language.verifiers:letters", "--evaluation.samples", 0),
    )
    whole, killed = whole_and_killed(tmp_path, capsys, 2, *settings)
    changed = killed.train(*settings, "--resume", "--rollout.sampling.min_p", 0.1)
    assert changed.code == 2
    assert "rollout.sampling.min_p" in changed.err
    killed.succeed(*settings, "--resume")
    for before, after in zip(whole.iterations, killed.iterations, strict=True):
        for name in LOSSES:
            assert float(after[name]) == pytest.approx(float(before[name]), abs=1e-6), name


def test_the_turns_of_an_episode_end_at_the_stops_of_the_run(tiny: Job) -> None:
    agent = ("--episode.run", "tests.jobs.language.agents:forks", "--cluster.episode_workers", 1)
    tiny.succeed(*agent, *EVERYTHING, "--training.iterations", 2)
    turns = [
        turn
        for one in read_samples(tiny.out, kind="training")
        for turn in one["episode"]["turns"]
        if turn["role"] == "assistant"
    ]
    assert any(turn["text"].endswith(("7", "1+")) for turn in turns)
    for turn in turns:
        assert "7" not in turn["text"][:-1]
        assert "1+" not in turn["text"][:-1]
    for row in tiny.iterations:
        assert float(row["engine_actor_difference"]) < 1e-5
    refused = tiny.train(*agent, *EVERYTHING, "--rollout.sampling.include_stop", "true")
    assert refused.code == 2
    assert "rollout.sampling.include_stop: the text of a turn ends before" in refused.err


VLLM = (
    *("--rollout.backend", "vllm", "--cluster.backend", "process"),
    *("--model.config.head_dim", 32),
)
FORMAT = "--rollout.sampling.grammar"
FORMS = {
    "inference": ("--cluster.inference_workers", 1),
    "epochs, stale": (
        *("--training.max_staleness", 1, "--actor.epochs", 2, "--actor.global_batches", 2),
        *("--actor.loss.proximal", "step"),
    ),
    "megatron": ("--actor.backend", "megatron", "--cluster.backend", "process"),
    "cut": ("--rollout.sampling.top_k", 4, "--rollout.sampling.logit_bias", "[[9, 1.0]]"),
    "lora": ("--actor.lora.rank", 2),
    "vllm": VLLM,
}


@pytest.mark.parametrize("how", FORMS)
def test_a_run_trains_answers_of_one_format_on_what_they_were_drawn_from(
    tiny: Job, how: str
) -> None:
    """Also greedy answers, and those of a set, have it."""
    if how == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make test installs it")
    tiny.succeed(
        *(f"{FORMAT}.regex", "-?[a-d0-3]{2,4}", "--rollout.sampling.temperature", 1.5, *FORMS[how]),
        *(f"{SET}.data.path", tiny.file.parent / "sums.jsonl", f"{SET}.data.verifier", "numeric"),
        *(f"{SET}.prompts", 4, f"{SET}.temperature", 1.0, "--training.iterations", 3),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
    )
    kept = read_samples(tiny.out)
    assert {one["kind"] for one in kept} == {"training", "evaluation"}
    assert len({one["completion"] for one in kept}) > 10
    for one in kept:
        whole = one["finish"] == "stop"
        assert re.fullmatch(r"-?[a-d0-3]{2,4}" if whole else r"-?[a-d0-3]*", one["completion"])
    compared = [found for row in tiny.iterations if (found := row["engine_actor_difference"])]
    assert compared
    assert max(map(float, compared)) < 1e-5
    if "stale" not in how:
        assert float(tiny.iterations[0]["ratio"]) == pytest.approx(1.0, abs=1e-5)


def test_a_format_that_cannot_be_is_refused_with_the_setting(tiny: Job) -> None:
    def refused(*settings: object) -> str:
        ended = tiny.command("check", tiny.file, *settings)
        assert ended.code == 2, ended.out
        return ended.err

    began = tiny.train(f"{FORMAT}.regex", "[")
    assert began.code == 2, began.err
    assert "rollout.sampling.grammar.regex: it is no regular expression" in began.err
    digits = (f"{FORMAT}.regex", "[0-9]+")
    assert "rollout.sampling.grammar.regex: it is no regular expression" in refused(
        f"{FORMAT}.regex", "["
    )
    assert "rollout.sampling.grammar: a response has one format, and regex and ebnf" in refused(
        *digits, f"{FORMAT}.ebnf", "root ::= [0-9]"
    )
    nothing = refused(f"{FORMAT}.choices", '["\N{SNOWMAN}"]')
    assert "grammar.choices: no response can begin so: the tokenizer in " in nothing
    assert "rollout.sampling.top_p: with top_p = 0.5 alone vLLM may keep any" in refused(
        *(*digits, *VLLM, "--rollout.sampling.top_p", 0.5)
    )
    assert "'toy' does not say that it honours grammar" in refused(
        *digits, "--rollout.backend", "toy", "--actor.backend", "toy"
    )
    tiny.succeed(*digits, "--training.iterations", 1)
    other = tiny.train(f"{FORMAT}.regex", "[0-5]+", "--training.iterations", 2, "--resume")
    assert other.code == 2
    assert "rollout.sampling.grammar" in other.err
