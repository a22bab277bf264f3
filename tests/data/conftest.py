"""A tokenizer that is built here, and data on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.data import Tokenizer
from rlinf_async.data.prompts import arithmetic_tokenizer

Write = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token for each character."""
    pytest.importorskip("transformers")
    made: Tokenizer = arithmetic_tokenizer()
    return made


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records as JSON lines and returns the path."""

    def lines(*records: Mapping[str, Any], name: str = "data.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return str(file)

    return lines


@pytest.fixture
def sums(write: Write) -> str:
    """Twenty sums."""
    return write(*({"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(20)))
