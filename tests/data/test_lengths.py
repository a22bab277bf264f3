"""Every prompt that is too long is named before the first one, whatever the template adds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_async.data import DataConfig, Prompts, PromptsTooLong, Tokenizer

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "default system message": (
        "{% if messages[0].role != 'system' %}You are a helpful assistant.{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "around each": "{% for m in messages %}<<{{ m.role }}>>{{ m.content }}<</>>{% endfor %}",
    "the last twice": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"
    ),
    "more for some contents": (
        "{% for m in messages %}{{ m.content }}{% if '7' in m.content %}Think long and hard about "
        "it.{% endif %}{% endfor %}"
    ),
    "beyond ASCII": "{% for m in messages %}\ufdfa{{ m.content }}\u00bd{% endfor %}",
    "as JSON": "{{ messages | tojson }}",
}

message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user"]),
        "content": st.text("127+\u00bd\ufdfa ", min_size=1, max_size=12),
    }
)


@pytest.fixture(scope="module")
def widening(tokenizer: Tokenizer) -> Any:
    """A tokenizer whose normaliser makes several characters of one."""
    from tokenizers import normalizers

    from rlinf_async.data.prompts import arithmetic_tokenizer

    made = arithmetic_tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    return made


ONE_FOLDER = [HealthCheck.function_scoped_fixture]


@settings(max_examples=25, deadline=None, suppress_health_check=ONE_FOLDER)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
@given(records=st.lists(st.lists(message, min_size=1, max_size=3), min_size=1, max_size=6),
       limit=st.integers(1, 90), wide=st.booleans())  # fmt: skip
def test_those_that_are_too_long_are_exactly_those_that_are_named(
    tmp_path: Path, tokenizer: Any, widening: Any, template: str,
    records: list[list[dict[str, str]]], limit: int, wide: bool,
) -> None:  # fmt: skip
    chosen = widening if wide else tokenizer
    file, jinja = tmp_path / "a.jsonl", tmp_path / "t.jinja"
    jinja.write_text(TEMPLATES[template], encoding="utf-8")
    rows = [{"prompt": messages, "answer": "1"} for messages in records]
    file.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    lengths = [
        len(chosen.apply_chat_template(
            one, chat_template=TEMPLATES[template], add_generation_prompt=True, return_dict=False))
        for one in records
    ]  # fmt: skip
    config = DataConfig(
        path=str(file), verifier="exact", chat_template=str(jinja), max_prompt_tokens=limit,
        shuffle=False,
    )  # fmt: skip
    long = [f"{file}:{at} ({size} tokens)" for at, size in enumerate(lengths, 1) if size > limit]
    if not long:
        assert len(Prompts(config, chosen)) == len(records)
        return
    with pytest.raises(PromptsTooLong, match=re.escape(", ".join(long[:3]))) as raised:
        Prompts(config, chosen)
    assert str(raised.value).startswith(f"{len(long)} prompt")
    skipping = Prompts(msgspec.structs.replace(config, too_long="skip"), chosen)
    assert skipping.usable == len(records) - len(long)


def test_the_first_record_says_nothing_of_the_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Qwen's templates add a system message unless the record brings its own."""
    file, jinja = tmp_path / "a.jsonl", tmp_path / "t.jinja"
    jinja.write_text(TEMPLATES["default system message"])
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}]
    rows = [{"prompt": own, "answer": "1"}, {"prompt": "1", "answer": "1"}]
    file.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    config = DataConfig(path=str(file), verifier="exact", chat_template=str(jinja),
                        max_prompt_tokens=20)  # fmt: skip
    with pytest.raises(PromptsTooLong, match=r"1 prompt is longer .*a\.jsonl:2 \("):
        Prompts(config, tokenizer)


def test_entries_of_tasks_are_looked_at_before_the_first(tokenizer: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    config = DataConfig(tasks=("chain_sum",), task_size=50, max_prompt_tokens=20)
    with pytest.raises(PromptsTooLong, match="task chain_sum, entry 0"):
        Prompts(config, tokenizer)
