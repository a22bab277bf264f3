"""Verifiers that judge all answers to a prompt at once, on every way that samples may take."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.config.registry import forget_changed_files
from rlinf_async.data import DataConfig
from rlinf_async.messages.language import Sampling, Scored, ScoredSample
from rlinf_async.observe.samples import read_samples
from rlinf_async.rewards.judging import group_verifiers
from rlinf_async.runtime.jobs.language.config import LanguageConfig, ModelConfig, TrainingConfig
from rlinf_async.runtime.jobs.language.roles import LanguageChannels, Roles
from rlinf_async.runtime.jobs.language.samples import Ledger, judged_at_once, load_unfinished
from rlinf_async.runtime.jobs.language.samples import load_language_progress as load_progress
from rlinf_async.workers.base import BuildError
from tests.jobs.kit import Ended
from tests.jobs.language.kit import Job
from tests.jobs.language.test_evaluation import FOUR, with_set
from tests.jobs.language.test_resumed import Asked, Killed, die_after
from tests.jobs.language.verifiers import places
from tests.workers.reward.kit import sample

HERE = "tests.jobs.language.verifiers"
RANK = ("--data.verifier", f"{HERE}:rank")
EPISODES = (
    *("--episode.run", "tests.jobs.language.agents:answers", "--cluster.episode_workers", 2),
)
WAYS = {
    "several workers, beside older weights": (
        *("--cluster.reward_workers", 3, "--training.max_staleness", 2),
        *("--training.group_size", 4, "--reward.calls", 2),
    ),
    "episodes": EPISODES,
    "dynamic sampling": ("--training.accept", "varied", "--training.group_size", 3),
    "processes": ("--cluster.backend", "process", "--training.iterations", 2),
}


def check_ranks(job: Job, group_size: int) -> list[dict[str, Any]]:
    """Each group that was kept is ranked, and nothing was compared with another group."""
    kept = list(read_samples(job.out, kind="training"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in kept:
        groups.setdefault(one["name"].partition("/")[0], []).append(one)
    for group in groups.values():
        assert len(group) == group_size
        assert [one["reward"] for one in group] == places([one["completion"] for one in group])
        assert {one["reward_parts"]["answers"] for one in group} == {group_size}
    return kept


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_compared_with_all_others_to_its_prompt(job: Job, way: str) -> None:
    settings = dict(zip(WAYS[way][::2], WAYS[way][1::2], strict=True))
    summary = job.succeed(*RANK, *WAYS[way])
    group_size = int(str(settings.get("--training.group_size", 2)))
    iterations = int(str(settings.get("--training.iterations", 4)))
    kept = check_ranks(job, group_size)
    trained = [one for one in kept if one["trained"]]
    assert len(trained) == summary.samples == iterations * 4 * group_size
    assert summary.dropped == {"second samples": 0}
    for row in job.iterations:
        assert float(row["judge_calls"]) == 4  # one for each prompt
        assert float(row["judge_cost"]) == pytest.approx(4)
        assert float(row["reward_answers"]) == group_size
    assert summary.eval_reward == 0.0  # a greedy answer is the only one to its prompt


def test_answers_with_log_probs_of_the_actor_to_a_set_and_of_a_recording(tiny: Job) -> None:
    best = ("--evaluation.sets.more.data.verifier", f"{HERE}:best")
    settings = (*RANK, *with_set(tiny, *FOUR, *best), "--cluster.inference_workers", 1)
    summary = tiny.succeed(*settings, "--training.iterations", 2, "--record", "all")
    check_ranks(tiny, 2)
    of_set = [one for one in read_samples(tiny.out, kind="evaluation") if one.get("evaluation_set")]
    assert len(of_set) == 2 * 24
    for at in range(0, 48, 4):
        texts = [one["completion"] for one in of_set[at : at + 4]]
        assert [one["reward"] for one in of_set[at : at + 4]] == [
            float(text == max(texts)) for text in texts
        ]
    assert summary.evaluations["more"].pass_at[4].value == 1.0  # one of four is always the best
    again = tiny.command("evaluate", tiny.out, "--json")
    assert json.loads(again.out)["sets"]["more"]["accuracy"]["value"] == pytest.approx(
        summary.evaluations["more"].accuracy.value  # type: ignore[union-attr]
    )
    replay = ("replay", tiny.out, "--only", "reward")
    same = tiny.command(*replay)
    assert same.code == 0, same.out
    for other in ("best", "letters"):
        anew = tiny.command(*replay, "--data.verifier", f"{HERE}:{other}")
        assert anew.code == 0, anew.err
        assert f"72 samples scored anew by {HERE}:{other}" in anew.out
        assert "0 samples without one" in anew.out.split("replayed: ")[1]


def test_a_run_that_was_killed_goes_on_with_whole_groups(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written while some groups are held, are being judged, or are scored."""
    settings = (
        *(*RANK, "--training.max_staleness", 2, "--training.iterations", 8),
        *("--training.group_size", 4, "--rollout.toy.slots", 5, "--evaluation.samples", 0),
    )
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*settings)
    progress = load_progress(job.out / "checkpoints")
    assert progress is not None
    kept_state = load_unfinished(job.out / "checkpoints", progress)
    finished = [one.sample.request.group for one in kept_state.ledger.finished]
    assert {finished.count(group) for group in finished} <= {4}
    waiting = kept_state.waiting
    assert not any(one.others for one in (*waiting.inferred, *waiting.generated))
    assert not any(one.others or one.sample.others for one in waiting.scored)
    asked = Asked(monkeypatch)
    summary = job.succeed(*settings, "--resume")
    assert waiting.names.isdisjoint(asked.requests)
    assert summary.samples == 8 * 16
    assert summary.dropped == {"second samples": 0}
    check_ranks(job, 4)


@pytest.mark.parametrize("back", [False, True])
def test_a_resumed_run_may_have_a_verifier_that_judges_otherwise(job: Job, back: bool) -> None:
    settings = (
        *("--training.max_staleness", 2, "--training.iterations", 8),
        *("--training.group_size", 4, "--evaluation.samples", 0, "--rollout.toy.slots", 5),
    )
    mine = job.file.parent / "mine.py"
    each = "def score(answer):\n    return 7.0\n"
    group = f"from {HERE} import rank as score\n"
    verifier = ("--data.verifier", f"{mine}:score")
    with pytest.MonkeyPatch.context() as patch:
        mine.write_text(group if back else each)
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*settings, *verifier)
    mine.write_text(each if back else group)
    forget_changed_files()  # as another process
    summary = job.succeed(*settings, *verifier, "--resume")
    assert summary.samples == 8 * 16
    rewards: dict[str, list[float]] = {}
    for one in read_samples(job.out, kind="training"):
        rewards.setdefault(one["name"].partition("/")[0], []).append(one["reward"])
    kinds = [7.0 in of_group for of_group in rewards.values()]
    assert all(len(set(one)) == 1 for one in rewards.values() if 7.0 in one)  # never mixed
    assert set(kinds) == {True, False}


def test_finished_samples_of_a_group_that_is_not_whole_are_judged_with_the_others() -> None:
    ledger = Ledger(prompts=2, group_size=2, max_staleness=0, sampling=Sampling(), seed=0)
    prompt = sample(0, "mine.py:rank").request.prompt
    requests = ledger.admit([prompt, prompt])
    for request in requests[:3]:  # a whole group, and half of the other one
        one = sample(0)
        one.request = request
        ledger.take(ScoredSample(sample=one, outcome=Scored(reward=1.0)))
    assert ledger.take_back(lambda _: False) == []
    at_once = judged_at_once({"mine.py:rank"})
    found = ledger.take_back(lambda one: at_once(one.sample.request))
    assert [one.request.name for one in found] == ["1/0"]
    assert [one.name for one in ledger.running] == ["1/0", "1/1"]
    assert len(list(ledger.complete())) == 1


def test_a_wrong_number_of_scores_ends_the_run_with_the_prompt(job: Job) -> None:
    ended: Ended = job.train("--data.verifier", f"{HERE}:too_few", "--evaluation.samples", 0)
    assert ended.code == 1
    wrong = f"verifier '{HERE}:too_few' returned 1 score for 2 answers: return a list of 2"
    assert re.search(rf"the first with: prompt \d+ \(group 0\): {re.escape(wrong)}", ended.err)


@pytest.mark.parametrize("ran", ["rank", "letters"])
async def test_only_a_verifier_that_judges_alike_is_swapped_in(ran: str) -> None:
    data = DataConfig(path="sums.jsonl", verifier=f"{HERE}:{ran}")
    training = TrainingConfig(iterations=1, prompts=1, group_size=1)
    config = LanguageConfig(data=data, model=ModelConfig(path="model"), training=training)
    async with ra.Cluster.local() as cluster:
        of_groups = group_verifiers([data.verifier])
        channels = LanguageChannels(cluster, config, gathers=bool(of_groups))
        path = pathlib.Path("model")
        roles = Roles(cluster, config, channels, path, [data.verifier], of_groups=of_groups)
        for other in ("rank", "best", "letters", "early"):
            data = msgspec.structs.replace(data, verifier=f"{HERE}:{other}")
            swapped = msgspec.structs.replace(config, data=data)
            if (other in ("rank", "best")) == (ran == "rank"):
                roles._check_judges(swapped)
                continue
            with pytest.raises(BuildError, match=f":{other}' judges (all|each) .*--resume"):
                roles._check_judges(swapped)


def test_settings_of_asynchronous_verifiers_are_for_those_of_groups_too(job: Job) -> None:
    calls = ("--reward.calls", 3)
    assert job.command("check", job.file, *RANK, *calls).code == 0
    ended = job.command("check", job.file, "--data.verifier", f"{HERE}:best", *calls)
    assert ended.code == 2
    assert "reward.calls: calls is 3, but no verifier of this run is asynchronous" in ended.err
