"""The formats of responses (`Grammar`), token by token, by xgrammar.

::

    ResponseFormats.begin(grammar, tokens so far) --> ResponseFormat, one for each row
    allowed(formats of all rows)                  --> [rows, vocabulary], before a step
    ResponseFormat.accept(token)                      after it

A text that is complete allows the tokens that end a response, one that may go on others beside
them. What is allowed depends on the tokens of the response alone, so an interrupted response goes
on as if it had not been.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.folder import ModelFolder
from rlinf_async.config.registry import needed
from rlinf_async.messages.language import Grammar

BITS = 32
"""tokens in a word of xgrammar's masks"""


class ResponseFormat:
    """What the next token of one response may be."""

    def __init__(self, matcher: Any, name: str) -> None:
        self.matcher = matcher
        self.name = name
        """name of the request"""

    def accept(self, token: int) -> None:
        """Go on with a token.

        Raises:
            ModelOutputError: the grammar does not allow it here.
        """
        if not self.matcher.accept_token(token):
            raise ModelOutputError(
                f"request {self.name}: token {token} does not go on in the format of "
                "rollout.sampling.grammar: was the response begun without it?"
            )


class ResponseFormats:
    """The grammars of the requests to a model, each compiled once for its tokens."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._vocabulary = int(folder.config.vocab_size)
        self._compiled: dict[Grammar, Any] = {}
        self._library: Any = None

    def begin(self, grammar: Grammar, name: str, response: Sequence[int] = ()) -> ResponseFormat:
        """Return what may follow these tokens of a response.

        Raises:
            ValueError: this is no such grammar.
            MissingExtra: xgrammar is not installed.
            ModelOutputError: the tokens are no beginning of such a text.
        """
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
        found = ResponseFormat(self._library.GrammarMatcher(self._compiled[grammar]), name)
        for token in response:
            found.accept(token)
        return found

    def allowed(self, formats: Sequence[ResponseFormat | None]) -> Tensor:
        """Return the tokens ``[rows, vocabulary]`` that may come next in each row: all of them
        where it has no format.

        Raises:
            ModelOutputError: none may: the model has no token for what has to follow.
        """
        found = self.possible(formats)
        for at in (~found.any(-1)).nonzero().flatten().tolist():
            named = formats[at]
            assert named is not None
            raise self.no_token(named)
        return found

    def possible(self, formats: Sequence[ResponseFormat | None]) -> Tensor:
        """Return the same, where a row may have none."""
        bits = np.unpackbits(self.masks(formats).numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocabulary].astype(np.bool_))

    def masks(self, formats: Sequence[ResponseFormat | None]) -> Tensor:
        """Return the same as bits of int32 ``[rows, words]``, the lowest first."""
        words = -(-self._vocabulary // BITS)
        mask = torch.full((len(formats), words), -1, dtype=torch.int32)
        for at, one in enumerate(formats):
            if one is not None:
                one.matcher.fill_next_token_bitmask(mask, at)
        return mask

    def no_token(self, named: ResponseFormat) -> ModelOutputError:
        """Return the error of a response that cannot go on."""
        return ModelOutputError(
            f"request {named.name}: the format of rollout.sampling.grammar wants something for "
            f"which the tokenizer of {self._folder.path} has no token"
        )

    def _compile(self, grammar: Grammar) -> Any:
        self._library = needed("xgrammar", extra="grammars", needed_for="rollout.sampling.grammar")
        compiler = self._library.GrammarCompiler(
            self._library.TokenizerInfo.from_huggingface(
                self._folder.tokenizer,
                vocab_size=self._vocabulary,
                stop_token_ids=sorted(self._folder.stop_token_ids),
            ),
            max_threads=1,
        )
        try:
            if grammar.regex:
                return compiler.compile_regex(grammar.regex)
            if grammar.json_schema:
                return compiler.compile_json_schema(grammar.json_schema)
            return compiler.compile_grammar(grammar.ebnf or _one_of(grammar.choices))
        except RuntimeError as error:  # what its compiler raises
            said = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip().splitlines()[0])
            raise ValueError(f"it is no {NAMES[grammar.kind]}: {said}") from error


NAMES = {
    "regex": "regular expression that xgrammar reads",
    "json_schema": "JSON schema that xgrammar reads",
    "choices": "list of texts",
    "ebnf": "grammar in GBNF with a rule 'root'",
}


def _one_of(texts: Sequence[str]) -> str:
    """Return the grammar of these texts, in GBNF."""
    # Escapes of surrogates, two for a character beyond the 16 bits, would be no character.
    quoted = (json.dumps(one, ensure_ascii=False) for one in texts)
    return f"root ::= {' | '.join(quoted)}"
