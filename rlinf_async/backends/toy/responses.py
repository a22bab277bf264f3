"""Responses of the toy engine: formulas of the request's seed, the position and the version.

So a response is the same wherever, and in however many pieces, it was made; only the versions of
its tokens, and with them their log-probs, depend on the weights.
"""

from __future__ import annotations

import math

import numpy as np

from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Request, Tokens, Versions

END = 0
"""the token that ends a response"""


def response_length(config: ToyEngineConfig, seed: int) -> int:
    """Return how many tokens the response of this seed has, its end token included.

    Log-normal with mean ``mean_tokens``: ``exp(tail * z - tail ** 2 / 2)`` times it.
    """
    z = np.random.default_rng(seed).standard_normal()
    factor = math.exp(config.tail * z - config.tail**2 / 2)
    return max(1, round(config.mean_tokens * factor))


def response_tokens(config: ToyEngineConfig, request: Request, count: int) -> Tokens:
    """Return the first ``count`` tokens ``[count]`` of a request's response."""
    where = np.arange(count, dtype=np.int64)
    tokens = 1 + (request.seed * 31 + where * 7) % (config.vocabulary - 1)
    if count == response_length(config, request.seed):
        tokens[-1] = END
    return tokens.astype(np.int32)


def token_log_probs(tokens: Tokens, version: Versions) -> Floats:
    """Return the log-prob ``[R]`` of each token under the weights that made it."""
    return (-(1.0 + (tokens.astype(np.int64) + version) % 5) / 4.0).astype(np.float32)


def text(tokens: Tokens) -> str:
    """Return a letter for each token, none for the end token."""
    return "".join(chr(ord("a") + int(token) % 26) for token in tokens if token != END)
