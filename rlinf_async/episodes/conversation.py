"""A conversation is its tokens: those that the model was given, and those that it drew.

::

    prompt   | answer | given  | answer | given  | answer
    [P]      | <------------------- [R] ------------------->
             | drawn  | tools, | drawn  |        | drawn
             |        | template

Nothing is ever decoded and encoded again: what an engine drew is what is trained, bit for bit.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from rlinf_async.messages.language import Generated, Kept, Routes, Tokens


class Conversation:
    """The tokens of one branch of an episode.

    Args:
        prompt: ``[P]``, tokens that the model reads before its first answer.
    """

    def __init__(self, prompt: Tokens) -> None:
        self.prompt = prompt
        """``[P]``"""
        self._parts: list[Generated] = []
        """answers, and what was given between them, in order"""

    def give(self, token_ids: Tokens) -> None:
        """Append tokens that the model did not draw: results of tools, text of the template."""
        count = len(token_ids)
        self._parts.append(
            Generated(
                token_ids=np.asarray(token_ids, np.int32),
                log_prob=np.zeros(count, np.float32),
                version=np.full(count, -1, np.int32),
                finish="stop",
                drawn=np.zeros(count, np.bool_),
            )
        )

    def answer(self, generated: Generated) -> None:
        """Append what the model drew."""
        self._parts.append(generated)

    @property
    def tokens(self) -> Tokens:
        """``[P + R]``: everything so far; the prompt of the next turn."""
        return np.concatenate([self.prompt, *(part.token_ids for part in self._parts)])

    def __len__(self) -> int:
        """Return the number of tokens, ``P + R``."""
        return len(self.prompt) + sum(len(part.token_ids) for part in self._parts)

    @property
    def drawn(self) -> int:
        """Number of tokens that the model drew."""
        return sum(part.drawn_tokens for part in self._parts)

    def fork(self, tokens: int | None = None) -> Self:
        """Return a branch whose prompt are the first ``tokens`` tokens, by default all: they are
        not trained a second time."""
        return type(self)(self.tokens[:tokens])

    def response(self) -> Generated:
        """Return everything after the prompt, ``[R]``, as one response.

        What is given after the last answer is left out: nothing was drawn from it.
        """
        parts = self._parts[: self._answers_end()]
        if len(parts) == 1:
            return parts[0]
        return msgspec.structs.replace(joined(parts), routes=_routes(parts))

    def spans(self) -> list[tuple[int, int]]:
        """Return where each answer lies in the response: its first position, and that after its
        last."""
        found, at = [], 0
        for part in self._parts:
            end = at + len(part.token_ids)
            if part.drawn is None:
                found.append((at, end))
            at = end
        return found

    def _answers_end(self) -> int:
        """Return the number of parts up to the last answer."""
        for end in range(len(self._parts), 0, -1):
            if self._parts[end - 1].drawn_tokens:
                return end
        return 0


def joined(parts: list[Generated]) -> Generated:
    """Return the tokens of several parts as one response, which ended as the last one did."""
    if not parts:
        nothing = np.zeros(0, np.int32)
        return Generated(
            token_ids=nothing, log_prob=np.zeros(0, np.float32), version=nothing, finish="stop"
        )
    drawn = np.concatenate([part.drawn_mask for part in parts])
    return Generated(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        log_prob=np.concatenate([part.log_prob for part in parts]),
        version=np.concatenate([part.version for part in parts]),
        finish=parts[-1].finish,
        kept=_kept(parts),
        drawn=None if drawn.all() else drawn,
        routes=_one_after_the_other([part.routes for part in parts]),
    )


def _one_after_the_other(parts: list[Routes | None]) -> Routes | None:
    """Return the routes of sequences; None where those of one are not told."""
    told = [one for one in parts if one is not None]
    return np.concatenate(told) if len(told) == len(parts) else None


def _routes(parts: list[Generated]) -> Routes | None:
    """Return the routes of a conversation.

    Each answer tells of all tokens before it, which its engine has read again: those of the first
    reading count, unless newer weights have read them since.
    """
    found: Routes | None = None
    newest = -1
    for part in parts:
        if not part.drawn_tokens:
            continue
        if part.routes is None:
            return None
        version = int(part.version.max())
        if found is None or version > newest:
            found, newest = part.routes, version
        else:
            found = np.concatenate([found, part.routes[len(found) :]])
    return found


def _kept(parts: list[Generated]) -> Kept | None:
    """Return what each token was drawn from; nothing of a token that was given was left out."""
    if all(part.kept is None for part in parts):
        return None
    nothing = np.empty(0, np.uint8)
    found = [part.kept or Kept(np.zeros(len(part.token_ids), np.uint8), nothing) for part in parts]
    return Kept(
        np.concatenate([one.counts for one in found]),
        np.concatenate([one.token_ids for one in found]),
    )
