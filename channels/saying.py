"""Errors as text that can be sent and kept, whatever they are."""

from __future__ import annotations

from typing import Final

LIMIT: Final = 4_000
"""characters; the rest of a longer text says how much is missing"""


def say(error: BaseException | str) -> str:
    """An error's type and text: never too long, always valid UTF-8, whatever its ``__str__``."""
    return fit(error if isinstance(error, str) else f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """``str(error)``, or what kept it from being had."""
    try:
        return str(error)
    except Exception as broken:
        return f"<its text cannot be had: {type(broken).__name__}>"


def fit(text: str, limit: int = LIMIT) -> str:
    """The text, cut to ``limit`` characters, with what is no valid UTF-8 escaped."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def fit_bytes(text: str, limit: int) -> str:
    """The text within ``limit`` bytes of UTF-8: of a longer one, its beginning and its end."""
    said = text.encode("utf-8", "backslashreplace")
    if len(said) > limit:
        gap = f" ... ({len(said)} bytes in all) ... ".encode()
        half = (limit - len(gap)) // 2
        said = said[:half] + gap + said[-half:]
    return said.decode("utf-8", "ignore")  # a character may have been cut through
