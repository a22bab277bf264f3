"""The last number of a text: what people write is read exactly, what is unclear is not read."""

from __future__ import annotations

import itertools
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.messages.language import Rejected, Scored
from rlinf_async.rewards import Answer, load_verifier
from rlinf_async.rewards.judging import judge
from rlinf_async.rewards.matching import last_number

MINUS = "-\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d\u207b\u2796"
STYLES = {
    "plain": ("", ".", 3),
    "English": (",", ".", 3),
    "German": (".", ",", 3),
    "French": ("\u202f", ",", 3),
    "SI": ("\u00a0", ".", 3),
    "Swiss": ("'", ".", 3),
    "Swiss, typeset": ("\u2019", ".", 3),
    "Indian": (",", ".", 2),
}
AROUND = [
    ("", ""),
    ("The answer is ", "."),
    ("3 + 4 = ", ""),
    ("**", "**"),
    (r"\boxed{", "}"),
    ("x=", "\n"),
    ("#### ", ""),
    ("so \\(", "\\)"),
    ("$", "$"),
    ("first 12.\nThen: ", "!"),
    ("\u7b54\u6848\u662f", "\u3002"),
]


def written(value: Decimal, style: str) -> str:
    """An independent writer: the text of a number that is not negative, in the style."""
    separator, point, later = STYLES[style]
    whole, _, rest = f"{value:f}".partition(".")
    groups: list[str] = []
    size = 3
    while whole:
        whole, group = whole[:-size], whole[-size:]
        groups.insert(0, group)
        size = later
    return separator.join(groups) + (point + rest if rest else "")


values = st.decimals(0, 10**13, places=4).map(lambda one: one.normalize())
wholes = st.integers(0, 10**15).map(Decimal)


def clear(style: str, text: str) -> bool:
    """Whether the text is the same in English: 1.234 and 1,234 are read as documented."""
    if STYLES[style][1] == ".":
        return True
    lone_point = text.count(".") == 1 and "," not in text
    return not lone_point and not (text.count(",") == 1 and len(text.partition(",")[2]) == 3)


@given(st.one_of(values, wholes), st.sampled_from(sorted(STYLES)), st.sampled_from(["", *MINUS]),
       st.sampled_from(AROUND))  # fmt: skip
def test_a_number_in_every_style_is_read_exactly(
    value: Decimal, style: str, sign: str, around: tuple[str, str]
) -> None:
    text = written(value, style)
    if not clear(style, text) or (around[0].endswith("{") and "," in text and "." not in text):
        return
    if style == "French" and around[0].endswith(("{", "(")):
        return
    found = last_number(f"{around[0]}{sign}{text}{around[1]}")
    assert found is not None
    assert found.value == (-Fraction(value) if sign else Fraction(value))


@given(st.lists(st.one_of(values, wholes), min_size=2, max_size=2), st.data())
def test_no_number_is_right_for_another(pair: list[Decimal], data: st.DataObject) -> None:
    style = data.draw(st.sampled_from(sorted(STYLES)))
    text = written(pair[0], style)
    answer = Answer(prompt="", text=f"It is {text}.", reference=str(pair[1]))
    outcome = judge("numeric", load_verifier("numeric"), answer)
    if clear(style, text):
        assert outcome == Scored(reward=float(pair[0] == pair[1]))


@given(st.integers(0, 10**12), st.sampled_from([-2, -1, 1, 2]), st.integers(0, 30))
def test_no_neighbour_is_right_at_any_scale(number: int, off: int, places: int) -> None:
    right, wrong = Decimal(number).scaleb(-places), Decimal(number + off).scaleb(-places)
    for text, reward in ((right, 1.0), (wrong, 0.0)):
        answer = Answer(prompt="", text=f"{text:f}", reference=f"{right:f}")
        assert judge("numeric", load_verifier("numeric"), answer) == Scored(reward=reward)


def every_reading(text: str) -> set[Fraction]:
    """An independent reader: every value that some convention gives to digits and separators."""
    found = set()
    signs = [at for at, one in enumerate(text) if one in "-+"]
    for point in [None, *(at for at, one in enumerate(text) if one in ".,")]:
        digits = "".join(one for one in text if one.isdigit())
        rest = 0 if point is None else sum(one.isdigit() for one in text[point:])
        number = Fraction(int(digits or 0), 10**rest)
        found |= {number, -number} if signs else {number}
    return found


@given(st.text("0123456789.,'-", min_size=1, max_size=12))
def test_what_is_read_of_digits_and_separators_is_one_of_the_ways_to_read_them(text: str) -> None:
    found = last_number(text)
    if found is None:
        return
    starts = [at for at in range(len(text)) if any(one.isdigit() for one in text[at:])]
    assert any(found.value in every_reading(text[at:]) for at in starts)
    assert text.rstrip(".,'-")[-1:].isdigit()


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from(["", *MINUS]))
def test_fractions_and_mixed_numbers_are_read(top: int, bottom: int, sign: str) -> None:
    value = Fraction(top, bottom) * (-1 if sign else 1)
    for text in (
        f"{top}/{bottom}",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"\\dfrac{{{top}}}{{{bottom}}}",
    ):
        found = last_number(f"It is {sign}{text}")
        assert found is not None
        assert found.value == value
    for text in (f"3 {top}/{bottom}", f"3\\frac{{{top}}}{{{bottom}}}"):
        found = last_number(f"{sign}{text}")
        assert found is not None
        assert found.value == (3 + abs(value)) * (-1 if sign else 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50%", "1/2"), ("50 %", "1/2"), (r"50\%", "1/2"), ("50 percent", "1/2"),
        ("5\u2030", "1/200"),
        ("\u00bd", "1/2"), ("-3\u00bd", "-7/2"), ("2e3", "2000"), ("2.5E-1", "1/4"),
        ("2\u00d710^5", "200000"), (r"2 \times 10^{-1}", "1/5"), ("2\u00b710\u2075", "200000"),
        ("+5", "5"), ("$5", "5"), ("-$5", "-5"), ("5 \u20ac", "5"), ("5 dollars", "5"),
        ("5km", "5"),
        ("5 km/h", "5"), ("5 m^2", "5"), ("5 m\u00b2", "5"), ("5m2", "5"), (r"5\text{ cm}", "5"),
        ("5\u00b0C", "5"), ("3 million", "3000000"), ("the 3rd", "3"), (".5", "1/2"),
        ("1,234", "1234"),
        ("1.234", "617/500"), ("0,123", "123/1000"), ("3,5", "7/2"), ("12,34,567", "1234567"),
        ("12 345", "12345"), ("\uff14\uff12", "42"), ("(42)", "42"), ("42 (forty-two)", "42"),
        ("<answer>42</answer>", "42"), ("<b>-5</b>", "-5"), ("so <<6*7=42>>42", "42"),
        ("'42'", "42"), (r"\fbox{42}", "42"), (r"5\,000", "5000"), ("- **5**", "5"),
        (r"is 4.\n- \boxed{5}".replace(r"\n", "\n"), "5"),
    ],
)  # fmt: skip
def test_what_documentation_says_is_read(text: str, value: str) -> None:
    found = last_number(text)
    assert found is not None
    assert found.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "4 or 5", "4 and 5", "4, 5", "4; 5", "4 to 5", "(4,5)", r"\boxed{4,5}", "[4,5]",
        "1,2,3", "2019 2020",
        "5-4", "5 - 4", "5 -4", "3+4", "6*7", "6 \u00d7 7", "6/x", "5x", "3i", "3\u03c0",
        r"3\pi", r"2\sqrt{3}",
        r"\sqrt{5}", "\u221a5", "10^2", "10\u00b2", "x^{5}", "x_5", "f(5)", "\u00b15",
        r"\pm 5", "- 5",
        "minus 5", "> 5", "x < 5", "less than 5", "3:45", "1.2.3", "2024-01-05", "0.333...",
        "3k", "3M",
        "3 bn", "3 dozen", "3 lakh", "3\u4e07", "1/0", "1/2/3", "1_000", r"\frac{x}{5}",
        r"x\frac12", "x5",
        "5 squared", "\u0664\u066b\u0662", "12,345,67", "5e", "sin 5", "",
        "5~6", r"4\ 5", r"4\;5", "5\u20266", "0.(3)", "0.3\u0304", "2**10", "x*5", "10<sup>3</sup>",
        "-(5)", "-[5]", "-|5|", r"x = -\boxed{5}", r"-\left(5\right)", "-**5**", r"\boxed{5!}",
        "4, 5, and 6", "x = 4 or x = 5", "x_1 = 4, x_2 = 5", r"\boxed{4} or \boxed{5}",
        "3 out of 4", "5 times 3", "2 x 3", "5 R 2", "2 to the power of 3", "1.5*10^(3)",
        "2 hours 30 minutes", "5 ft 3 in", "3 dollars and 50 cents",
        "x >= 5", "x<=5", "x != 5", "5 and a half", "5 half",
    ],
)  # fmt: skip
def test_what_is_unclear_is_not_read(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        ("5 km", "5 km", 1), ("5 km", "5 m", 0), ("5", "5 m", 1), ("5 km", "5", 1),
        ("5 Apples", "5 apple", 1),
        ("$5", "5 dollars", 1), ("\u20ac5", "$5", 0), ("5 cm", r"5 \mathrm{cm}", 1),
        ("5 m^2", "5 m", 0), ("$$5$$", "5 m", 1),
        ("7 in total", "7 apples", 1), ("7 in all.", "7 apples", 1), ("7 in", "7 apples", 0),
        ("7 in tall", "7 cm", 0), ("$7 in total", "\u20ac7", 0),
    ],
)  # fmt: skip
def test_units_have_to_agree_where_both_name_one(text: str, reference: str, reward: int) -> None:
    answer = Answer(prompt="", text=text, reference=reference)
    assert judge("numeric", load_verifier("numeric"), answer) == Scored(reward=reward)


@pytest.mark.parametrize(("text", "reward"), [("it is 42", 0), ("it is 42.", 1), ("42 km", 0)])
def test_a_number_at_which_the_answer_was_cut_off_is_not_read(text: str, reward: int) -> None:
    answer = Answer(prompt="", text=text, reference="42", finish="length")
    assert judge("numeric", load_verifier("numeric"), answer) == Scored(reward=reward)


@given(st.permutations([4, 5, 6]), st.integers(4, 6))
def test_of_several_boxes_the_last_one_counts_for_mathematics(
    order: list[int], wanted: int
) -> None:
    pytest.importorskip("math_verify")
    text = " no wait ".join(rf"$\boxed{{{one}}}$" for one in order)
    answer = Answer(prompt="", text=text, reference=str(wanted))
    assert judge("math", load_verifier("math"), answer) == Scored(reward=float(order[-1] == wanted))


PAIRS = [
    ("8369911", "8369910"), ("0.0000001", "0.0000002"), ("1e3", "1"), ("3\u00bd", "3"),
    ("1\u00a0234", "234"),
    ("50%", "50"), (r"\boxed{4} no wait \boxed{5}", "(4,5)"), (r"$\{4,5\}$", "(4,5)"),
    (r"\boxed{5,4}", "(4,5)"),
    ("$5$ or $6$", "5"), ("$5$ or $6$", "6"), ("$5$, $6$", "(5,6)"), ("\u22125", "5"),
    ("5 km", "5 m"),
    (r"5. \boxed{}", "5"), (r"\boxed{5", "5"), ("x>5", "5"), ("1.234", "1,234"),
    ("0.1000001", "0.1"),
    (r"-\boxed{5}", "5"), (r"\boxed{5~6}", "56"), (r"\boxed{5!}", "5"), (r"\boxed{0.(3)}", "3"),
    (r"\boxed{4, 5, and 6}", "6"), (r"\boxed{2**10}", "10"),
    ("4 or 5", "5"), ("4, 5", "5"), ("x = 4 or x = 5", "5"), ("between 4 and 5", "5"),
    ("4 or 1/2", r"\frac{1}{2}"), ("area = 4\u03c0", "4"), ("4 pi", "4"), ("2\u221a3", "2"),
    ("12:30", "12"), ("5k", "5"), ("3 dozen", "3"), ("5\u00b11", "5"), ("5 choose 2", "2"),
    ("0.333...", "0.333"), (r"\$4 or \$5", "5"),
    ("$2\u221a3$", "2"), (r"\boxed{101_2}", "101"),
    (r"\boxed{3.\overline{3}}", "3"), (r"\boxed{5\text{ million}}", "5"), (r"\boxed{1:2}", "2:1"),
    ("5 or 6", "6"), ("it is 5 or 6.", "6"), ("x is 5, or -6", "-6"), ("4, 5 and 6", "6"),
    (r"\boxed{0.\overline{3}}", "0.3"), (r"\boxed{0.\overline{3}}", "0.33333333333333"),
    ("$5 million", "5"), (r"\boxed{\geq 5}", "5"), (r"\boxed{> 5}", "5"), (r"\boxed{\ne 5}", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reference"), PAIRS)
def test_mathematics_that_differs_is_not_right(text: str, reference: str) -> None:
    pytest.importorskip("math_verify")
    answer = Answer(prompt="", text=text, reference=reference)
    assert judge("math", load_verifier("math"), answer) == Scored(reward=0.0)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("\u22125", "-5"), ("\\boxed{\u22125}", "-5"), ("1e3", "1000"),
        ("3\u00bd", "7/2"), ("12,34,567", "1234567"), ("1'234", "1234"), (r"\boxed{4,5}", "(4,5)"),
        (r"\boxed{4} no wait \boxed{5}", "5"), (r"\boxed{\frac{1}{2}}", "0.5"), ("50%", "0.5"),
        ("2^10", "1024"), (r"x = -\boxed{5}", "-5"), (r"$-\boxed{x+1}$", "-x-1"),
        (r"\boxed{5!}", "120"), (r"\boxed{-(5)}", "-5"), ("<answer>5</answer>", "5"),
        ("4 or\n- \\boxed{5}", "5"), ("$$42$$", "$42"),
        (r"She pays \$5.", "5"), (r"90\degree", "90"), (r"\boxed{50\text{ percent}}", "0.5"),
        (r"\boxed{5\text{ million}}", "5000000"), (r"\boxed{1:2}", "1:2"),
        ("2 and 3 are 5", "5"),
        (r"\boxed{0.\overline{3}}", "1/3"), (r"\boxed{-1.1\overline{6}}", "-7/6"),
        (r"\boxed{1/3}", r"0.\overline{3}"), (r"$0.\bar{3}$", r"\frac{1}{3}"),
        ("2*3", "6"), ("first 4, then 5", "5"), ("$5 million", "5000000"), ("It costs $5.", "5"),
        ("so => 5", "5"), (r"$x \geq 5$", r"x \geq 5"),
    ],
)  # fmt: skip
def test_mathematics_that_is_the_same_is_right(text: str, reference: str) -> None:
    pytest.importorskip("math_verify")
    answer = Answer(prompt="", text=text, reference=reference)
    assert judge("math", load_verifier("math"), answer) == Scored(reward=1.0)


@pytest.mark.parametrize("reference", ["2\u221a3", "0.333...", "101_2"])
def test_a_reference_of_which_only_a_part_is_read_is_rejected(reference: str) -> None:
    pytest.importorskip("math_verify")
    answer = Answer(prompt="", text="2", reference=reference)
    assert isinstance(judge("math", load_verifier("math"), answer), Rejected)


@given(st.integers(0, 99), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1,
       max_size=6))  # fmt: skip
def test_repeating_decimals_are_the_fraction_that_they_are(
    whole: int, once: str, again: str
) -> None:
    found = last_number(rf"so ${whole}.{once}\overline{{{again}}}$.")
    assert found is not None
    long = Fraction(Decimal(f"{whole}.{once}{again * 9}"))
    assert 0 <= found.value - long <= Fraction(1, 10 ** (len(once) + 9 * len(again)))
    assert (found.value * (10 ** (len(once) + len(again)) - 10 ** len(once))).denominator == 1


def test_whatever_is_written_before_it_the_last_number_is_found_in_time() -> None:
    for start, number in itertools.product(
        ("1 " * 100_000, "(" * 100_000, "\u7b54" * 100_000), (7,)
    ):
        found = last_number(f"{start}\n{number}")
        assert found is not None
        assert found.value == number
