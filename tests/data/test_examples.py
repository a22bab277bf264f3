"""Records become examples: what is given, what is learnt, and in which step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.data import DataError
from rlinf_async.data.examples import AnswersConfig, Examples, PairsConfig
from rlinf_async.data.prompts import arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}"
    "{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""leaves earlier answers out"""


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [
    said("user", "1+1="),
    said("assistant", "2"),
    said("user", "2+2="),
    said("assistant", "4"),
]


def written(folder: Path, *records: dict[str, Any]) -> str:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(file)


def read(path: str, **fields: Any) -> Examples:
    return Examples(AnswersConfig(path=path, **fields), TOKENIZER)


def texts(examples: Examples, record: int = 0, index: int = 0) -> tuple[str, str]:
    """The whole of an example, and what of it is learnt."""
    one = examples[record][index]
    learnt = one.response_ids[one.mask]
    whole = [*one.prompt_ids, *one.response_ids]
    return TOKENIZER.decode(whole), TOKENIZER.decode(learnt)


@pytest.mark.parametrize("completion", ["2", [said("assistant", "2")]])
@pytest.mark.parametrize("prompt", ["1+1=", [said("user", "1+1=")]])
def test_an_answer_is_what_the_template_adds_to_its_prompt(
    tmp_path: Path, prompt: object, completion: object
) -> None:
    path = written(tmp_path, {"prompt": prompt, "completion": completion})
    assert texts(read(path)) == ("<user>1+1=<assistant>2<eos>", "2<eos>")
    whole, learnt = texts(read(path, system_prompt="add"))
    assert (whole, learnt) == ("<system>add<user>1+1=<assistant>2<eos>", "2<eos>")


def test_text_without_a_template_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    path = written(tmp_path, {"q": "1+1=", "a": "2"})
    found = read(path, chat=False, prompt_column="q", completion_column="a")
    assert texts(found) == ("1+1=2<eos>", "2<eos>")


@pytest.mark.parametrize("template", ["", MARKED])
def test_each_turn_of_the_assistant_is_learnt_and_nothing_else(
    tmp_path: Path, template: str
) -> None:
    (tmp_path / "marked.jinja").write_text(template)
    file = str(tmp_path / "marked.jinja") if template else ""
    path = written(tmp_path, {"messages": TURNS})
    found = read(path, messages_column="messages", chat_template=file)
    whole, learnt = texts(found)
    assert whole == "<user>1+1=<assistant>2<eos><user>2+2=<assistant>4<eos>"
    assert learnt == "2<eos>4<eos>"
    [one] = found[0]
    assert TOKENIZER.decode(one.prompt_ids) == "<user>1+1=<assistant>"


def test_a_template_that_leaves_earlier_turns_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    path = written(tmp_path, {"messages": TURNS})
    with pytest.raises(DataError, match=r"data.jsonl:1: the chat template writes what came before"):
        read(path, messages_column="messages", chat_template=str(tmp_path / "forgetful.jinja"))


def test_a_pair_has_one_prompt_and_two_answers(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "11"})
    found = Examples(PairsConfig(path=path), TOKENIZER)
    assert texts(found, index=0) == ("<user>1+1=<assistant>2<eos>", "2<eos>")
    assert texts(found, index=1) == ("<user>1+1=<assistant>11<eos>", "11<eos>")


@pytest.mark.parametrize(
    ("record", "fields", "problem"),
    [
        ({"prompt": "1"}, {}, "column 'completion' is missing"),
        ({"prompt": "1", "completion": 2}, {}, "completion must be text or a list of messages"),
        ({"prompt": "1", "completion": [said("user", "2")]}, {}, "begins with a message of 'user'"),
        ({"prompt": "1", "completion": ["2"]}, {"chat": False}, "messages need a chat template"),
        ({"messages": "1"}, {"messages_column": "messages"}, "messages is text"),
        ({"messages": [said("user", "1")]}, {"messages_column": "messages"}, "nothing to learn"),
        ({"prompt": "1" * 50, "completion": "2"}, {"max_tokens": 20}, r":1 \(54 tokens\)"),
        ({"prompt": "1", "completion": "2"}, {"held_out": 1}, "none is left to learn from"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    tmp_path: Path, record: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read(written(tmp_path, record), **fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages_column": "messages", "chat": False}, "conversations need a chat template"),
        ({"messages_column": "messages", "prompt_column": "q"}, "leave prompt_column and"),
        ({"chat": False, "system_prompt": "x"}, "have no use"),
        ({"chat_options": {"tokenize": True}}, "which the job sets itself"),
        ({"max_tokens": 1}, "max_tokens is 1"),
    ],
)
def test_settings_without_an_effect_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AnswersConfig(path="x.jsonl", **fields)


def test_every_record_is_learnt_once_an_epoch_whatever_the_batch(tmp_path: Path) -> None:
    records = [{"prompt": f"{at}+0=", "completion": str(at)} for at in range(20)]
    records.append({"prompt": "1" * 60, "completion": "1"})
    path = written(tmp_path, *records)
    found = read(path, held_out=4, max_tokens=40, too_long="skip", seed=5)
    assert (len(found) + len(found.held_out), found.too_long) == (20, 1)
    size = 3
    steps = found.steps(2, size)
    assert steps == -(-2 * len(found) // size)
    learnt = [one for step in range(steps) for one in found.batch(step, size)]
    first, second = learnt[: len(found)], learnt[len(found) : 2 * len(found)]
    assert sorted(first) == sorted(second) == sorted(set(range(20)) - set(found.held_out))
    assert first != second
    assert sorted(found.learnt_in(2, size)) == sorted(learnt[: 2 * size])
    assert sorted(found.learnt_in(steps, size)) == sorted(first)
    again = read(path, held_out=4, max_tokens=40, too_long="skip", seed=5)
    assert again.batch(3, size) == found.batch(3, size)
