"""Group verifiers: all answers to a prompt at once, one outcome for each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.messages.language import Failed, JudgeUse, Outcome, Rejected, Scored
from rlinf_async.rewards import Answer, load_verifier, repeating
from rlinf_async.rewards.judging import attempt, group_verifiers, judges_groups, outcomes_of
from rlinf_async.rewards.repeating import Judges
from tests.rewards import verifiers
from tests.rewards.test_pool import pool

NAMED = "tests.rewards.verifiers"
TEXTS = ("aa", "aaaa", "a", "bbbb")
LONGEST = [Scored(reward=float(len(one) == 4)) for one in TEXTS]


def answers(*texts: str, reference: str = "") -> list[Answer]:
    return [Answer(prompt="1+1=", text=one, reference=reference) for one in texts or TEXTS]


def test_only_what_is_marked_judges_groups() -> None:
    @functools.wraps(verifiers.longest)
    def wrapped(*arguments: object) -> object:
        return verifiers.longest(*arguments)  # type: ignore[arg-type]

    assert judges_groups(verifiers.longest)
    assert judges_groups(wrapped)
    assert judges_groups(verifiers.longest_later)
    assert not judges_groups(verifiers.length)
    names = [f"{NAMED}:{one}" for one in ("length", "longest", "longest_later")]
    assert group_verifiers([*names, "exact", "math"]) == set(names[1:])


def test_a_class_is_no_verifier_but_its_object_is() -> None:
    with pytest.raises(ConfigError, match="takes other arguments"):
        load_verifier(f"{NAMED}:Longest")
    assert judges_groups(load_verifier(f"{NAMED}:longest_later"))


ONE = Scored(reward=1.0)
TABLE: list[tuple[str, Sequence[Outcome] | str]] = [
    ("[1, 1.0, True, 0]", [ONE, ONE, Failed(error="not a number"), Scored(reward=0.0)]),
    ("(1, nan, '1', 1)", [ONE, Failed(error="not a finite"), Failed(error="not a number"), ONE]),
    ("[Scored(reward=1), Reject('why'), Reject(), 1]",
     [ONE, Rejected(reason="why"), Rejected(reason="no reason was given"), ONE]),
    ("[[1, 2], None, 1e300, {}]", [Failed(error="not a number")] * 2
     + [Failed(error="beyond 1e+18"), Failed(error="not a number")]),
    ("[1, 1, 1]", "returned 3 scores for 4 answers: return a list of 4"),
    ("[1] * 5", "returned 5 scores for 4 answers: return a list of 4"),
    ("[]", "returned 0 scores for 4 answers"),
    ("0.5", "returned 0.5 (a float) for 4 answers: return a list of 4"),
    ("Scored(reward=1)", "(a Scored) for 4 answers"),
    ("None", "returned None (a NoneType) for 4 answers"),
    ("'1111'", "returned '1111' (a str) for 4 answers"),
    ("{0: 1, 1: 1, 2: 1, 3: 1}", "(a dict) for 4 answers"),
    ("{1, 2, 3, 4}", "(a set) for 4 answers"),
    ("1 / 0", "raised ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("returned", "expected"), TABLE)
def test_whatever_it_returns_each_answer_gets_an_outcome(
    returned: str, expected: Sequence[Outcome] | str
) -> None:
    found = attempt("mine", verifiers.gives, answers(reference=returned)).of_each(4)
    wanted = [Failed(error=expected)] * 4 if isinstance(expected, str) else list(expected)
    assert len(found) == 4
    for outcome, one in zip(found, wanted, strict=True):
        if isinstance(one, Failed):
            assert isinstance(outcome, Failed)
            assert "verifier 'mine' " in outcome.error
            assert one.error in outcome.error
        else:
            assert outcome == one


def test_arrays_tensors_and_generators_are_lists() -> None:
    torch = pytest.importorskip("torch")
    wanted = [Scored(reward=0.5), Scored(reward=2.0)]
    for given in (np.array([0.5, 2]), torch.tensor([0.5, 2]), (one for one in (0.5, 2)), (0.5, 2)):
        assert outcomes_of("mine", given, 2) == wanted
    [first, _] = outcomes_of("mine", torch.zeros(2, 1), 2)
    assert isinstance(first, Failed)


async def test_functions_generators_objects_and_rejections_in_processes() -> None:
    async with pool() as made:
        names = [f"{NAMED}:{one}" for one in ("longest", "longest_later", "one_by_one", "length")]
        await made.load(names)
        assert made.of_groups == set(names[:3])
        assert made.asynchronous == {names[1]}
        for name in names[:3]:
            assert await made.judge_group(name, answers()) == LONGEST
        assert await made.judge_group(names[0], answers("one")) == [Scored(reward=1.0)]
        rejected = await made.judge_group(f"{NAMED}:rejects_all", answers())
        assert rejected == [Rejected(reason="nothing to compare")] * 4
        ended = await made.judge_group(f"{NAMED}:ends_its_process", answers())
        assert ended == [ended[0]] * 4
        assert isinstance(ended[0], Failed)
        assert "ended its process: exit code 3" in ended[0].error


async def test_a_group_is_asked_for_again_and_remembered_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeating, "FIRST_PAUSE", 0.01)
    name = f"{NAMED}:busy_at_first"
    async with pool() as made:
        judges, use, again, other = Judges(made, retries=1, cache=8), *(JudgeUse() for _ in "abc")
        paid = await judges.judge_group(name, answers(), use)
        assert paid == [Scored(reward=len(one), cost=0.25) for one in TEXTS]
        assert use == JudgeUse(calls=2, retries=1)
        free = await judges.judge_group(name, answers(), again)
        assert free == [Scored(reward=len(one)) for one in TEXTS]
        assert again == JudgeUse(cache_hits=4)
        await judges.judge_group(name, answers(*TEXTS[:3]), other)  # another group
        assert other == JudgeUse(calls=1)
