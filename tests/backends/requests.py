"""Requests for tests of what generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf_async.messages.language import Prompt, Request, Sampling


def request(
    index: int = 0,
    tokens: Sequence[int] = (5, 6, 7),
    *,
    group: int = 0,
    seed: int | None = None,
    max_tokens: int = 16,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    **fields: Any,
) -> Request:
    """A request for one sample of a prompt of these tokens."""
    given: dict[str, Any] = {"iteration": 0, "min_version": 0, "group_size": 1} | fields
    return Request(
        group=group,
        index=index,
        prompt=Prompt(
            index=group,
            text="",
            token_ids=np.array(tokens, np.int32),
            verifier="none",
            reference="",
        ),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p),
        seed=index if seed is None else seed,
        **given,
    )
