"""Dynamic sampling: a refused group is replaced, and nothing else changes."""

from __future__ import annotations

import asyncio
import pathlib
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.channels import Channel
from rlinf_async.messages.language import (
    Generated,
    Request,
    Sample,
    SampleGroup,
    Scored,
    ScoredSample,
)
from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.language.acceptance import Acceptance
from rlinf_async.runtime.jobs.language.samples import Collector, Ledger, Source
from rlinf_async.testing import run
from rlinf_async.workers.scheduler.messages import EndedCount
from rlinf_async.workers.scheduler.monitor import Responses
from tests.jobs.language.kit import Job
from tests.jobs.language.test_ledger import ledger, prompts, scored

HERE = "tests.jobs.language.accepting"


def reward_of(request: Request) -> float:
    """Half of all groups of two are alike."""
    return float(random.Random(request.seed).random() < 0.5)


def finished(request: Request) -> ScoredSample:
    return scored(request, Scored(reward=reward_of(request)))


@settings(max_examples=200, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
    kill_at=st.integers(0, 60),
)
def test_whatever_the_order_and_a_kill_each_place_is_trained_once_with_an_accepted_group(
    max_staleness: int, count: int, seed: int, kill_at: int
) -> None:
    chance, accept = random.Random(seed), Acceptance("varied", "", 1000)
    iterations, version, drawn = 5, 0, 0
    records = ledger(count, 2, max_staleness)
    kept, kept_version, kept_drawn = records.state(), 0, 0
    trained: list[tuple[int, int]] = []
    whole: dict[int, list[tuple[int, int]]] = {}
    flying: list[Request] = []

    def arrived(group: list[ScoredSample]) -> None:
        nonlocal drawn
        request = group[0].sample.request
        if accept(group):
            one = (records.place(request.group), request.group)
            whole.setdefault(request.iteration, []).append(one)
        else:
            drawn += 1
            flying.extend(records.replace(group, prompts(1, drawn)[0]))

    for step in range(3000):
        if step == kill_at:
            records = ledger(count, 2, max_staleness, msgspec.structs.replace(kept))
            version, drawn, whole = kept_version, kept_drawn, {}
            trained = trained[: version * count]
            flying = records.running
            for group in list(records.complete()):
                arrived(group)
        while records.next_iteration < iterations and records.may_admit(version):
            flying += records.admit(prompts(count, 0))
        if flying:
            request = flying.pop(chance.randrange(len(flying)))
            assert 0 <= version - request.min_version <= max_staleness
            if (done := records.take(finished(request))) is not None:
                arrived(done)
        if len(whole.get(version, [])) == count:
            trained += sorted(whole.pop(version))
            records.trained(version)
            version += 1
            kept, kept_version, kept_drawn = records.state(), version, drawn
        if version == iterations:
            break
    assert [place for place, _ in trained] == list(range(iterations * count))
    assert len({group for _, group in trained}) == iterations * count
    left = records.state()
    assert (left.running, left.finished, left.places, left.replaced) == ([], [], {}, {})
    assert left.refused == []


LENGTH = 400.0


class Stand:
    """Source and collector over workers that take as long as a response is, log-normally."""

    def __init__(self, seed: int, *, workers: int, staleness: int) -> None:
        self.ledger = Ledger(
            prompts=8,
            group_size=4,
            max_staleness=staleness,
            sampling=ledger()._sampling,
            seed=seed,
        )
        self.workers = workers
        self.drawn: dict[str, float] = {}
        """length of every response that was generated"""
        self.accepted: list[float] = []
        self.refused = 0

    def length(self, request: Request) -> float:
        return float(np.random.default_rng(request.seed).lognormal(np.log(LENGTH), 1.0))

    async def work(self, requests: Channel[Request], results: Channel[ScoredSample]) -> None:
        with requests.receiver.clone() as taking, results.sender.clone() as giving:
            async for request in taking:
                length = self.length(request)
                await asyncio.sleep(length / 1000)
                assert request.name not in self.drawn
                self.drawn[request.name] = length
                tokens = np.arange(max(1, round(length)), dtype=np.int32)
                made = Generated(
                    token_ids=tokens,
                    log_prob=np.zeros(len(tokens), np.float32),
                    version=np.zeros(len(tokens), np.int32),
                    finish="stop",
                )
                sample = Sample(request=request, generated=made, text="", rollout_rank=0)
                # Long responses are right more often: accepted groups differ from others.
                right = float(random.Random(request.seed).random() < min(0.9, length / 2000))
                await giving.put(ScoredSample(sample=sample, outcome=Scored(reward=right)))

    async def run(self, iterations: int) -> None:
        size = 8 * 4 * (self.ledger.max_staleness + 1)
        requests = Channel(Request, name="requests", capacity=size)
        results = Channel(ScoredSample, name="scored", capacity=size)
        groups = Channel(SampleGroup, name="groups", capacity=size)
        numbers = iter(range(10**9))
        source = Source(
            self.ledger,
            lambda count: prompts(count, next(numbers)),
            requests.sender,
            version=0,
            iterations=iterations,
            replaces=True,
        )
        collector = Collector(
            self.ledger,
            results.receiver,
            groups.sender,
            ranks=2,
            version=0,
            accept=Acceptance("varied", "", 10**6),
            replace=source.replace,
        )
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.work(requests, results)) for _ in range(self.workers)]
            running += [tasks.create_task(source.run()), tasks.create_task(collector.run())]
            for iteration in range(iterations):
                for rank in (0, 1):
                    got = [await groups.receiver.get(key=rank) for _ in range(4)]
                    assert {one.group % 2 for one in got} == {rank}
                    assert {one.group // 8 for one in got} == {iteration}
                    for one in got:
                        assert len({sample.reward for sample in one.samples}) > 1
                        names = [f"{sample.group}/{sample.index}" for sample in one.samples]
                        self.accepted += [self.drawn[name] for name in names]
                self.refused += self.ledger.replaced(iteration).groups
                collector.trained(iteration)
                source.trained(iteration + 1)
            for task in running:
                task.cancel()


@pytest.mark.parametrize("staleness", [0, 2])
def test_lengths_of_accepted_groups_are_those_of_all_groups_that_would_be_accepted(
    staleness: int,
) -> None:
    """Whether many workers are there, of which the slow ones finish last, or few."""
    stands = [Stand(3, workers=workers, staleness=staleness) for workers in (3, 200)]
    for stand in stands:
        run(stand.run(30))
        # Every group that was begun was finished and judged: nothing was given up for being slow.
        started = len({name.split("/")[0] for name in stand.drawn})
        ahead = started - stand.refused - 30 * 8
        assert 0 <= ahead <= 8 * staleness * 3
        assert len(stand.accepted) == 30 * 8 * 4
        assert stand.refused > 50
    draw = np.random.default_rng(0)
    expected: list[float] = []
    while len(expected) < 20_000:
        lengths = draw.lognormal(np.log(LENGTH), 1.0, 4)
        right = draw.random(4) < np.minimum(0.9, lengths / 2000)
        if 0 < right.sum() < 4:
            expected += lengths.tolist()
    quantiles = [0.1, 0.5, 0.9, 0.99]
    wanted = np.log(np.quantile(expected, quantiles))
    for stand in stands:
        found = np.log(np.quantile(stand.accepted, quantiles))
        assert np.abs(found - wanted).max() < 0.25, (found, wanted)
    plain = np.log(np.quantile([one for s in stands for one in s.drawn.values()], quantiles))
    assert np.abs(plain - wanted).max() > 0.25  # the choice is seen


def row(job: Job, name: str) -> list[float]:
    return [float(one[name]) for one in job.iterations]


ACCEPT = (
    *("--data.verifier", f"{HERE}:even", "--training.accept", "varied"),
    *("--evaluation.samples", 0),
)


def test_a_run_trains_varied_groups_only_and_says_what_was_drawn(job: Job) -> None:
    summary = job.succeed(*ACCEPT)
    assert summary.samples == 4 * 8
    assert row(job, "groups_without_signal") == [0.0] * 4
    assert row(job, "reward") == [0.5] * 4
    assert sum(row(job, "groups_refused")) > 0
    assert any(found != 0.5 for found in row(job, "reward_drawn"))
    check_kept(job)


def check_kept(job: Job) -> None:
    """Refused samples are kept beside the others of their iteration, as what they are."""
    for iteration, groups in enumerate(row(job, "groups_refused")):
        every = read_samples(job.out, iteration=iteration)
        refused = [one for one in every if not one["trained"]]
        assert len(every) - len(refused) == 8
        assert len(refused) == groups * 2
        for one in refused:
            assert one["outcome"] == "scored"
            assert one["detail"] == "its group was refused by training.accept, and replaced"
            assert set(one["mask"]) == {0}
            [other] = [x for x in refused if x["name"] != one["name"]
                       and x["name"].split("/")[0] == one["name"].split("/")[0]]  # fmt: skip
            assert other["reward"] == one["reward"]
        mean = sum(one["reward"] for one in every) / len(every)
        assert mean == pytest.approx(row(job, "reward_drawn")[iteration])


def test_the_raw_outcome_decides_where_the_reward_is_shaped(job: Job) -> None:
    verifier = ("--data.verifier", f"{HERE}:shaped", "--evaluation.samples", 0)
    job.succeed(*verifier, "--training.accept", "varied", "--training.accept_part", "right")
    assert row(job, "reward_right") == [0.5] * 4
    ended = job.train(
        *verifier, "--training.accept", "varied", "--training.accept_part", "wrong", "--out",
        job.out.with_name("other"),
    )  # fmt: skip
    assert ended.code == 2
    assert "training.accept_part is 'wrong'" in ended.err
    assert "(parts: 'right')" in ended.err


def test_refused_groups_are_trained_once_there_were_the_most(job: Job) -> None:
    ended = job.train(
        *("--data.verifier", f"{HERE}:right", "--training.accept", f"{HERE}:never"),
        *("--training.max_extra", 3, "--evaluation.samples", 0),
    )
    assert ended.code == 0, ended.err
    assert row(job, "groups_refused") == [3.0] * 4
    assert ended.err.count("3 groups were refused by training.accept") == 1


def test_a_resumed_run_goes_on_with_what_it_had_replaced(
    job: Job, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = job.succeed(*ACCEPT)
    rows = [row(job, name) for name in ("groups_refused", "reward_drawn")]
    folder = tmp_path / "other"
    folder.mkdir()
    other = Job(folder, capsys)
    other.succeed(*ACCEPT, "--training.iterations", 2)
    summary = other.succeed(*ACCEPT, "--resume")
    assert summary.samples == straight.samples
    assert [row(other, name) for name in ("groups_refused", "reward_drawn")] == rows
    check_kept(other)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--training.accept", "varyed"), "did you mean 'varied'"),
        (("--training.accept", "varied", "--training.group_size", 1), "set group_size"),
        (("--training.accept_part", "right"), "set accept"),
        (("--training.max_extra", 3), "set accept"),
        (("--training.accept", f"{HERE}:nobody"), "nobody"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_is_named(job: Job, settings: tuple[object, ...], said: str) -> None:
    ended = job.command("check", job.file, *settings)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("rule", "said"), [("strange", "returned 'yes'"), ("broken", "raised KeyError")]
)
def test_a_rule_that_fails_ends_the_run_and_is_named(job: Job, rule: str, said: str) -> None:
    ended = job.train("--training.accept", f"{HERE}:{rule}", "--evaluation.samples", 0)
    assert ended.code == 2
    assert f"training.accept: '{HERE}:{rule}' {said}" in ended.err


def test_the_scheduler_does_not_count_what_was_replaced() -> None:
    responses = Responses(samples=4, group=2)

    def count(group: int, index: int, tokens: int = 5) -> EndedCount:
        return EndedCount(group=group, tokens=tokens, name=f"{group}/{index}", iteration=0)

    responses.note([count(0, 0), count(0, 1), count(1, 0, 7)])
    assert (responses.finished(0), responses.in_whole_groups(0)) == (3, 2)
    responses.forget_samples([count(0, 0), count(0, 1)])
    assert (responses.finished(0), responses.in_whole_groups(0)) == (1, 0)
    responses.forget_samples([count(1, 0, 7), count(1, 1)])
    responses.note([count(1, 1)])  # its worker tells of it later
    assert (responses.finished(0), responses.in_whole_groups(0)) == (0, 0)
    responses.note([count(2, 0), count(2, 1), count(3, 0), count(3, 1)])
    assert (responses.finished(0), responses.in_whole_groups(0)) == (4, 4)


def test_places_without_a_replacement_are_the_numbers_of_the_groups() -> None:
    records = ledger(count=3)
    requests = [*records.admit(prompts(3)), *records.admit(prompts(3, 3))]
    assert Counter(records.place(one.group) for one in requests) == dict.fromkeys(range(6), 3)
    assert records.state().places == {}
