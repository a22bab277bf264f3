"""Errors as text that can always travel."""

from __future__ import annotations

from typing import Final

MAX_CHARACTERS: Final = 4_000
"""What an error may say of itself; an exception can hold the whole of a bad input."""


def say(error: BaseException | str) -> str:
    """An error's type and text: encodable as UTF-8, of at most 4,000 characters."""
    if isinstance(error, str):
        return encodable(error)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as unsaid:
        text = f"(it cannot be said: its __str__ raised {type(unsaid).__name__})"
    return encodable(f"{name}: {text}" if text else name)


def encodable(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Text that UTF-8 can carry, cut to ``limit`` characters; the end of a long one is kept too."""
    if len(text) > limit:
        gap = f" ... ({len(text):,} characters in all) ... "
        tail = limit // 4
        text = text[: limit - tail - len(gap)] + gap + text[len(text) - tail :]
    return text.encode("utf-8", "backslashreplace").decode()[:limit]
