"""Columns and chat templates, and what is said of records that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.data import DataConfig, DataError, Prompts, Tokenizer, load_tokenizer
from rlinf_async.messages.language import Prompt
from tests.data.conftest import Write

ROLE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def first(path: str, tokenizer: Tokenizer, **fields: Any) -> Prompt:
    chosen: dict[str, Any] = {"path": path, "verifier": "exact", "shuffle": False} | fields
    return next(Prompts(DataConfig(**chosen), tokenizer))


def test_a_list_of_messages_goes_through_the_template(write: Write, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    path = write({"prompt": messages, "answer": "4"})
    prompt = first(path, tokenizer)
    assert prompt.text == "<user>1+1=<assistant>2<eos><user>2+2=<assistant>"
    assert tokenizer.eos_token_id in prompt.token_ids
    with_system = first(path, tokenizer, system_prompt="be brief")
    assert with_system.text == f"<system>be brief{prompt.text}"


def test_a_records_own_system_message_stays(write: Write, tokenizer: Tokenizer) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "1"}]
    path = write({"prompt": own, "answer": "1"})
    assert first(path, tokenizer, system_prompt="yours").text == "<system>mine<user>1<assistant>"


def test_another_template_can_be_given(write: Write, tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(ROLE)
    path = write({"prompt": "1+1=", "answer": "2"})
    assert first(path, tokenizer, chat_template=str(template)).text == "[user]1+1="


def test_the_template_is_given_its_options(
    write: Write, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}")
    path = write({"prompt": "1+1=", "answer": "2"})
    chosen: dict[str, Any] = {"chat_template": str(template)}
    assert first(path, tokenizer, **chosen).text == "1+1="
    thinking = first(path, tokenizer, chat_options={"enable_thinking": True}, **chosen)
    assert thinking.text == "1+1=<think>"


def test_without_chat_the_text_is_the_prompt(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"prompt": "1+1=", "answer": "2"})
    assert first(path, tokenizer, chat=False).text == "1+1="
    assert len(first(path, tokenizer, chat=False).token_ids) == 4


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("x", "x"), (42, "42"), (0.5, "0.5"), (["a", 1], '["a",1]'), ({"k": [1]}, '{"k":[1]}')],
)
def test_a_reference_that_is_no_text_is_handed_on_as_json(
    write: Write, tokenizer: Tokenizer, answer: Any, reference: str
) -> None:
    assert first(write({"prompt": "1", "answer": answer}), tokenizer).reference == reference


def test_columns_are_chosen_by_name_also_inside_others(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"q": "1", "reward_model": {"ground_truth": "7", "style": "numeric"}, "a.b": "8"})
    columns = {"prompt_column": "q", "verifier": "", "verifier_column": "reward_model.style"}
    prompt = first(path, tokenizer, reference_column="reward_model.ground_truth", **columns)
    assert (prompt.text, prompt.reference, prompt.verifier) == (
        "<user>1<assistant>",
        "7",
        "numeric",
    )
    assert first(path, tokenizer, reference_column="a.b", **columns).reference == "8"


def test_the_verifiers_that_records_name_are_known_before_the_first_prompt(
    write: Write, tokenizer: Tokenizer
) -> None:
    path = write(*({"prompt": "1", "answer": "1", "by": by} for by in ("math", "exact", "math")))
    prompts = Prompts(DataConfig(path=path, verifier_column="by"), tokenizer)
    assert prompts.verifiers == ("exact", "math")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"answer": "2"}, "column 'prompt' is missing (columns here: answer)"),
        ({"prompt": None, "answer": "2"}, "column 'prompt' is null"),
        ({"prompt": "1"}, "column 'answer' is missing (columns here: prompt)"),
        ({"prompt": 5, "answer": "2"}, "prompt must be text or a list of messages, not 5"),
        ({"prompt": [], "answer": "2"}, "prompt must be text or a list of messages, not []"),
        (
            {"prompt": ["hi"], "answer": "2"},
            "a message must have the texts role and content, not 'hi'",
        ),
        (
            {"prompt": [{"role": "user", "content": 3}], "answer": "2"},
            "a message must have the texts role and content, not {'role': 'user', 'content': 3}",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named_by_its_line(
    write: Write, tokenizer: Tokenizer, record: dict[str, Any], said: str
) -> None:
    path = write({"prompt": "1+1=", "answer": "2"}, record)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {said}")):
        first(path, tokenizer)


def test_an_empty_prompt_is_named(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"prompt": "", "answer": "2"})
    with pytest.raises(DataError, match=r"data\.jsonl:1: the prompt is empty"):
        first(path, tokenizer, chat=False)


def test_messages_without_a_template_are_refused(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"prompt": [{"role": "user", "content": "1"}], "answer": "1"})
    with pytest.raises(DataError, match="messages need a chat template: set chat to true"):
        first(path, tokenizer, chat=False)


def test_a_role_that_the_template_refuses_is_named_with_its_line(
    write: Write, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no system role') }}")
    path = write({"prompt": "1", "answer": "1"})
    with pytest.raises(DataError, match=r"data\.jsonl:1: the chat template refuses it: no system"):
        first(path, tokenizer, chat_template=str(template))


def test_a_template_file_that_is_not_there_is_named(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"prompt": "1", "answer": "1"})
    with pytest.raises(DataError, match=r"chat_template 'none\.jinja': .*No such file"):
        first(path, tokenizer, chat_template="none.jinja")


def test_a_tokenizer_without_a_template_says_what_to_do(
    write: Write, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(str(folder))  # type: ignore[attr-defined]
    (folder / "chat_template.jinja").unlink()
    plain = load_tokenizer(folder)
    path = write({"prompt": "1", "answer": "1"})
    with pytest.raises(DataError, match="the tokenizer has no chat template: name a Jinja file"):
        first(path, plain)
    assert first(path, plain, chat=False).text == "1"
