"""Rollout data: columns or samples, this rank's prompts, and what is refused."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest

from rlinf_async.messages.language import SampleGroup
from rlinf_async.runtime.ray.training import RolloutData, RolloutDataError
from tests.runtime.ray.training.kit import args, batch, columns

SAMPLE: dict[str, Any] = {
    "tokens": [5, 6, 7],
    "response_length": 2,
    "reward": 1.0,
    "loss_mask": [1, 0],
    "rollout_log_probs": [-1.0, -2.0],
}


def groups(data: Any, n: int = 1, **where: int) -> list[SampleGroup]:
    given = args(n_samples_per_prompt=n, num_steps_per_rollout=1)
    return RolloutData.of(data).groups(given, rollout_id=3, version=7, **where)


def test_columns_and_samples_are_the_same_data() -> None:
    objects = [types.SimpleNamespace(**SAMPLE), SAMPLE]
    first, second = (one.samples[0] for one in groups(objects))
    for sample in (first, second):
        assert sample.prompt_ids.tolist() == [5]
        assert sample.response_ids.tolist() == [6, 7]
        assert sample.loss_mask.tolist() == [True, False]
        assert sample.log_prob.tolist() == [-1.0, -2.0]
        assert sample.version.tolist() == [7, 7]
        assert (sample.reward, sample.scored) == (1.0, True)


def test_what_our_actors_are_given_comes_back_from_columns() -> None:
    wanted = batch(0)
    found = [s for one in groups(columns(wanted), 4) for s in one.samples]
    for mine, given in zip(found, wanted, strict=True):
        for name in ("prompt_ids", "response_ids", "loss_mask", "log_prob", "version"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(given, name))
        assert (mine.group, mine.index, mine.scored) == (given.group, given.index, given.scored)


def test_prompts_go_round_the_ranks() -> None:
    data = columns(batch(0))
    shares = [[one.group for one in groups(data, 4, rank=rank, ranks=3)] for rank in range(3)]
    assert shares == [[0, 3], [1], [2]]


def test_prompts_may_be_named() -> None:
    data = columns(batch(0)[:4]) | {"group_indices": [9, 8, 9, 8], "unknown": None}
    found = groups(data, 2)
    assert [(one.group, len(one.samples), one.iteration) for one in found] == [(9, 2, 3), (8, 2, 3)]
    assert [sample.index for sample in found[0].samples] == [0, 1]


def test_a_sample_without_a_reward_trains_nothing() -> None:
    found = groups([SAMPLE, SAMPLE | {"reward": None}, SAMPLE | {"reward": math.nan}])
    assert [one.samples[0].scored for one in found] == [True, False, False]
    assert not found[1].samples[0].loss_mask.any()


def test_samples_of_a_part_of_the_vocabulary_say_what_was_kept() -> None:
    given = args(n_samples_per_prompt=1, num_steps_per_rollout=1, rollout_top_p=0.9)
    kept = SAMPLE | {"rollout_kept": [[6, 9], []]}
    [group] = RolloutData.of([kept]).groups(given, rollout_id=0, version=0)
    found = group.samples[0].kept
    assert found is not None
    assert [one.tolist() for one in found.sets()] == [[6, 9], []]
    missing = r"rollout_kept\[0\] is missing: with rollout_top_p = 0.9 .* the actor computes too"
    with pytest.raises(RolloutDataError, match=missing):
        RolloutData.of([SAMPLE]).groups(given, rollout_id=0, version=0)
    with pytest.raises(RolloutDataError, match=r"rollout_kept\[0\] has 1 entries, but the respons"):
        groups([SAMPLE | {"rollout_kept": [[6]]}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "rollout data is a int; it must be a dict of columns, a list of samples, or a refer"),
        ([], r"has no tokens, response_lengths, rewards \(there is: nothing\)"),
        ([SAMPLE | {"tokens": None}], r"has no tokens \(there is: response_lengths, rewards"),
        ([SAMPLE, SAMPLE | {"loss_mask": None}], "sample 1 has no loss_mask, but others have"),
        ([SAMPLE | {"response_length": 3}], r"response_lengths\[0\] is 3, of 3 tokens"),
        ([SAMPLE | {"tokens": [1, -2, 3]}], r"tokens\[0\] has the token -2, below 0"),
        ([SAMPLE | {"loss_mask": [1]}], r"loss_masks\[0\] has the shape \[1\]; it must be one num"),
        ([SAMPLE | {"rollout_kept": [[2, -1], [3]]}], r"rollout_kept\[0\] .* -1 is no token id"),
        ([SAMPLE | {"rollout_kept": ["a", [3]]}], r"rollout_kept\[0\] has to be lists of token"),
        ([SAMPLE | {"tokens": "abc"}], r"tokens\[0\]"),
        ([SAMPLE | {"reward": {"score": 1}}], r"rewards\[0\] is {'score': 1}; it must be a number"),
        (columns(batch(0)) | {"rewards": [1.0]}, "rewards has 1 entries, but tokens has 16"),
    ],
)
def test_wrong_data_is_named(data: Any, message: str) -> None:
    with pytest.raises(RolloutDataError, match=message):
        groups(data)


def test_a_prompt_with_too_few_samples_is_refused() -> None:
    with pytest.raises(RolloutDataError, match="prompt 0 has 1 samples; n_samples_per_prompt is 4"):
        groups([SAMPLE], 4)
