"""``exact``, ``numeric`` and ``math``: what counts as the right answer."""

from __future__ import annotations

import pytest

from rlinf_async.messages.language import Outcome, Rejected, Scored
from rlinf_async.rewards import Answer, load_verifier
from rlinf_async.rewards.judging import judge


def outcome(verifier: str, text: str, reference: str) -> Outcome:
    return judge(
        verifier, load_verifier(verifier), Answer(prompt="", text=text, reference=reference)
    )


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        ("4", "4", 1),
        (" 4\n", "4", 1),
        ("4.0", "4", 0),
        ("a b", "a  b", 0),
        ("", "", 1),
        ("", "4", 0),
    ],
)
def test_an_exact_answer_is_the_reference_but_for_white_space_around_it(
    text: str, reference: str, reward: float
) -> None:
    assert outcome("exact", text, reference) == Scored(reward=reward)


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        ("12", "12", 1),
        ("3 + 4 = 7", "7", 1),
        ("7 is not 8", "7", 0),
        ("The answer is -12.", "-12", 1),
        ("1,234,567", "1234567", 1),
        ("#### 1,234.50", "1234.5", 1),
        (".5", "0.5", 1),
        ("1e3", "1000", 1),
        ("0.1000000000001", "0.1", 0),
        ("0.11", "0.1", 0),
        ("1000000.5", "1000000", 0),
        ("8369911", "8369910", 0),
        ("1000002", "1000000", 0),
        ("about 42kg", "42", 1),
        ("$42", "42", 1),
        ("x42", "42", 0),
        ("no idea", "42", 0),
        ("", "42", 0),
        ("1e9999", "1", 0),
        ("9" * 50_000, "1", 0),
        ("\u0664\u0662", "42", 0),
    ],
)
def test_a_numeric_answer_is_the_last_number_of_the_text(
    text: str, reference: str, reward: float
) -> None:
    assert outcome("numeric", text, reference) == Scored(reward=reward)


def test_a_reference_without_a_number_is_rejected_and_no_answer_called_wrong() -> None:
    assert outcome("numeric", "12", "a dozen") == Rejected(
        reason="the reference 'a dozen' holds no number, or an unclear one"
    )


@pytest.mark.parametrize(
    "text", ["1," * 200_000, "1,234" * 50_000, "123,456," * 40_000, "-" * 500_000]
)
def test_a_long_answer_is_read_in_time_that_grows_with_its_length(text: str) -> None:
    # Time that grew with the square of the length would be hours: the limit of every test ends it.
    assert isinstance(outcome("numeric", text, "1"), Scored)


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        ("0.5", "1/2", 1),
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1),
        ("$1+x^2$", "x^2+1", 1),
        ("$x^2$", "x^2+1", 0),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1),
        (r"$(1, 2)$", "(1, 2)", 1),
        (r"$(1, 3)$", "(1, 2)", 0),
        (r"$\frac{$", "3", 0),
        ("thirteen", "12", 0),
    ],
)
def test_math_compares_values_not_text(text: str, reference: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert outcome("math", text, reference) == Scored(reward=reward)


def test_a_reference_that_is_no_mathematics_is_rejected() -> None:
    pytest.importorskip("math_verify")
    assert isinstance(outcome("math", "5", ""), Rejected)
