"""From a record to a prompt: columns, chat template, tokens.

::

    prompt column: text ---------> [system message,] user message ---+
                   messages -----> [system message,] messages -------+--chat template--> text
                   text, chat = false ---------------------------------------------------> text
    text --tokenizer--> token ids     special tokens are the template's, or else the tokenizer's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlinf_async.data.config import DataConfig
from rlinf_async.data.errors import DataError
from rlinf_async.data.records import Record, column
from rlinf_async.data.tasks import REFERENCE_COLUMN
from rlinf_async.data.tokenizer import Tokenizer
from rlinf_async.data.values import as_text
from rlinf_async.messages.language import Prompt

Message = Mapping[str, Any]

_AT_ENDS: Final = 16
"""tokens that a tokenizer may add at both ends of a text"""


class Renderer:
    """Makes prompts from records, with one configuration and tokenizer."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Raises `DataError` if a chat template is needed and there is none."""
        self._config = config
        self._tokenizer = tokenizer
        self._template = _template(config, tokenizer) if config.chat else None
        task = bool(config.tasks)
        self._verifier = config.verifier or ("reasoning_gym" if task else "")
        own = task and self._verifier == "reasoning_gym"
        self._reference = REFERENCE_COLUMN if own else config.reference_column

    def prompt(self, record: Record, index: int, where: str) -> Prompt:
        """The prompt of a record, however long.

        Raises:
            DataError: a column is missing or of the wrong kind, or the template refuses it.
        """
        text = self.text(record, where)
        ids = self._tokenizer(text, add_special_tokens=not self._config.chat, verbose=False)
        token_ids = np.asarray(ids["input_ids"], np.int32)
        if not len(token_ids):
            raise DataError(f"{where}: the prompt is empty")
        return Prompt(
            index=index,
            text=text,
            token_ids=token_ids,
            verifier=self.verifier(record, where),
            reference=self.reference(record, where),
        )

    def verifier(self, record: Record, where: str) -> str:
        """The name of the verifier that scores responses to this record."""
        if self._verifier:
            return self._verifier
        name = column(record, self._config.verifier_column, where)
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: {self._config.verifier_column} is {name!r}, not a name")
        return name

    def reference(self, record: Record, where: str) -> str:
        """The reference as text: `values` has the rule."""
        value = column(record, self._reference, where)
        try:
            return as_text(value)
        except ValueError as error:
            raise DataError(f"{where}: column {self._reference!r}: {error}") from error

    def not_between(self, least: int, most: int, texts: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Position and number of tokens of those texts that have fewer or more than this."""
        # No tokenizer makes more tokens of ASCII than it has characters, but for a few at its ends.
        unclear = [
            at
            for at, text in enumerate(texts)
            if not text.strip() or not text.isascii() or len(text) + _AT_ENDS > most
        ]
        if not unclear:
            return
        ids = self._tokenizer(
            [texts[at] for at in unclear],
            add_special_tokens=not self._config.chat,
            verbose=False,
        )["input_ids"]
        for at, one in zip(unclear, ids, strict=True):
            if not least <= len(one) <= most:
                yield at, len(one)

    def text(self, record: Record, where: str) -> str:
        """The text that the model reads.

        Raises:
            DataError: the column is missing or of the wrong kind, or the template refuses it.
        """
        given = column(record, self._config.prompt_column, where)
        if not self._config.chat:
            if not isinstance(given, str):
                raise DataError(
                    f"{where}: {self._config.prompt_column} is a {type(given).__name__}, and "
                    "messages need a chat template: set chat to true"
                )
            return given
        messages = self._messages(given, where)
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._config.chat_options,
            )
        except Exception as error:  # templates raise errors of any type, as for an unknown role
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return text

    def _messages(self, given: object, where: str) -> list[Message]:
        messages: list[Message] = []
        for one in (
            [{"role": "user", "content": given}]
            if isinstance(given, str)
            else _listed(given, self._config.prompt_column, where)
        ):
            if not (
                isinstance(one, Mapping)
                and isinstance(one.get("role"), str)
                and isinstance(one.get("content"), str)
            ):
                raise DataError(
                    f"{where}: a message must have the texts role and content, not {one!r:.200}"
                )
            messages.append(dict(one))
        if self._config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return messages


def _listed(given: object, name: str, where: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: {name} must be text or a list of messages, not {given!r:.200}")
    return given


def _template(config: DataConfig, tokenizer: Tokenizer) -> str | None:
    """The given template; None: the tokenizer's own."""
    if config.chat_template:
        try:
            return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat_template {config.chat_template!r}: {error}") from error
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template: name a Jinja file in chat_template, or set chat "
            "to false for a model that is no chat model"
        )
    return None
