"""The formats of responses (`Grammar`) within vLLM's engine, as one of its logits processors.

Its own structured outputs need a tokenizer in the engine, and begin with the response: one that was
interrupted would begin its format anew. The formats are those of the transformers engine, here and
where `VllmEngine` says what each token was drawn from.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from rlinf_async.backends.transformers.folder import open_folder
from rlinf_async.backends.transformers.formats import BITS, ResponseFormat, ResponseFormats
from rlinf_async.backends.vllm.following import FORMAT, RequestedFormat


class _Row:
    """One request in the batch."""

    def __init__(self, follows: ResponseFormat, made: Sequence[int]) -> None:
        self.format = follows
        self._made = made
        """tokens of the response so far, which vLLM adds to"""
        self._accepted = 0
        self.over = False
        """it could not go on, and was ended"""

    def advance(self) -> bool:
        """Go on to the newest token; False: the response has ended, and vLLM does not know it
        yet: where steps are scheduled ahead, one more is computed."""
        if self.over:
            return False
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
        self._ends = _bits(folder.stop_token_ids, int(folder.config.vocab_size))
        self._library: Any = importlib.import_module("xgrammar")
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
        going = {at: row for at, row in self._rows.items() if row.advance()}
        if not going:
            return logits
        every = [going[at].format if at in going else None for at in range(len(logits))]
        masks = self._formats.masks(every)
        for at, row in going.items():
            if not masks[at].any():
                # An error would end the engine: a response that cannot go on ends, and
                # `VllmEngine`, which follows its format as well, says why.
                row.over = True
                masks[at] = self._ends
        self._library.apply_token_bitmask_inplace(logits, masks.to(logits.device))
        return logits

    def _begin(self, params: Any, prompt: Any, made: list[int]) -> _Row | None:
        given = (params.extra_args or {}).get(FORMAT)
        if given is None:
            return None
        wanted = msgspec.convert(given, RequestedFormat)
        return _Row(self._formats.begin(wanted.grammar, wanted.name, wanted.begun), made)


def _bits(tokens: Iterable[int], vocabulary: int) -> torch.Tensor:
    """Return these tokens as `ResponseFormats.masks` has them, int32 ``[words]``."""
    every = np.zeros(-(-vocabulary // BITS) * BITS, np.bool_)
    every[sorted(tokens)] = True
    return torch.from_numpy(np.packbits(every, bitorder="little").view(np.int32).copy())


importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor.register(FormatProcessor)
