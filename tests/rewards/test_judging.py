"""Whatever a verifier does, its answer gets a typed outcome; a failure never becomes a 0."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.messages.language import Failed, Outcome, Rejected, Scored
from rlinf_async.rewards import Answer, UnknownVerifier, load_verifier
from rlinf_async.rewards.judging import PACKAGE, described, judge, outcome_of
from rlinf_async.rewards.judging import verifiers as registry
from tests.rewards import verifiers

ANSWER = Answer(prompt="1+1=", text="2", reference="2")


def outcome(name: str) -> Outcome:
    return judge(name, getattr(verifiers, name), ANSWER)


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [(1, 1.0), (-0.5, -0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (Fraction(1, 4), 0.25)],
)
def test_any_finite_real_number_is_a_reward(verdict: Any, reward: float) -> None:
    assert outcome_of("v", verdict) == Scored(reward=reward)


def test_a_reward_can_have_parts() -> None:
    verdict = Scored(reward=1, parts={"style": np.float32(0.5)})  # type: ignore[dict-item]
    scored = outcome_of("v", verdict)
    assert scored == Scored(reward=1.0, parts={"style": 0.5})
    assert msgspec.json.decode(msgspec.json.encode(scored), type=Scored) == scored


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised KeyError: 'score' ("),
        ("exits", "raised SystemExit: done"),
        ("returns_text", "returned '0.9' (a str), not a number"),
        ("returns_nothing", "returned None (a NoneType), not a number"),
        ("returns_a_boolean", "returned True (a bool), not a number: return 1.0 or 0.0"),
        ("returns_nan", "returned nan (a float), not a finite number"),
        ("returns_infinity", "returned -inf (a float), not a finite number"),
        ("returns_a_huge_integer", "too large for a float"),
        ("returns_too_much", "returned 1e+300 (a float), beyond 1e+18, which training cannot"),
        ("returns_scored_with_nan", "Scored with style = nan"),
        ("returns_scored_with_text", "Scored with reward = 'high' (a str), not a number"),
        ("returns_the_unprintable", "raised RuntimeError: no"),
        ("asynchronous", "is asynchronous and was called inline"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_verdict_that_is_no_number_is_a_failure_that_says_so(name: str, said: str) -> None:
    failed = outcome(name)
    assert isinstance(failed, Failed)
    assert failed.error.startswith(f"verifier {name!r} ")
    assert said in failed.error


def test_a_failure_says_where_in_the_verifier_it_was_raised() -> None:
    failed = outcome("raises")
    assert isinstance(failed, Failed)
    assert "verifiers.py:" in failed.error


def test_a_verifier_can_refuse() -> None:
    assert outcome("refuses") == Rejected(reason="the question has no answer")


def test_an_error_that_is_no_text_can_be_sent() -> None:
    def odd(answer: Answer) -> float:
        raise ValueError("\ud800")

    assert msgspec.msgpack.encode(judge("odd", odd, ANSWER))


def test_a_long_error_is_cut() -> None:
    def wordy(answer: Answer) -> float:
        raise ValueError("x" * 1_000_000)

    failed = judge("wordy", wordy, ANSWER)
    assert isinstance(failed, Failed)
    assert len(failed.error) < 5_000


def test_a_package_whose_name_begins_as_ours_is_not_ours() -> None:
    folder = PACKAGE.rstrip(os.sep)
    source = compile("raise ValueError('theirs')", f"{folder}_envs/world.py", "exec")
    with pytest.raises(ValueError, match="theirs") as raised:
        exec(source)
    assert described(raised.value).endswith(f"({folder}_envs/world.py:1)")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownVerifier, match=r"'exat'; did you mean 'exact'\? \(known: .*'exact'"):
        load_verifier("exat")
    known = ["environment", "exact", "math", "none", "numeric", "reasoning_gym"]
    assert registry.names() == known


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.rewards.verifiers:", "must be 'module:function' or 'file.py:function'"),
        ("no_such_module:score", "'no_such_module' cannot be imported"),
        ("no_such_file.py:score", "cannot be imported"),
        ("tests.rewards.verifiers:nothing", "has no function 'nothing'"),
        ("tests.rewards.verifiers:not_a_function", "has no function 'not_a_function'"),
        ("tests.rewards.verifiers:takes_two", "takes other arguments"),
    ],
)
def test_a_wrong_import_path_is_an_error_that_says_what_is_wrong(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_verifier(name)


def test_a_verifier_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(answer):\n    return float(answer.text == 'x' * 3)\n")
    verifier = load_verifier(f"{file}:score")
    answer = Answer(prompt="", text="xxx", reference="")
    assert judge("mine", verifier, answer) == Scored(reward=1.0)
