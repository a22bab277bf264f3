"""What a chat template puts between turns: exactly what a rendering of the whole has there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.episodes.conversation import Conversation
from rlinf_async.episodes.template import ChatTemplate, Rewrites, TemplateError
from rlinf_async.messages.language import Generated
from tests.episodes.kit import FAMILIES, tokenizer_of

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def drawn(ids: list[int], version: int = 0) -> Generated:
    """An answer of these tokens."""
    return Generated(
        token_ids=np.array(ids, np.int32),
        log_prob=np.linspace(-1, -2, len(ids), dtype=np.float32),
        version=np.full(len(ids), version, np.int32),
        finish="stop",
    )


def encoded(family: str, text: str) -> list[int]:
    tokenizer: Any = tokenizer_of(family)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


answers = st.text("answer is 12+= truefalse\n", min_size=1, max_size=20).filter(str.strip)
said = st.one_of(
    st.builds(lambda text: [{"role": "tool", "content": text}], answers),
    st.builds(lambda a, b: [{"role": "tool", "content": a}, {"role": "tool", "content": b}],
              answers, answers),
    st.builds(lambda text: [{"role": "user", "content": text}], answers),
)  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(deadline=None, max_examples=60)
@given(turns=st.lists(st.tuples(answers, said, st.booleans()), min_size=1, max_size=4),
       tools=st.booleans())  # fmt: skip
def test_a_conversation_reads_as_the_template_renders_it(
    family: str, turns: list[tuple[str, list[dict[str, str]], bool]], tools: bool
) -> None:
    tokenizer: Any = tokenizer_of(family)
    template, end = ChatTemplate(tokenizer), FAMILIES[family].end
    schemas = [ADD] if tools else []
    messages: list[dict[str, str]] = [{"role": "user", "content": "question"}]
    conversation = Conversation(template.opening(messages, schemas))
    for answer, following, ended in turns:
        answer = answer.strip()  # templates of some families strip it
        generated = drawn(encoded(family, answer + (end if ended else "")))
        conversation.answer(generated)
        conversation.give(template.following(answer, generated.token_ids, following, schemas))
        messages += [{"role": "assistant", "content": answer}, *following]
    whole = tokenizer.apply_chat_template(
        messages, tools=schemas or None, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(conversation.tokens) == whole


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_tokens_that_were_drawn_are_never_encoded_anew(family: str, data: st.DataObject) -> None:
    tokenizer: Any = tokenizer_of(family)
    template = ChatTemplate(tokenizer)
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    conversation = Conversation(template.opening([{"role": "user", "content": "question"}]))
    expected: list[int] = []
    masks: list[bool] = []
    for turn in range(data.draw(st.integers(1, 4))):
        generated = drawn(data.draw(ids), turn)
        conversation.answer(generated)
        given_ids = template.following(
            tokenizer.decode(generated.token_ids), generated.token_ids,
            [{"role": "tool", "content": "42"}],
        )  # fmt: skip
        conversation.give(given_ids)
        expected += generated.token_ids.tolist()
        masks += [True] * len(generated.token_ids)
    response = conversation.response()
    mask = np.ones(len(response.token_ids), np.bool_) if response.drawn is None else response.drawn
    assert response.token_ids[mask].tolist() == expected
    assert int(mask.sum()) == len(masks)
    assert not response.log_prob[~mask].any()
    assert (response.version[~mask] == -1).all()


def test_a_template_that_leaves_thoughts_out_later_says_so() -> None:
    template = ChatTemplate(tokenizer_of("forgetful"))
    answer = "<think>\nwell\n</think>\n\n12"
    ids = np.array(encoded("forgetful", answer), np.int32)
    assert len(template.following(answer, ids, [{"role": "tool", "content": "1"}]))
    with pytest.raises(Rewrites, match="once user messages follow it"):
        template.following(answer, ids, [{"role": "user", "content": "again"}])
    assert len(template.following("12", ids, [{"role": "user", "content": "again"}]))


def test_calls_that_the_template_writes_itself_are_not_given_twice() -> None:
    for family in ("chatml", "llama"):
        one = FAMILIES[family]
        tokenizer: Any = tokenizer_of(family)
        template = ChatTemplate(tokenizer)
        ids = np.array(encoded(family, one.call + one.end), np.int32)
        following = [{"role": "tool", "content": "3"}]
        found = template.following(one.call, ids, following, [ADD], called=True)
        assert tokenizer.decode(found).count("add") == 0
        assert np.array_equal(found, template.following(one.call, ids, following, [ADD]))


def test_a_template_without_tools_is_refused() -> None:
    tokenizer: Any = tokenizer_of("chatml")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(tokenizer, plain)
    with pytest.raises(TemplateError, match="leaves tools out"):
        template.opening([{"role": "user", "content": "question"}], [ADD])


def test_what_a_template_refuses_is_said() -> None:
    tokenizer: Any = tokenizer_of("chatml")
    strict = "{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}"
    with pytest.raises(TemplateError, match="refuses messages of user: no user"):
        ChatTemplate(tokenizer, strict).opening([{"role": "user", "content": "question"}])
