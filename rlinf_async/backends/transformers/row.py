"""One request inside the decoder: its tokens so far, and the random numbers of the next ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.transformers.sampling import uniforms
from rlinf_async.messages.language import Generated, Kept, Request

Finish = Literal["stop", "length", "abort"]


class Row:
    """A response that grows."""

    __slots__ = (
        "_kept",
        "_log_probs",
        "_prompt",
        "_random",
        "_versions",
        "finish",
        "name",
        "sampling",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        partial = request.partial
        self.name = request.name
        self.sampling = request.sampling
        self.tokens: list[int] = request.prompt.token_ids.tolist()
        """tokens of the prompt and the response"""
        self._prompt = len(self.tokens)
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[NDArray[Any]] = []
        self.finish: Finish | None = None
        if partial is not None:
            self.tokens += partial.token_ids.tolist()
            self._log_probs += partial.log_prob.tolist()
            self._versions += partial.version.tolist()
            if partial.kept is not None:
                self._kept += partial.kept.sets()
            if partial.finish == "stop":
                self.finish = "stop"
            elif len(self._versions) >= self.sampling.max_tokens:
                self.finish = "length"
        self._random: list[float] = uniforms(request.seed, self.sampling.max_tokens).tolist()

    @property
    def random(self) -> float:
        """The random number of the next position."""
        return self._random[len(self._versions)]

    def add(
        self,
        token: int,
        log_prob: float,
        version: int,
        kept: NDArray[Any],
        stops: frozenset[int],
    ) -> bool:
        """Add a token, drawn from the ``kept`` ones (empty: from the whole vocabulary); return
        whether the response is finished."""
        self.tokens.append(token)
        self._log_probs.append(log_prob)
        self._versions.append(version)
        if self.sampling.truncates:
            self._kept.append(kept)
        if token in stops:
            self.finish = "stop"
        elif len(self._versions) == self.sampling.max_tokens:
            self.finish = "length"
        return self.finish is not None

    def generated(self) -> Generated:
        """Return the response so far; its ``finish`` is ``abort`` unless it is finished."""
        told = self.sampling.truncates and len(self._kept) == len(self._versions)
        return Generated(
            token_ids=np.array(self.tokens[self._prompt :], np.int32),
            log_prob=np.array(self._log_probs, np.float32),
            version=np.array(self._versions, np.int32),
            finish=self.finish or "abort",
            kept=Kept.of(self._kept) if told else None,
        )
