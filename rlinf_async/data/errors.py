"""Errors about data.

::

    UsageError
    +-- DataError            a file, a record, a template or a tokenizer: names the place
        +-- DataChanged      a position was saved over other data
        +-- PromptTooLong    prompts have more tokens than they may
"""

from __future__ import annotations

from rlinf_async.config import UsageError


class DataError(UsageError):
    """The data cannot be used as asked; the text names file and line, or record."""


class DataChanged(DataError):
    """A saved position does not belong to these data."""


class PromptTooLong(DataError):
    """Prompts are longer than ``max_prompt_tokens``; the text names the first ones."""
