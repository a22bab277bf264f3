"""What is drawn could be drawn: any logits, any settings, any random number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rlinf_async.backends.policies.base import _Categorical
from rlinf_async.backends.transformers.sampling import Rules, draw, kept_sets, uniforms
from rlinf_async.messages.language import Kept, Sampling
from rlinf_async.workers.replay.store import SumTree
from tests.backends.models import endless, make_model, qwen3
from tests.backends.requests import request
from tests.backends.transformers.kit import engine_of

LAST = 1.0 - 2.0**-53
"""largest random number"""
ROUNDED = 0.99999997
"""1.0 in float32"""

randoms = st.sampled_from([0.0, 2.0**-53, 0.5, ROUNDED, LAST]) | st.floats(0.0, LAST)
numbers = st.sampled_from([-1e4, -200.0, -100.0, 0.0, 100.0, -math.inf]) | st.floats(-30.0, 30.0)


@st.composite
def rows(draw_: Any) -> tuple[list[list[float]], list[Sampling], list[float]]:
    """Logits, some minus infinity, with a setting and a random number for each row."""
    size = draw_(st.integers(1, 12))
    count = draw_(st.integers(1, 4))
    logits = [
        [draw_(st.floats(-5.0, 5.0)), *(draw_(numbers) for _ in range(size - 1))]
        for _ in range(count)
    ]
    rules = [
        Sampling(
            temperature=draw_(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.5])),
            top_k=draw_(st.integers(0, size + 2)),
            top_p=draw_(st.sampled_from([1.0, 1.0 - 1e-7, 0.9, 0.5, 1e-9])),
        )
        for _ in range(count)
    ]
    return logits, rules, [draw_(randoms) for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(rows())
def test_a_drawn_token_has_a_probability_and_was_kept(
    case: tuple[list[list[float]], list[Sampling], list[float]],
) -> None:
    logits, rules, random = case
    device = torch.device("cpu")
    drawn = draw(
        torch.tensor(logits), Rules.of(rules, device), torch.tensor(random, dtype=torch.float64)
    )
    assert torch.isfinite(drawn.log_probs).all()
    none = [np.empty(0, np.int32)] * len(rules)
    sets = none if drawn.kept is None else kept_sets(drawn.kept)
    for row, rule, token, log_prob, kept in zip(
        logits, rules, drawn.tokens.tolist(), drawn.log_probs.tolist(), sets, strict=True
    ):
        scaled = torch.tensor(row, dtype=torch.float64) / (rule.temperature or 1.0)
        allowed = kept.astype(int).tolist() or list(range(len(row)))
        assert token in allowed
        log_p = scaled[allowed].log_softmax(-1)
        assert log_prob == pytest.approx(float(log_p[allowed.index(token)]), rel=1e-4, abs=1e-4)
        assert rule.truncates or len(allowed) == len(row)
        if rule.truncates and rule.top_k:
            assert len(allowed) <= max(rule.top_k, len(row) * (rule.top_k >= len(row)))
        left_out = [at for at in range(len(row)) if at not in allowed]
        assert not left_out or max(scaled[left_out]) <= min(scaled[allowed]) + 1e-4


@pytest.mark.parametrize("random", [ROUNDED, LAST])
def test_a_random_number_near_1_does_not_draw_what_has_no_probability(random: float) -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf, -math.inf]])
    rules = Rules.of([Sampling()], torch.device("cpu"))
    drawn = draw(logits, rules, torch.tensor([random], dtype=torch.float64))
    assert drawn.tokens.tolist() == [1]
    assert float(drawn.log_probs[0]) == pytest.approx(-0.3132617)


async def test_an_engine_draws_nothing_that_it_did_not_keep(tmp_path: Path) -> None:
    """The 60th random number of this seed is 1.0 in float32, as is one in 2^25."""
    seed, count = 178_419, 60
    assert np.float32(uniforms(seed, count)[-1]) == 1.0
    async with engine_of(tmp_path, endless(make_model(qwen3(layers=1)))) as engine:
        made = await engine.generate(request(0, seed=seed, max_tokens=count, top_k=2))
    assert len(made.token_ids) == count
    assert np.isfinite(made.log_prob).all()
    assert made.kept is not None
    assert made.token_ids[-1] in made.kept.sets()[-1]


async def test_what_was_kept_goes_on_with_an_interrupted_response(tmp_path: Path) -> None:
    asked = request(4, max_tokens=20, top_k=30, top_p=0.8)
    async with engine_of(tmp_path, endless(make_model(qwen3(layers=1)))) as engine:
        whole = await engine.generate(asked)
        assert whole.kept is not None
        begun = replace(
            whole,
            token_ids=whole.token_ids[:7],
            log_prob=whole.log_prob[:7],
            version=whole.version[:7],
            kept=Kept.of(whole.kept.sets()[:7]),
            finish="abort",
        )
        rest = await engine.generate(replace(asked, partial=begun))
        untold = await engine.generate(replace(asked, partial=replace(begun, kept=None)))
    assert rest.token_ids.tolist() == untold.token_ids.tolist() == whole.token_ids.tolist()
    assert rest.kept is not None
    assert rest.kept.token_ids.tolist() == whole.kept.token_ids.tolist()
    assert rest.kept.counts.tolist() == whole.kept.counts.tolist()
    assert not untold.tells_of(asked.sampling)


def test_a_policy_never_takes_an_action_without_probability() -> None:
    logits = torch.tensor([[0.0, -200.0, 0.1, -200.0]]).repeat(200_000, 1)
    drawn = _Categorical(logits).sample(torch.Generator().manual_seed(1))
    assert set(drawn[:, 0].tolist()) == {0, 2}


@given(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 3e5]), min_size=1, max_size=20))
def test_a_sum_tree_finds_nothing_without_a_value(values: list[float]) -> None:
    if not any(values):
        return
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.array(values))
    sums = np.array([0.0, LAST, 0.5, ROUNDED]) * tree.total
    assert all(values[number] > 0.0 for number in tree.find(sums))


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=5, unique=True), max_size=6))
def test_sets_come_back_as_they_were(sets: list[list[int]]) -> None:
    kept = Kept.of(sets)
    assert [one.tolist() for one in kept.sets()] == sets
    both = kept.followed_by(Kept.of([[300], []]))
    assert [one.tolist() for one in both.sets()] == [*sets, [300], []]


def test_the_set_of_a_token_keeps_no_other_row_in_memory() -> None:
    """A row of 4 tokens beside one of 4,000 that is finished later."""
    kept = torch.zeros(3, 5000, dtype=torch.bool)
    kept[0, :4], kept[1, 500:4500], kept[2] = True, True, True
    few, many, whole = kept_sets(kept)
    assert (few.tolist(), many.tolist(), len(whole)) == ([0, 1, 2, 3], [*range(500, 4500)], 0)
    assert [(one.base is None, one.nbytes) for one in (few, many)] == [(True, 16), (True, 16000)]
