"""Settings that contradict one another, and reading them from a file."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_async.config import Document, to_toml
from rlinf_async.data import DataConfig

FILE = """
tasks = ["chain_sum"]
task_size = 100
held_out = 10

[task_options.chain_sum]
min_terms = 2
max_terms = 3
"""


def test_the_options_of_a_task_are_a_table_of_its_own() -> None:
    read = Document("data.toml", FILE).to(DataConfig)
    assert read.task_options == {"chain_sum": {"min_terms": 2, "max_terms": 3}}
    assert Document("again.toml", to_toml(read)).to(DataConfig) == read


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "which data"),
        ({"path": "a.jsonl", "tasks": ("gcd",), "verifier": "exact"}, "which data"),
        ({"path": "a.jsonl"}, "what scores the answers"),
        ({"path": "a", "verifier": "exact", "verifier_column": "v"}, "give one of them"),
        ({"tasks": ("gcd",), "verifier_column": "v"}, "tasks have no verifier_column"),
        ({"tasks": ("gcd",), "task_options": {"lcm": {}}}, "'lcm', which is not among tasks"),
        ({"tasks": ("gcd",), "max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"tasks": ("gcd",), "held_out": -1}, "held_out is -1"),
        ({"tasks": ("gcd",), "chat_options": {"tokenize": True}}, "'tokenize', which the job sets"),
        ({"tasks": ("gcd",), "chat": False, "system_prompt": "x"}, "leave them out"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig(**fields)
