"""``[reward] model`` in the language job: its score of each answer is added to the verifier's."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.data import DataConfig
from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.language.backends import plan_roles
from rlinf_async.runtime.jobs.language.config import LanguageConfig, ModelConfig, TrainingConfig
from rlinf_async.runtime.jobs.language.roles import LanguageChannels, Roles
from rlinf_async.workers.base import BuildError, Device
from rlinf_async.workers.reward import RewardConfig
from tests.backends.classifiers import OneByOne, save_classifier
from tests.jobs.language.kit import Job
from tests.jobs.language.test_evaluation import FOUR, with_set
from tests.jobs.language.test_resumed import Killed, die_after
from tests.jobs.language.verifiers import places

HERE = "tests.jobs.language.verifiers"
WAYS = {
    "none": (),
    "letters": ("--cluster.reward_workers", 2, "--training.max_staleness", 1),
    "rank": ("--training.group_size", 3, "--training.accept", "varied"),
}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return save_classifier(tmp_path / "rm")


def scores_of(model: pathlib.Path, samples: list[dict[str, Any]]) -> list[float]:
    """What transformers says of prompts and answers: with its own tokenizer, one by one."""
    alone, found = OneByOne(model), []
    for one in samples:
        [question] = re.findall(r"\d+\+\d+=", one["prompt"])
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": question},
        ]
        found.append(alone.score(messages, one["completion"]))
    return found


@pytest.mark.parametrize("verifier", WAYS)
def test_the_score_of_each_answer_is_added_to_what_the_verifier_says(
    job: Job, model: pathlib.Path, verifier: str
) -> None:
    name = verifier if verifier == "none" else f"{HERE}:{verifier}"
    settings = (
        *("--reward.model", model, "--reward.model_weight", 0.5, "--reward.model_tokens", 300),
        *("--data.verifier", name, "--data.system_prompt", "be brief", *WAYS[verifier]),
        *("--training.iterations", 2),
    )
    assert job.command("check", job.file, *settings).code == 0
    job.succeed(*settings)
    samples = list(read_samples(job.out))
    assert len(samples) >= 2 * 8 + 2 * 4
    for one, score in zip(samples, scores_of(model, samples), strict=True):
        parts = one["reward_parts"]
        assert parts["model"] == pytest.approx(score, abs=1e-6)
        assert one["reward"] == pytest.approx(parts["verifier"] + 0.5 * score, abs=1e-6)
        if verifier == "none":
            assert parts["verifier"] == 0.0
    if verifier == "rank":
        for at in range(0, 12, 3):
            group = [one for one in samples if one["name"].startswith(f"{at // 3}/")]
            told = [one["reward_parts"]["verifier"] for one in group]
            assert told == places([one["completion"] for one in group])
    row = job.iterations[0]
    assert float(row["reward"]) == pytest.approx(
        float(row["reward_verifier"]) + 0.5 * float(row["reward_model"]), abs=1e-5
    )


def test_sets_have_their_own_verifier_and_a_resumed_run_may_have_another_model(
    job: Job, model: pathlib.Path
) -> None:
    settings = (*with_set(job, *FOUR), "--data.verifier", "none", "--training.max_staleness", 2)
    job.succeed(*settings, "--reward.model", model, "--training.iterations", 2)
    of_set = [one for one in read_samples(job.out) if one.get("evaluation_set")]
    assert of_set
    assert {one["reward"] for one in of_set} <= {0.0, 1.0}
    with_none = job.train(*settings, "--training.iterations", 3, "--resume")
    assert with_none.code == 2
    assert "data.verifier: 'none' gives every answer a reward of 0" in with_none.err
    more = ("--reward.model", model, "--reward.model_weight", 2.0, "--training.iterations", 3)
    job.succeed(*settings, *more, "--resume")
    [*_, last] = read_samples(job.out, kind="training")
    assert last["reward"] == pytest.approx(2.0 * last["reward_parts"]["model"])


@pytest.mark.parametrize("change", ["is new", "is gone", "differs"])
def test_a_killed_run_goes_on_with_another_model_and_judges_all_of_a_group_alike(
    job: Job, model: pathlib.Path, change: str
) -> None:
    """What was admitted before there was a reward model has the messages that it reads."""
    other = save_classifier(model.parent / "other", initializer_range=0.1)
    before = () if change == "is new" else ("--reward.model", model)
    after = ("--reward.model", other, "--reward.model_weight", 3.0)
    settings = (
        *("--data.verifier", f"{HERE}:letters", "--training.max_staleness", 2),
        *("--training.iterations", 7, "--training.group_size", 4, "--rollout.toy.slots", 5),
        *("--evaluation.samples", 0, "--data.system_prompt", "be brief"),
    )
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 5)
        with pytest.raises(Killed):
            job.train(*settings, *before)
    ended = job.train(*settings, *(() if change == "is gone" else after), "--resume")
    assert ended.code == 0, ended.err
    assert "the run goes on with other files than before: reward.model: " in ended.err
    assert f"reward.model: model.safetensors {change}" in ended.err
    assert job.summary.samples == job.summary.outcomes["scored"] == 7 * 16
    groups: dict[str, set[float | None]] = {}
    for one in read_samples(job.out, kind="training"):
        groups.setdefault(one["name"].partition("/")[0], set()).add(weight_of(one))
    assert all(len(weights) == 1 for weights in groups.values()), groups
    wanted = {"is new": {None, 3.0}, "is gone": {None, 1.0}, "differs": {1.0, 3.0}}
    assert set[float | None]().union(*groups.values()) == wanted[change]


def weight_of(sample: dict[str, Any]) -> float | None:
    """The weight that a sample's score of the reward model had; None: it has none."""
    parts = sample["reward_parts"]
    if not parts:
        return None
    return float(round((sample["reward"] - parts["verifier"]) / parts["model"], 3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--reward.model_weight", 2), "reward.model_weight: it is 2.0, but there is no reward"),
        (("--reward.model_tokens", 2), "reward.model_tokens: it is 2, but there is no reward"),
        (("--reward.model_precision", "bfloat16"), "reward.model_precision: it is 'bfloat16', but"),
        (("--reward.model", "MODEL", "--reward.model_weight", 0), "reward.model_weight: 0.0 is no"),
        (("--reward.model", "MODEL", "--reward.model_tokens", 0), "model_tokens is 0"),
        (("--reward.model", "nowhere"), "reward.model: nowhere has no config.json"),
        (("--reward.model", "LABELS"), "has 3 labels, and a reward model has one"),
        (
            (
                *("--reward.model", "MODEL", "--episode.run", "tests.jobs.language.agents:answers"),
                *("--cluster.episode_workers", 1),
            ),
            "reward.model: it reads a prompt and its answer, and samples are episodes",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(
    job: Job, tmp_path: pathlib.Path, settings: tuple[object, ...], said: str
) -> None:
    folders: dict[str, dict[str, Any]] = {"MODEL": {}, "LABELS": {"num_labels": 3}}
    named = {name: tmp_path / name for name in folders if name in settings}
    for name, folder in named.items():
        save_classifier(folder, **folders[name])
    ended = job.command("check", job.file, *(named.get(str(one), one) for one in settings))
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("placement", "processes", "device"),
    [
        ({"reward": "2-3"}, True, "cuda:0"),
        ({"reward": "3", "rollout": "0", "actor": "1"}, False, "cuda:3"),
        ({"reward": "shared with rollout", "rollout": "0", "actor": "1"}, True, "cuda:0"),
        ({}, True, "cpu"),
    ],
)
def test_the_model_is_on_the_devices_of_the_role(
    placement: dict[str, str], processes: bool, device: str
) -> None:
    """In a process of its own a worker sees its device as the first one."""
    said = {
        "data": {"path": "sums.jsonl", "verifier": "none"},
        "model": {"path": "model"},
        "training": {"iterations": 1, "prompts": 8, "group_size": 2},
        "actor": {"micro_batch_size": 2},
        "reward": {"model": "rm"},
        "cluster": {
            "backend": "process" if processes else "local",
            "reward_workers": 2 if placement.get("reward") == "2-3" else 1,
            "placement": placement,
        },
    }
    config = msgspec.convert(said, LanguageConfig)
    plan = plan_roles(config, [Device("cuda", at) for at in range(4)])
    assert plan.device("reward", own_process=processes) == device


async def test_a_run_without_a_reward_model_swaps_none_in() -> None:
    config = LanguageConfig(
        data=DataConfig(path="sums.jsonl", verifier="exact"),
        model=ModelConfig(path="model"),
        training=TrainingConfig(iterations=1, prompts=1, group_size=1),
    )
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, config)
        roles = Roles(cluster, config, channels, pathlib.Path("model"), ["exact"])
        swapped = msgspec.structs.replace(config, reward=RewardConfig(model="rm"))
        with pytest.raises(BuildError, match=r"reward\.model: a run that was started without"):
            roles._check_judges(swapped)
