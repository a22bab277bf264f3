"""Formats of responses: what may come next, against the texts themselves; interruptions."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.backends.transformers.folder import ModelFolder, open_folder
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.messages.language import Grammar
from tests.backends.formats import CHOICES, GRAMMARS, answered, check_formats
from tests.backends.requests import request
from tests.jobs.language.checkpoints import save_checkpoint

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}'


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """One token for each character."""
    return open_folder(str(save_checkpoint(tmp_path / "model", "qwen3")))


def test_what_may_come_next_is_what_a_text_of_the_choices_goes_on_with(folder: ModelFolder) -> None:
    formats, words = ResponseFormats(folder), folder.tokenizer
    begun = sorted({one[:size] for one in CHOICES for size in range(len(one) + 1)})
    rows = [
        formats.begin(Grammar(choices=CHOICES), "r", words(text)["input_ids"] if text else [])
        for text in begun
    ]
    found = formats.allowed([*rows, None])
    assert found[-1].all()
    for text, row in zip(begun, found, strict=False):
        expected = {one[len(text)] for one in CHOICES if one.startswith(text) and one != text}
        ids = {words.convert_tokens_to_ids(one) for one in expected}
        if text in CHOICES:
            ids |= folder.stop_token_ids
        assert set(row.nonzero().flatten().tolist()) == ids, text


@pytest.mark.parametrize("kind", GRAMMARS)
async def test_every_response_that_ends_has_its_format_and_tells_what_it_was_drawn_from(
    folder: ModelFolder, kind: str
) -> None:
    engine = TransformersEngine(TransformersEngineConfig(model=folder.path, weights="folder"))
    await engine.start()
    try:
        check_formats(folder, kind, *await answered(engine, kind), exact=True)
    finally:
        await engine.close()


def test_json_follows_its_schema(folder: ModelFolder) -> None:
    """The longest way through it, always the first token that is allowed but a space."""
    formats = ResponseFormats(folder)
    row, text = formats.begin(Grammar(json_schema=SCHEMA), "r"), ""
    for _ in range(40):
        [allowed] = formats.allowed([row])
        tokens = allowed.nonzero().flatten().tolist()
        chosen = [one for one in tokens if folder.tokenizer.decode([one]).strip()]
        if folder.stop_token_ids & set(tokens):
            break
        row.accept(chosen[0])
        text += folder.tokenizer.decode(chosen[:1])
    assert json.loads(text)["a"] in (1, 23)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "["}, "it is no regular expression that xgrammar reads: Regex parsing error"),
        ({"json_schema": "{"}, "it is no JSON schema that xgrammar reads: Check failed"),
        ({"ebnf": 'x ::= "1"'}, "it is no grammar in GBNF with a rule 'root': EBNF parser error"),
    ],
)
def test_what_is_no_grammar_is_named(folder: ModelFolder, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ResponseFormats(folder).begin(Grammar(**given), "r")


def test_a_text_that_the_tokens_do_not_have_is_an_error(folder: ModelFolder) -> None:
    formats = ResponseFormats(folder)
    row = formats.begin(Grammar(choices=("1\N{SNOWMAN}",)), "group 3", [])
    assert formats.allowed([row]).sum() == 1
    row.accept(int(torch.nonzero(formats.allowed([row])[0])[0]))
    with pytest.raises(ModelOutputError, match=r"request group 3: the format of .* no token"):
        formats.allowed([row])
    with pytest.raises(ModelOutputError, match="was the response begun without it"):
        formats.begin(Grammar(choices=("1",)), "r", folder.tokenizer("2")["input_ids"])


def test_a_response_has_one_format() -> None:
    assert not Grammar()
    assert Grammar(choices=("a",)).kind == "choices"
    with pytest.raises(ValueError, match="one format, and regex and ebnf are given"):
        Grammar(regex="a", ebnf='root ::= "a"')
    with pytest.raises(ValueError, match="empty text"):
        Grammar(choices=("a", ""))


@pytest.mark.parametrize(
    "text", ["a\N{GRINNING FACE}", 'say "a\\b"', "tab\tand\nline", "\x7f", "\u00e9"]
)
def test_every_text_can_be_a_choice(folder: ModelFolder, text: str) -> None:
    """Also one beyond the characters of 16 bits; one token has all of it."""
    words = folder.tokenizer
    words.add_tokens([text])
    vocabulary = len(words)
    grown = folder._replace(tokenizer=words)
    grown.config.vocab_size = vocabulary
    row = ResponseFormats(grown).begin(Grammar(choices=(text,)), "r")
    row.accept(words.convert_tokens_to_ids(text))
    assert row.matcher.accept_token(next(iter(folder.stop_token_ids)))


async def test_a_response_that_cannot_go_on_fails_alone(folder: ModelFolder) -> None:
    engine = TransformersEngine(TransformersEngineConfig(model=folder.path, weights="folder"))
    await engine.start()
    try:
        stuck = request(1, grammar=Grammar(choices=("1\N{SNOWMAN}",)), max_tokens=9)
        wrong = request(2, grammar=Grammar(regex="["))
        asked = [stuck, request(3, max_tokens=9), wrong, request(4, grammar=Grammar(regex="1+"))]
        got = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        assert isinstance(got[0], ModelOutputError)
        assert "has no token" in str(got[0])
        assert isinstance(got[2], ValueError)
        alone = await engine.generate(asked[1])
    finally:
        await engine.close()
    assert not isinstance(got[1], BaseException)
    assert not isinstance(got[3], BaseException)
    assert got[1].token_ids.tolist() == alone.token_ids.tolist()
    assert set(folder.decode(got[3].token_ids)) == {"1"}
