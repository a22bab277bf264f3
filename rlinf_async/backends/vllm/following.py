"""Formats of responses (`Grammar`) beside vLLM: what its engine is asked, and what each token was
drawn from, which vLLM does not tell. Imports no vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.messages.language import Grammar, Kept, Request

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


class Following:
    """What each new token of one response could be, worked out once. Threads may share it.

    Args:
        formats: those of the model.
        request: it has a format.
        begun: tokens that the response begins with.

    Raises `ModelOutputError` where these do not go on in the format.
    """

    def __init__(self, formats: ResponseFormats, request: Request, begun: Sequence[int]) -> None:
        sampling = request.sampling
        self._formats = formats
        self._row = formats.begin(sampling.grammar, request.name, begun)
        self._keeps = sampling.truncates and not sampling.cuts  # else vLLM tells, or nobody asks
        self._sets: list[NDArray[np.int32]] = []
        self._count = 0
        self._lock = threading.Lock()

    def kept(self, tokens: Sequence[int]) -> Kept | None:
        """Return what the new tokens up to now were drawn from, all of the format; None where vLLM
        tells what was left of that, or the most likely ones were taken.

        Raises:
            ModelOutputError: one of them does not go on in the format, or nothing could.
        """
        with self._lock:
            for token in tokens[self._count :]:
                self._go_on(token)
            return Kept.of(self._sets[: len(tokens)]) if self._keeps else None

    def _go_on(self, token: int) -> None:
        if self._keeps:
            [allowed] = self._formats.allowed([self._row])
            ids = allowed.numpy().nonzero()[0].astype(np.int32)
            self._sets.append(ids[:0] if len(ids) == len(allowed) else ids)
        try:
            self._row.accept(token)
        except ModelOutputError:
            self._formats.allowed([self._row])  # a response that could not go on was ended
            raise
        self._count += 1
