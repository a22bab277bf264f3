"""Responses of the toy engine: formulas of the request's seed, the position and the version.

So a response is the same wherever, and in however many pieces, it was made; only the versions of
its tokens, and with them their log-probs, depend on the weights.
"""

from __future__ import annotations

import math

import numpy as np

from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Kept, Request, Tokens, Versions

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


def kept_tokens(config: ToyEngineConfig, request: Request, tokens: Tokens) -> Kept | None:
    """Return what a request that truncates keeps: each token and those after it, modulo the
    vocabulary, of which top-p keeps that share; of the tokens of a partial response what that says.
    None for a request that does not truncate, and where a partial response does not say."""
    sampling, size, partial = request.sampling, config.vocabulary, request.partial
    if not sampling.truncates:
        return None
    most = min(sampling.top_k or size, math.ceil(sampling.top_p * size)) % size
    begun = 0 if partial is None else len(partial.token_ids)
    drawn = tokens[begun:, None].astype(np.int64)
    kept = Kept.of(list(np.sort((drawn + np.arange(most)) % size)))
    if partial is None:
        return kept
    return None if partial.kept is None else partial.kept.followed_by(kept)


def token_log_probs(tokens: Tokens, version: Versions, kept: Kept | None = None) -> Floats:
    """Return the log-prob ``[R]`` of each token under the weights that made it; 0 of one that was
    kept alone."""
    found = -(1.0 + (tokens.astype(np.int64) + version) % 5) / 4.0
    if kept is not None:
        found[kept.counts == 1] = 0.0
    return found.astype(np.float32)


def text(tokens: Tokens) -> str:
    """Return a letter for each token, none for the end token."""
    return "".join(chr(ord("a") + int(token) % 26) for token in tokens if token != END)
