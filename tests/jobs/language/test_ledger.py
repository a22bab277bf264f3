"""Every admitted sample is trained exactly once, and none too late."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.channels.wire.codec import Decoder, encode
from rlinf_async.messages.language import (
    Branch,
    EngineUse,
    EpisodeRecord,
    Failed,
    Generated,
    Kept,
    Prompt,
    Rejected,
    Request,
    Sample,
    SampleGroup,
    Sampling,
    Scored,
    ScoredSample,
    TurnSpan,
)
from rlinf_async.runtime.jobs.language.reports import summed_up
from rlinf_async.runtime.jobs.language.samples import Ledger, LedgerState, to_train


def prompts(count: int, start: int = 0) -> list[Prompt]:
    return [
        Prompt(
            index=start + position,
            text="1+1=",
            token_ids=np.arange(4, dtype=np.int32),
            verifier="exact",
            reference="2",
        )
        for position in range(count)
    ]


def ledger(
    count: int = 2, group_size: int = 3, max_staleness: int = 0, state: LedgerState | None = None
) -> Ledger:
    return Ledger(
        prompts=count,
        group_size=group_size,
        max_staleness=max_staleness,
        sampling=Sampling(max_tokens=8),
        seed=7,
        state=state,
    )


def scored(request: Request, outcome: Scored | Rejected | Failed | None = None) -> ScoredSample:
    tokens = 2 + request.index
    generated = Generated(
        token_ids=np.arange(tokens, dtype=np.int32),
        log_prob=np.full(tokens, -0.5, np.float32),
        version=np.full(tokens, request.min_version, np.int32),
        finish="stop",
    )
    sample = Sample(request=request, generated=generated, text="2", rollout_rank=0)
    return ScoredSample(sample=sample, outcome=outcome or Scored(reward=1.0))


def test_a_group_leaves_once_it_is_whole_and_in_order() -> None:
    records = ledger(count=1)
    first, second, third = records.admit(prompts(1))
    assert records.take(scored(third)) is None
    assert records.take(scored(first)) is None
    group = records.take(scored(second))
    assert group is not None
    assert [one.sample.request.index for one in group] == [0, 1, 2]


def test_a_sample_that_comes_twice_is_left_out_and_counted() -> None:
    records = ledger(count=1, group_size=2)
    first, second = records.admit(prompts(1))
    records.take(scored(first))
    assert records.take(scored(first)) is None
    assert records.take(scored(second)) is not None
    assert records.take(scored(second)) is None
    assert records.take_duplicates() == 2
    assert records.take_duplicates() == 0


def test_samples_draw_from_streams_of_their_own_that_a_resumed_run_has_too() -> None:
    seeds = [one.seed for one in ledger().admit(prompts(2))]
    assert len(set(seeds)) == 6
    assert seeds == [one.seed for one in ledger().admit(prompts(2))]


def test_another_number_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 prompts, but an iteration has 2"):
        ledger(count=2).admit(prompts(3))


def test_a_sample_that_was_not_scored_trains_nothing_and_has_no_reward() -> None:
    records = ledger(count=1)
    first, second, third = records.admit(prompts(1))
    records.take(scored(first, Scored(reward=0.25)))
    records.take(scored(second, Failed(error="TimeoutError")))
    group = records.take(scored(third, Rejected(reason="no answer")))
    assert group is not None
    samples = to_train(group).samples
    assert [one.scored for one in samples] == [True, False, False]
    assert [bool(one.loss_mask.any()) for one in samples] == [True, False, False]
    assert samples[0].reward == 0.25
    assert math.isnan(samples[1].reward)
    assert math.isnan(samples[2].reward)


def test_an_episode_trains_what_the_model_drew() -> None:
    records = ledger(count=1, group_size=2)
    drawn = np.array([True, True, False, True])
    made = [an_episode(request, drawn) for request in records.admit(prompts(1))]
    records.take(made[0])
    group = records.take(ScoredSample(sample=made[1].sample, outcome=Failed(error="TimeoutError")))
    assert group is not None
    scored, failed = to_train(group).samples
    np.testing.assert_array_equal(scored.loss_mask, drawn)
    np.testing.assert_array_equal(scored.drawn_mask, drawn)
    assert not failed.loss_mask.any()
    assert scored.branches is made[0].sample.branches
    assert scored.turns is made[0].sample.turns
    assert scored.tokens == made[0].sample.tokens == 4 + 4 + 3


def test_an_episode_travels_whole() -> None:
    [request] = ledger(count=1, group_size=1).admit(prompts(1))
    sent = to_train([an_episode(request, np.array([True, True, False, True]))])
    sent.samples[0].kept = Kept.of([[0, 7], [1], [], [3]])
    packed = encode(sent)
    got: SampleGroup = Decoder(SampleGroup).decode_copy(packed)
    assert str(got) == str(sent)


def an_episode(request: Request, drawn: Any) -> ScoredSample:
    generated = Generated(
        token_ids=np.arange(4, dtype=np.int32),
        log_prob=np.where(drawn, -0.5, 0.0).astype(np.float32),
        version=np.where(drawn, 2, -1).astype(np.int32),
        finish="stop",
        drawn=drawn,
    )
    record = EpisodeRecord(
        turns=2,
        tool_calls={"add": 3},
        tool_failures={"add/timeout": 1},
        tool_seconds={"add": 1.5},
        cut="turns" if request.index else "",
        metrics={"tries": 4.0} if request.index else {},
        engines=EngineUse(
            moved=request.index, read_tokens=20, cached_tokens=15, seconds=8.0, idle_seconds=2.0
        ),
    )
    sample = Sample(
        request=request,
        generated=generated,
        text="2",
        rollout_rank=0,
        branches=(Branch(prompt_ids=np.arange(3, dtype=np.int32), start=3),),
        turns=(TurnSpan(start=0, stop=2, reward=0.5), TurnSpan(start=3, stop=4)),
        episode=record,
    )
    return ScoredSample(sample=sample, outcome=Scored(reward=1.0))


def test_an_iteration_of_episodes_is_summed_up_by_what_was_drawn_and_what_happened() -> None:
    drawn = np.array([True, True, False, True])
    group = [an_episode(one, drawn) for one in ledger(count=1, group_size=2).admit(prompts(1))]
    found = summed_up(3, [group])
    assert (found.samples, found.tokens) == (2, 22)
    assert (found.lag_mean, found.lag_max) == (1.0, 1)
    assert found.metrics == {
        "response_tokens": 3.0,
        "response_tokens_median": 3.0,
        "response_tokens_p99": 3.0,
        "response_tokens_max": 3.0,
        "prompt_tokens": 7.0,
        "cut_off": 0.0,
        "behaviour_log_prob": -0.5,
        "unscored": 0.0,
        "reward": 1.0,
        "given_tokens": 1.0,
        "turns": 2.0,
        "branches": 2.0,
        "tool_calls": 3.0,
        "tool_calls_add": 3.0,
        "tool_failures": 1.0,
        "tool_failures_add_timeout": 1.0,
        "tool_seconds_add": 0.5,
        "episodes_cut": 0.5,
        "episodes_cut_turns": 0.5,
        "episode_tries": 4.0,
        "rendered_anew": 0.0,
        "turns_moved": 0.5,
        "prefix_cache_hits": 0.75,
        "idle_for_tools": 0.25,
    }


def test_hits_of_prefix_caches_are_told_of_answers_whose_engines_tell_them() -> None:
    group = [scored(one) for one in ledger(count=1, group_size=3).admit(prompts(1))]
    assert "prefix_cache_hits" not in summed_up(0, [group]).metrics
    for one, cached in zip(group, (None, 1, 3), strict=True):
        one.sample.generated = msgspec.structs.replace(one.sample.generated, cached=cached)
    assert summed_up(0, [group]).metrics["prefix_cache_hits"] == 0.5  # of two prompts of 4 tokens


def test_samples_without_an_episode_add_no_columns_of_one() -> None:
    group = [scored(one) for one in ledger(count=1).admit(prompts(1))]
    columns = summed_up(0, [group]).metrics
    assert not {"turns", "given_tokens", "tool_calls", "episodes_cut", "branches"} & columns.keys()


@settings(max_examples=200, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    count=st.integers(1, 3),
    group_size=st.integers(1, 3),
    seed=st.integers(0, 1000),
    kill_at=st.integers(0, 40),
)
def test_whatever_the_order_and_a_kill_every_sample_is_trained_once_and_none_too_late(
    max_staleness: int, count: int, group_size: int, seed: int, kill_at: int
) -> None:
    chance = random.Random(seed)
    iterations, version, trained_groups = 5, 0, list[int]()
    records = ledger(count, group_size, max_staleness)
    kept, kept_trained, kept_version = records.state(), list[int](), 0
    whole: dict[int, list[int]] = {}
    flying: list[Request] = []
    for step in range(1000):
        if step == kill_at:  # go on from what was written, with everything on its way lost
            state = msgspec.structs.replace(kept)
            records = ledger(count, group_size, max_staleness, state)
            version, trained_groups, whole = kept_version, list(kept_trained), {}
            flying = records.running
            for group in records.complete():
                request = group[0].sample.request
                whole.setdefault(request.iteration, []).append(request.group)
        while records.next_iteration < iterations and records.may_admit(version):
            assert records.next_iteration - version <= max_staleness
            flying += records.admit(prompts(count, records.next_iteration * count))
        if flying:
            request = flying.pop(chance.randrange(len(flying)))
            assert version - request.min_version <= max_staleness
            done = records.take(scored(request))
            if done is not None:
                whole.setdefault(request.iteration, []).append(request.group)
        if len(whole.get(version, [])) == count:
            trained_groups += sorted(whole.pop(version))
            records.trained(version)
            version += 1
            kept, kept_trained, kept_version = records.state(), list(trained_groups), version
        if version == iterations:
            break
    assert trained_groups == list(range(iterations * count))
    assert records.state().running == []
    assert records.state().finished == []
