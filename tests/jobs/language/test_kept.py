"""What a language run keeps of its samples is what it trained on, each once."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from rlinf_async.cli.samples import printable
from rlinf_async.observe.metrics import read_columns
from rlinf_async.observe.samples import SampleIndex, read_samples
from tests.jobs.language.kit import Job

AGENTS = "tests.jobs.language.agents"
VERIFIERS = "tests.jobs.language.verifiers"


def agent(name: str) -> tuple[object, ...]:
    return ("--episode.run", f"{AGENTS}:{name}", "--cluster.episode_workers", 1)


def test_every_sample_is_kept_with_its_tokens_and_what_it_got(job: Job) -> None:
    ahead = ("--training.max_staleness", 1, "--evaluation.every", 2)
    job.succeed("--data.verifier", f"{VERIFIERS}:letters", *ahead)
    kept = read_samples(job.out, kind="training")
    assert [one["name"] for one in kept] == [f"{g}/{i}" for g in range(16) for i in range(2)]
    assert [one["iteration"] for one in kept] == [number for number in range(4) for _ in range(8)]
    columns = read_columns(job.out / "metrics.csv")
    for row, iteration in enumerate(columns["iteration"]):
        if math.isnan(iteration):
            continue  # of an evaluation
        of_it = [one for one in kept if one["iteration"] == iteration]
        assert {one["step"] for one in of_it} == {columns["step"][row]}
        mean = sum(one["reward"] for one in of_it) / 8
        assert mean == pytest.approx(columns["reward"][row])
        tokens = sum(one["size"] for one in of_it) / 8
        assert tokens == pytest.approx(columns["response_tokens"][row])
    index = SampleIndex(job.out)
    for one in kept:
        size = one["size"]
        lists = ("tokens", "log_probs", "versions", "mask")
        assert [len(one[name]) for name in lists] == [size] * 4
        assert set(one["mask"]) == {1}
        assert all(0 <= one["iteration"] - version <= 1 for version in one["versions"])
        assert all(index.texts(one["tokens"]))
        assert "".join(index.texts(one["prompt_tokens"])) == one["prompt"]
    check_evaluations(job)
    check_printed(job)


def test_a_sample_that_is_not_scored_says_why_and_trains_nothing(job: Job) -> None:
    job.succeed("--data.verifier", f"{VERIFIERS}:sometimes")
    failed = read_samples(job.out, failed=True, kind="training")
    assert 0 < len(failed) < 32
    for one in failed:
        assert not one["trained"]
        assert one["reward"] is None
        assert one["detail"]
        assert set(one["mask"]) <= {0}
    scored = [one for one in read_samples(job.out, kind="training") if one not in failed]
    assert all(one["trained"] and one["outcome"] == "scored" for one in scored)


def test_samples_of_an_iteration_that_ends_the_run_are_kept(job: Job) -> None:
    ended = job.train("--data.verifier", f"{VERIFIERS}:refuses", "--evaluation.samples", 0)
    assert ended.code == 1
    kept = read_samples(job.out)
    assert [one["iteration"] for one in kept] == [0] * 8
    assert {one["outcome"] for one in kept} == {"rejected"}


def turns_of(record: dict[str, Any]) -> list[tuple[str, int]]:
    return [(turn["role"], turn["branch"]) for turn in record["episode"]["turns"]]


def test_an_episode_is_kept_turn_by_turn_with_its_branches(job: Job) -> None:
    job.succeed(*agent("forks"))
    index = SampleIndex(job.out)
    for one in index.read(index.choose(kind="training")):
        roles = [("assistant", 0), ("given", 0), ("assistant", 0), ("given", 1), ("assistant", 1)]
        assert turns_of(one) == roles
        turns, tokens = one["episode"]["turns"], one["tokens"]
        assert [turn["start"] for turn in turns] == [0, *(turn["stop"] for turn in turns[:-1])]
        for turn in turns:
            span = slice(turn["start"], turn["stop"])
            assert turn["text"] == "".join(index.texts(tokens[span]))
            assert set(one["mask"][span]) == {int(turn["role"] == "assistant")}
        assert "and?" in turns[1]["text"]
        assert turns[-1]["reward"] in (0.0, 1.0, 2.0)
        [branch] = one["episode"]["branches"]
        assert branch["prompt"].startswith(one["prompt"][:6])
        assert branch["start"] == turns[3]["start"]
        assert one["episode"]["metrics"]["drawn"] >= 0
    assert "branch 1:" in job.command("samples", job.out, "--last", 1, "--kind", "training").out


OPTIONS: list[tuple[tuple[object, ...], int, str]] = [
    (("--iteration", 9), 2, "there are those of 0-3"),
    (("--name", "99/0"), 2, "names are GROUP/INDEX"),
    (("--last", 1, "--best", 1), 2, "leave one out"),
    (("--best", 0), 2, "--best"),
    (("--failed",), 0, "none of 44 samples"),
    (("--name", "2/1"), 0, "== 2/1, iteration 0, reward "),
    (("--iteration", 2, "--best", 1, "--worst", 1), 0, "2 of 8 samples; 44 are kept"),
    ((), 0, "10 of 44 samples"),
    (("--kind", "evaluation", "--jsonl"), 0, '"kind":"evaluation"'),
]


def check_evaluations(job: Job) -> None:
    """Answers of evaluations are kept beside the samples that were trained on."""
    kept = read_samples(job.out, kind="evaluation")
    assert [one["iteration"] for one in kept] == [0] * 4 + [2] * 4 + [4] * 4
    assert not any(one["trained"] for one in kept)
    assert job.summary.eval_reward == sum(one["reward"] for one in kept[-4:]) / 4


def check_printed(job: Job) -> None:
    for options, code, said in OPTIONS:
        ended = job.command("samples", job.out, *options)
        assert ended.code == code, options
        assert said in ended.err + ended.out, options
    lines = job.command("samples", job.out, "--jsonl").out.splitlines()
    assert [msgspec.json.decode(line) for line in lines] == read_samples(job.out)
    nothing = job.command("samples", job.file.parent / "nothing")
    assert nothing.code == 2
    assert "no such folder" in nothing.err


def test_what_a_model_says_does_not_steer_a_terminal() -> None:
    assert printable("a\x1b[2J\tb\nc\u202e") == "a\\x1b[2J\tb\nc\\u202e"
