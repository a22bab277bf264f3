"""``exact`` and ``numeric``: the answer is the reference, as text or as a number.

The last number of a text is read exactly, or not at all::

    text --signs, spaces, \frac as plain characters--> the last digits that begin a word
         --a number around them, what stands before and after it--> `Number`, or None

Invariant: what can be read in two ways is not read, except as the table in docs/language-data.md
decides it. A number that could be meant by several values would be right for a wrong answer.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Final, NamedTuple

from rlinf_async.rewards.judging import Answer, Reject

WINDOW: Final = 600
"""characters before the last digits that are looked at; a number that is longer is not read"""

_MINUS = (
    "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe58\ufe63\uff0d\u207b\u208b\u2796\u02d7\u2043"
)
_SPACES = "\u00a0\u202f\u2009\u2007\u2008\u200a\u2006\u2005\u2004\u3000\t"
_PLAIN = {
    **dict.fromkeys(_MINUS, "-"),
    **dict.fromkeys("\uff0b\ufe62\u2795\u207a", "+"),
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff\u00ad", ""),
    **dict.fromkeys("\u2019\u02bc\uff07\u2018", "'"),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\uff05\ufe6a", "%"),
    "\uff0e": ".",
    "\uff0c": ",",
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
}
_SIGNS = str.maketrans(_PLAIN)
_SUPERSCRIPT = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "0123456789"
)
_POWERS = "\u2070\u00b9\u00b2\u00b3\u2074-\u2079"

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""letters between which and a number no space is written"""

_LATEX = (
    (re.compile("[\u22c5\u00b7\u2715\u2217]"), "\u00d7"),
    (re.compile("\u00b5"), "\u03bc"),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"\\!|\\quad\b|\\left\b|\\right\b"), ""),
    (re.compile(r"</?(?!su[bp]>)[A-Za-z][\w:-]*[ ]*/?>"), " "),  # <answer>5</answer>
    (re.compile(r"(?<!\d)<<[^<>]*>>"), ""),  # <<3+4=7>>7: GSM8K's calculator
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "\u00d7"),
    (re.compile(r"\\pm(?![A-Za-z])"), "\u00b1"),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(rf"(?<=[{_IDEOGRAPHS}])(?=[-+.0-9])"), " "),
    (re.compile(r"\\degree(?![A-Za-z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})"), "\u00b0"),
)
_FRACTION = re.compile(
    r"(?<![A-Za-z)}])\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
)
_REPEATING = re.compile(
    r"(?<![\d.,'])(\d{0,99})\.(\d{0,99})\\(?:overline|bar)[ ]*\{[ ]*(\d{1,99})[ ]*\}(?!\d)"
)
"""decimals of which some repeat: ``0.1\\overline{6}``"""
_VULGAR = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")

_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9\u20bd\u20a9\u20aa\u20ba\u20bf\u0e3f"
_DIGITS = r"[0-9]+(?:[.,'][0-9]+|[ ][0-9]{3}(?![0-9/]))*"
_WORD = r"[^\W\d_]+"
_POWER = rf"(?:[{_POWERS}]+|\^\{{?-?[0-9]+\}}?|[0-9](?!\w))?"
_NUMBER = re.compile(
    rf"(?P<before>[{_CURRENCY}]?(?P<sign>[-+])?[{_CURRENCY}]?)"
    rf"(?:(?P<whole>[0-9]+)[ ]+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<core>{_DIGITS}|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})(?!\w))?"
    rf"(?:[ ]*/[ ]*(?P<over>{_DIGITS}))?"
    rf"(?:[ ]*[x\u00d7*][ ]*10(?:(?:\^|\*\*)\{{?(?P<power>[-+]?[0-9]{{1,4}})\}}?"
    rf"|(?P<raised>-?[{_POWERS}]+)))?)"
    r"(?P<share>[ ]{0,3}(?:%|\u2030|(?:percent|per cent)(?!\w)))?"
    r"(?P<scale>[ ]{0,3}(?:hundred|thousand|million|billion|trillion)(?!\w))?"
    rf"(?P<after>[ ]?[{_CURRENCY[1:]}]|(?P<gap>[ ]{{0,3}})(?P<unit>(?:\u00b0[CF]?|{_WORD}){_POWER}"
    rf"(?:[/\u00d7]{_WORD}{_POWER})*))?"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_KNOWN = re.compile(
    "[nukmcMG\u03bc]?(?:m|g|s|l|L|W|V|A|J|N|Pa|Hz|B|eV|mol)|TB|KB|t|h|hrs?|mins?|secs?|\u00b0[CF]?"
    "|ft|in|yd|mi|lbs?|oz|mph|st|nd|rd|th|am|pm|USD|EUR|GBP|px"
)
"""units that may touch their number, or have one letter; other letters there are variables"""
_NOT_UNITS = re.compile(
    "(?:hundred|thousand|million|billion|trillion|lakh|crore|dozen)s?|[bm]n|mio|mrd|pi|factorial"
    "|squared|cubed|times|plus|minus|over|half|halves|thirds|quarters"
    "|[\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u5146].*",
    re.IGNORECASE,
)
"""words that change a value, and are not read"""
_NOT_INCHES = re.compile(r"[ ]+(?:total|all|sum|each|the|this|that|an?)\b")
"""what follows an "in" that is no unit"""
_SAME_UNIT = {
    **dict.fromkeys(("dollar", "usd"), "$"),
    **dict.fromkeys(("euro", "eur"), "\u20ac"),
    **dict.fromkeys(("pound", "gbp"), "\u00a3"),
}

_PARTS = (
    "h|hours?|hrs?|minutes?|mins?|feet|foot|ft|pounds?|lbs?|days?|weeks?|months?|years?|degrees?"
)
"""words after which smaller ones follow"""
_OPERATORS = (
    "x|in|of|by|out of|over|per|times|plus|minus|divided by|multiplied by|mod|modulo|choose|vs"
    "|R|r|rem|remainder|to the power(?: of)?"
)
_BEFORE = (
    r"[\w.,'^/\u00d7\u00f7\u221a\u00b1\u2213<\u2264\u2265\u2260\\]|(?<![-=])>[ ]*|[<>!]=[ ]*",
    r"[-+\u00d7\u00f7/\u221a\u00b1\u2213\u2264\u2265\u2260<^][ ]+",  # an operator, or "- 5"
    r"[\d)}][ ]*(?:\*\*?|:)[ ]*|\w\*\*?|[\w.)]\(|\d\u2026|\}\{|[\^_][{(]",
    r"\\(?!boxed|fbox)[A-Za-z]+[ ]*\{?",
    r"(?<!\w)(?:minus|negative|not|than|least|most|root|root of|half|half of|twice)[ ]+",
    r"(?<!\w)(?:log|ln|sin|cos|tan)[ ]+",
    r"[\d)}%][ ]*[,;&]?[ ]*(?:\b(?:or|and|to)\b)?[ ]+|[\d)}%][;&]",  # several
    r"\w\}?[ ]+or[ ]+(?:\\(?:boxed|fbox)\{)?|\d[ ]*[A-Za-z]+,?[ ]+and[ ]+",
    (
        r"(?P<name>[A-Za-z])(?:_?\{?\d+\}?)?[ ]*=[ ]*[-+]?\d[\d./]*[ $]*(?:[,;&]|or\b|and\b)"
        r"(?:[ $]|or\b|and\b)*(?P=name)(?:_?\{?\d+\}?)?[ ]*=[ ]*"
    ),
    rf"\d[ ]?(?:{_PARTS})[ ]+",  # 2 hours 30 minutes
    rf"\d[ ]+(?:{_OPERATORS})[ ]+",  # 3 out of 4
)
_AFTER = (
    r"[ ]*[+^\u00d7\u00f7\u221a\u03c0\u221e/\u0300-\u036f]",
    r"[ ]*\\(?![\])]|boxed|fbox)[A-Za-z]+|!(?=[ ]*(?:[}$=+*/-]|\\[)\]]))",
    r"[ ]+(?:a|one)[ ]+(?:half|third|quarter)(?!\w)",  # 5 and a half
    r"[ ]*-\w|[ ]*-[ ]+[\w(][ ]*(?:\Z|[^\w ])|\*(?!\*)[ ]*[\w(]",
    rf"\(|[{_POWERS}]|\.\.\.|\u2026|[_{{:]\w|\w",
)
_BLOCKED_BEFORE = re.compile(rf"(?:{'|'.join(_BEFORE)})\Z")
_SIGNED = re.compile(r"(?:[-+]|\S[ ]+[-+][ ]+)(?:\*+|[({\[|]|\\(?:boxed|fbox)\{)+\Z")
"""a sign apart from its number: ``-(5)``, ``-\\boxed{5}``; not the dash of a list's item"""
_BLOCKED_AFTER = re.compile("|".join(_AFTER))


class Number(NamedTuple):
    """A number of a text."""

    value: Fraction
    unit: str
    """word or symbol beside it, for comparison; empty: none"""
    end: int
    """characters of the text that follow it, its unit included"""

    def agrees(self, wanted: Number) -> bool:
        """Whether the number is the wanted one, and of the same unit where both have one."""
        units_differ = self.unit and wanted.unit and self.unit != wanted.unit
        return self.value == wanted.value and not units_differ


def with_plain_signs(text: str) -> str:
    """The text with one character for each kind of minus sign, space and apostrophe, and with
    fractions for decimals that repeat."""
    return _REPEATING.sub(_repeated, text.translate(_SIGNS))


def _plain(text: str) -> str:
    """The text with plain signs, without LaTeX's commands around numbers; fractions as ``1/2``."""
    text = with_plain_signs(text)
    for pattern, by in _LATEX:
        text = pattern.sub(by, text)
    text = _FRACTION.sub(
        lambda found: _fraction_part(found, f"{found[1] or found[2]}/{found[3] or found[4]}"), text
    )
    return _VULGAR.sub(
        lambda found: _fraction_part(
            found, unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/")
        ),
        text,
    )


def _repeated(found: re.Match[str]) -> str:
    """The fraction that repeating decimals are."""
    whole, once, again = found.groups()
    value = Fraction(int(f"{whole or 0}{once}"), 10 ** len(once))
    value += Fraction(int(again), 10 ** len(once) * (10 ** len(again) - 1))
    return f"{value.numerator}/{value.denominator}"


def _fraction_part(found: re.Match[str], fraction: str) -> str:
    """The fraction; of a mixed number apart from the whole one before it."""
    before = found.string[found.start() - 1 : found.start()] if found.start() else ""
    return f" {fraction}" if before.isdigit() else fraction


def last_number(text: str) -> Number | None:
    """The last number; None where there is none, or it cannot be read for certain."""
    text = _plain(text)
    at = -1
    for word in re.finditer(r"\w+", text):  # digits within a word, as in x2, are no number
        if word[0][0].isdigit():
            at = word.start()
    if at < 0:
        return None
    start = max(0, at - WINDOW)
    window = text[start : at + WINDOW]
    for found in _NUMBER.finditer(window):
        if found.start() <= at - start < found.end():
            if start and not found.start():
                return None
            return _read(found, window, len(text) - start - found.end())
    return None


def _read(found: re.Match[str], text: str, end: int) -> Number | None:
    before, after = text[: found.start()], text[found.end() :]
    if found["sign"] and re.search(r"[\w)}\]][ ]*\Z", before) and _joined(before):
        return None
    emphasised = before[-1:] in ("*", "'") and after.startswith(before[-1])
    if _SIGNED.search(before[-40:]):
        return None
    if not emphasised and (_BLOCKED_BEFORE.search(before[-40:]) or _BLOCKED_AFTER.match(after)):
        return None
    in_brackets = before.endswith(("(", "[", "{")) and not before.endswith(("\\(", "\\["))
    core = found["core"] or ""
    if in_brackets and re.fullmatch(r"\d+,\d+", core) and not _GROUPED.fullmatch(core):
        return None  # two numbers
    unit = _unit(found, after)
    value = _value(found)
    return None if unit is None or value is None else Number(value, unit, end)


def _joined(before: str) -> bool:
    """Whether a sign after this text is an operator: ``5 -4``, ``x-4``; not ``is -4``."""
    return not before.endswith(" ") or bool(re.search(r"[\d)}\]][ ]*\Z", before))


_GROUPED = re.compile(r"[1-9]\d{0,2}(?:([,. '])\d{3})(?:\1\d{3})*|[1-9]\d?(?:,\d\d)+,\d{3}")


def _unit(found: re.Match[str], after: str) -> str | None:
    """The unit; None where letters at the number are no unit, so that they change its value."""
    unit = found["unit"]
    symbols = re.sub(r"[-+ ]", "", found["before"])
    if set(symbols) == {"$"} and after.startswith("$"):
        symbols = ""  # mathematics between two of them
    if not unit:
        return symbols or (found["after"] or "").strip()
    first = re.match(rf"\u00b0[CF]?|{_WORD}", unit)
    assert first is not None
    touching = not found["gap"] and not found["share"] and not found["scale"]
    alone = (touching or len(first[0]) == 1) and not re.match(f"[{_IDEOGRAPHS}]", first[0])
    if _NOT_UNITS.fullmatch(first[0]) or (alone and not _KNOWN.fullmatch(first[0])):
        return None
    if unit == "in" and _NOT_INCHES.match(after):
        return symbols
    word = unit if len(first[0]) < 4 else unit.lower().removesuffix("s")
    return symbols or _SAME_UNIT.get(word.lower(), word)


def _value(found: re.Match[str]) -> Fraction | None:
    if found["whole"]:
        if not int(found["bottom"]):
            return None
        value = int(found["whole"]) + Fraction(int(found["top"]), int(found["bottom"]))
    else:
        core, over = _decimal(found["core"]), _decimal(found["over"] or "1")
        if core is None or not over:
            return None
        raised = (found["raised"] or "").translate(_SUPERSCRIPT)
        power = sum(int(one or 0) for one in (found["exponent"], found["power"], raised))
        value = core / over * Fraction(10) ** power
    if share := found["share"]:
        value /= 1000 if "\u2030" in share else 100
    if scale := found["scale"]:
        value *= 10 ** _SCALES[scale.strip()]
    return -value if found["sign"] == "-" else value


def _decimal(digits: str) -> Fraction | None:
    """Digits with separators; None where these are neither thousands' nor a decimal one."""
    separators = re.findall(r"\D", digits)
    decimal = separators[-1] if separators and separators[-1] in ".," else ""
    if decimal and (
        separators.count(decimal) > 1 or (separators == [","] and _GROUPED.fullmatch(digits))
    ):
        decimal = ""
    whole, _, rest = digits.rpartition(decimal) if decimal else (digits, "", "")
    if re.search(r"\D", whole):
        if not _GROUPED.fullmatch(whole):
            return None
        whole = re.sub(r"\D", "", whole)
    return Fraction(f"{whole or 0}.{rest or 0}")


def environment(answer: Answer) -> float:
    """Fail: of a task of an environment, what the environment scores is the outcome."""
    raise ValueError("the environment has ended without a score, and nothing else can judge it")


def exact(answer: Answer) -> float:
    """Return 1 where the answer is the reference, white space at either end aside; else 0."""
    return float(answer.text.strip() == answer.reference.strip())


def none(answer: Answer) -> float:
    """Return 0: the answer is not judged, as what is learnt needs no reward."""
    return 0.0


def numeric(answer: Answer) -> float:
    """Whether the last number in the answer equals the last one in the reference, exactly.

    ``1,234`` is 1234, ``.5`` and ``50%`` are 0.5: docs/language-data.md has a table. An answer
    without a number is wrong, also one whose number cannot be read for certain, or may have been
    cut off at max_tokens. A reference without one is rejected, for no answer could be right.
    """
    wanted = last_number(answer.reference)
    if wanted is None:
        raise Reject(f"the reference {answer.reference[:80]!r} holds no number, or an unclear one")
    found = last_number(answer.text)
    if found is None or (answer.finish == "length" and not found.end):
        return 0.0
    return float(found.agrees(wanted))
