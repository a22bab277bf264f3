"""The formats of responses (`Grammar`) within vLLM's engine, as one of its logits processors.

Its own structured outputs need a tokenizer in the engine, and begin with the response: one that was
interrupted would begin its format anew. The formats are those of the transformers engine, here and
where `VllmEngine` says what each token was drawn from.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rlinf_async.backends.transformers.folder import open_folder
from rlinf_async.backends.transformers.formats import ResponseFormat, ResponseFormats
from rlinf_async.messages.language import Grammar

FORMAT = "rlinf_async_format"
"""name of the argument of a request (``extra_args``) that has its `RequestedFormat`"""


class RequestedFormat(msgspec.Struct, frozen=True):
    """The format of one response."""

    grammar: Grammar
    name: str
    """name of the request"""
    begun: tuple[int, ...]
    """tokens of the response that vLLM takes for the end of the prompt"""

    def as_arguments(self) -> dict[str, Any]:
        """Return ``extra_args`` of a request."""
        return {FORMAT: msgspec.to_builtins(self)}


class _Row:
    """One request in the batch."""

    def __init__(self, follows: ResponseFormat, made: Sequence[int]) -> None:
        self.format = follows
        self._made = made
        """tokens of the response so far, which vLLM adds to"""
        self._accepted = 0

    def advance(self) -> bool:
        """Go on to the newest token; False: the response has ended, and vLLM does not know it
        yet."""
        for token in self._made[self._accepted :]:
            if self.format.matcher.is_terminated():
                break
            self.format.accept(token)
            self._accepted += 1
        return not self.format.matcher.is_terminated()


class FormatProcessor:
    """A ``LogitsProcessor`` of vLLM's first model runner, which calls it."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        folder = open_folder(vllm_config.model_config.model)
        self._formats = ResponseFormats(folder)
        self._ends = torch.zeros(int(folder.config.vocab_size), dtype=torch.bool)
        self._ends[sorted(folder.stop_token_ids)] = True
        self._rows: dict[int, _Row] = {}
        """by their place in the batch"""
        self._update = importlib.import_module(
            "vllm.v1.sample.logits_processor.builtin"
        ).process_dict_updates

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Nothing: `VllmEngine` has made them."""

    def is_argmax_invariant(self) -> bool:
        """Return that it changes greedy answers, too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Take the requests that came, went or moved."""
        self._update(self._rows, batch_update, self._begin)

    def apply(self, logits: Any) -> Any:
        """Leave only what the formats allow of ``logits [rows, vocabulary]``."""
        rows = {at: row.format for at, row in self._rows.items() if row.advance()}
        if rows:
            allowed = self._formats.possible(list(rows.values()))
            # An error would end the engine: a response that cannot go on ends, and `VllmEngine`,
            # which follows its format as well, says why.
            allowed[~allowed.any(-1)] |= self._ends
            left = logits[list(rows)]
            logits[list(rows)] = left.masked_fill(~allowed.to(left.device), -float("inf"))
        return logits

    def _begin(self, params: Any, prompt: Any, made: list[int]) -> _Row | None:
        given = (params.extra_args or {}).get(FORMAT)
        if given is None:
            return None
        wanted = msgspec.convert(given, RequestedFormat)
        return _Row(self._formats.begin(wanted.grammar, wanted.name, wanted.begun), made)


importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor.register(FormatProcessor)
