"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from rlinf_async.config import MissingExtra
from rlinf_async.data.errors import DataError

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: Any
    pad_token_id: Any

    def __call__(self, text: Any, /, **options: Any) -> Any: ...

    def __len__(self) -> int: ...

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder on disk; nothing is downloaded, and no code of the folder runs.

    Raises:
        DataError: no such folder, no tokenizer in it, or one that cannot be read.
        MissingExtra: transformers is not installed.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(
            f"there is no tokenizer folder {str(folder)!r}: it is read from disk, not downloaded"
        )
    if not any((path / name).is_file() for name in FILES):
        raise DataError(
            f"{path} holds no tokenizer: none of {', '.join(FILES)} is there; copy "
            "tokenizer.json and tokenizer_config.json of the model into it"
        )
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        missing = error.name or "transformers"
        raise MissingExtra(missing, extra="llm", needed_for=f"tokenizer {path}") from error
    try:
        tokenizer: Tokenizer = library.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise errors of many types
        raise DataError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    return tokenizer


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of a response: special tokens left out, spaces as they are."""
    text: str = tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
