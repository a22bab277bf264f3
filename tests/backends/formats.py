"""Responses that have a format, as every engine that honours `Grammar` draws them."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np

from rlinf_async.backends.language import GenerationEngine
from rlinf_async.backends.transformers.folder import ModelFolder
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Grammar, Kept, Request
from tests.backends.requests import request

CHOICES = ("1", "12", "+7", "305")
GRAMMARS = {
    "regex": (Grammar(regex="[1-3]{2,4}"), r"[1-3]{2,4}"),
    "choices": (Grammar(choices=CHOICES), r"1|12|\+7|305"),
    "ebnf": (Grammar(ebnf='root ::= "-"? [0-9] ("=" [0-9])*'), r"-?[0-9](=[0-9])*"),
}


def asked(kind: str, top_k: int = 0) -> list[Request]:
    """Twelve that are drawn, a greedy one, and one without a format."""
    grammar, _ = GRAMMARS[kind]
    made = [
        request(at, grammar=grammar, max_tokens=9, temperature=2.0, top_k=top_k) for at in range(12)
    ]
    return [*made, request(12, grammar=grammar, max_tokens=9, temperature=0.0), request(13)]


async def answered(
    engine: GenerationEngine, kind: str
) -> tuple[list[Generated], list[Generated], Floats]:
    """The responses to all at once; those that go on from the first tokens of the drawn ones; the
    log-probs of the whole vocabulary for the tokens of the last."""
    wanted = asked(kind)
    got = await asyncio.gather(*map(engine.generate, wanted))
    partials = [
        msgspec.structs.replace(one, partial=_cut(made, 1 if made.finish == "stop" else 2))
        for one, made in zip(wanted[:12], got, strict=False)
    ]
    again = await asyncio.gather(*map(engine.generate, partials))
    [plain] = await engine.log_probs([(wanted[13].prompt.token_ids, got[13].token_ids)])
    return got, again, plain


def check_formats(
    folder: ModelFolder,
    kind: str,
    got: list[Generated],
    again: list[Generated],
    plain: Floats,
    *,
    exact: bool,
) -> None:
    """What `answered` gave is as its format says. ``exact``: the engine draws the same tokens when
    it goes on."""
    _, pattern = GRAMMARS[kind]
    ended = [one for one in [*got[:13], *again] if one.finish == "stop"]
    assert len({tuple(one.token_ids.tolist()) for one in ended}) > 2
    for one in ended:
        text = folder.tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True)
        assert re.fullmatch(pattern, text), text
    for one in [*got[:12], *again]:
        assert one.kept is not None
        for token, kept in zip(one.token_ids.tolist(), one.kept.sets(), strict=True):
            assert token in kept.tolist()
    for one, other in zip(got[:12], again, strict=True):
        assert one.kept is not None
        assert other.kept is not None
        assert other.token_ids[0] == one.token_ids[0]
        if exact:
            assert other.token_ids.tolist() == one.token_ids.tolist()
            for kept, same in zip(one.kept.sets(), other.kept.sets(), strict=True):
                assert kept.tolist() == same.tolist()
    assert got[12].kept is None  # greedy: it is not trained
    np.testing.assert_allclose(got[13].log_prob, plain, atol=1e-5)  # who asks for none has none


def _cut(one: Generated, size: int) -> Generated:
    assert one.kept is not None
    return Generated(
        token_ids=one.token_ids[:size],
        log_prob=one.log_prob[:size],
        version=one.version[:size],
        finish="abort",
        kept=Kept.of(one.kept.sets()[:size]),
    )
