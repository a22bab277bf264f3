"""Where a response ends before its engine would have ended it: stop texts and stop tokens.

::

    tokens   <answer>  42  </  answer  >\\n  and  so          stop = ["</answer>"]
    trained  <answer>  42  </  answer  >\\n                   up to the token that completes it
    text     <answer>  42                                    what stands before it (`include_stop`:
             <answer>  42  </  answer  >                     and it, but not what the token goes on
                                                             with)

Invariant: an engine may draw more, never less. Whoever takes a response from an engine cuts it with
`ended`, so that it ends at the same token whatever engine has drawn it; `StopTexts` tells an engine
when it can stop drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from rlinf_async.messages.language import Generated, Kept, Sampling, Tokens

Decode = Callable[[Tokens], str]

SPECIAL: Final = 16
"""tokens without text that may stand between those of a stop text"""


def ended(drawn: Generated, sampling: Sampling, decode: Decode) -> Generated:
    """Return a response up to its first stop token or stop text, which it has."""
    if sampling.stop_token_ids:
        places = np.flatnonzero(np.isin(drawn.token_ids, sampling.stop_token_ids))
        if len(places):
            drawn = _first_tokens(drawn, int(places[0]) + 1)
    return cut_at(drawn, sampling.stop, decode)[0]


def written(drawn: Generated, sampling: Sampling, decode: Decode) -> str:
    """Return the text of a response that `ended`."""
    text = decode(drawn.token_ids)
    found = _first(text, sampling.stop)
    if found:
        return text[: text.find(found) + len(found) * sampling.include_stop]
    if sampling.include_stop:
        return text
    whole = drawn.token_ids
    rest = without_stop_token(whole, sampling)
    return text if len(rest) == len(whole) else decode(rest)


def without_stop_token(tokens: Tokens, sampling: Sampling) -> Tokens:
    """Return the tokens without a stop token at their end."""
    stops = len(tokens) > 0 and int(tokens[-1]) in sampling.stop_token_ids
    return tokens[:-1] if stops else tokens


def cut_at(drawn: Generated, stop: Sequence[str], decode: Decode) -> tuple[Generated, str]:
    """Return a response up to the token that completes the first stop text, and which it is.

    Nothing is cut where there is none; the second value is empty then.
    """
    found = _first(decode(drawn.token_ids), stop) if stop else ""
    if not found:
        return drawn, ""
    fewest, most = 1, len(drawn.token_ids)  # bisection: once it is there, it stays there
    while fewest < most:
        middle = (fewest + most) // 2
        if found in decode(drawn.token_ids[:middle]):
            most = middle
        else:
            fewest = middle + 1
    return _first_tokens(drawn, most), found


def _first(text: str, stop: Sequence[str]) -> str:
    """Return the stop text that is complete first; empty: none is."""
    ends = [(text.find(one) + len(one), one) for one in stop if one in text]
    return min(ends)[1] if ends else ""


def _first_tokens(drawn: Generated, count: int) -> Generated:
    kept = drawn.kept
    if kept is not None:
        kept = Kept(kept.counts[:count], kept.token_ids[: int(kept.counts[:count].sum())])
    routes = drawn.routes
    if routes is not None:
        routes = routes[: len(routes) - (len(drawn.token_ids) - count)]
    return msgspec.structs.replace(
        drawn,
        token_ids=drawn.token_ids[:count],
        log_prob=drawn.log_prob[:count],
        version=drawn.version[:count],
        kept=kept,
        routes=routes,
        finish="stop",
    )


class StopTexts:
    """Whether the newest token of a response has completed a stop text, for an engine's loop.

    Most tokens cannot complete one, by their own text; of the others the last few tokens are
    decoded, and only where these have a stop text, all of the response.

    Args:
        stop: stop texts, at least one.
        decode: tokens -> text.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._last = {one[-1] for one in stop}
        # A character has at most four bytes, and a token at least one.
        self._window = 4 * max(len(one) for one in stop) + SPECIAL
        self._may_end: dict[int, bool] = {}

    def ended(self, tokens: Sequence[int], begin: int = 0) -> bool:
        """Return whether the response, ``tokens`` from ``begin`` on, has a stop text."""
        newest = tokens[-1]
        may_end = self._may_end.get(newest)
        if may_end is None:
            may_end = self._may_end[newest] = self._can_end(self._text([newest]))
        if not may_end:
            return False
        window = self._text(tokens[max(begin, len(tokens) - self._window) :])
        if not any(one in window for one in self._stop):
            return False
        text = self._text(tokens[begin:])
        return any(one in text for one in self._stop)

    def _can_end(self, alone: str) -> bool:
        """Whether a token whose own text is this may complete a stop text: its last character is in
        it, or its text depends on those before it (parts of characters, spaces)."""
        if "\ufffd" in alone or not alone.strip():
            return True
        return any(one in alone or one.isspace() for one in self._last)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(np.array(tokens, np.int32))
