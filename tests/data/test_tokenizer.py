"""A tokenizer of single characters that any library can load; folders that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_async.data import DataError, Tokenizer, load_tokenizer
from rlinf_async.data.prompts import decode, save_arithmetic_tokenizer

TEXT = "12 + (3*4) =\n24, or  <two> Dozen"


def test_every_character_is_a_token_and_comes_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT)
    assert decode(tokenizer, ids) == TEXT
    assert len(tokenizer) == 102
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_special_tokens_are_one_token_each_and_left_out_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer("<user>1<assistant>2<eos>")["input_ids"]
    assert len(ids) == 5
    assert decode(tokenizer, ids) == "12"


def test_the_template_marks_who_speaks_and_ends_what_the_model_said(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>1<assistant>2<eos>"


def test_it_loads_from_its_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_arithmetic_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vllm_loads_it_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("vllm.tokenizers")
    save_arithmetic_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    loaded = tokenizers.get_tokenizer(str(tmp_path))
    assert loaded.encode(TEXT) == tokenizer(TEXT)["input_ids"]
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_a_folder_without_a_tokenizer_says_what_to_copy(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match=r"holds no tokenizer: none of tokenizer\.json, .* copy "):
        load_tokenizer(tmp_path)


def test_a_folder_that_is_not_there_is_not_downloaded() -> None:
    with pytest.raises(DataError, match=r"no tokenizer folder 'Qwen/Qwen3-0\.6B'"):
        load_tokenizer("Qwen/Qwen3-0.6B")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    save_arithmetic_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)
