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
    **fields: Any,
) -> Request:
    """A request for one sample of a prompt of these tokens; ``fields`` are its own, or those of its
    sampling."""
    drawn = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
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
        sampling=Sampling(max_tokens=max_tokens, **drawn),
        seed=index if seed is None else seed,
        **given,
    )
