"""Tasks that are made up from a seed, and scored by their own rules."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import pytest

from rlinf_async.config import ConfigError
from rlinf_async.data import DataConfig, Prompts, Tokenizer
from rlinf_async.messages.language import Outcome, Rejected, Scored
from rlinf_async.rewards import Answer, load_verifier
from rlinf_async.rewards.judging import judge
from rlinf_async.rewards.reasoning import imported, open_task

pytest.importorskip("reasoning_gym")

SHORT = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}


def outcome(reference: str, text: str) -> Outcome:
    answer = Answer(prompt="", text=text, reference=reference)
    return judge("reasoning_gym", load_verifier("reasoning_gym"), answer)


def config(*tasks: str, **fields: Any) -> DataConfig:
    return DataConfig(tasks=tasks, task_size=50, **fields)


def test_a_task_makes_prompts_that_its_own_rules_score(tokenizer: Tokenizer) -> None:
    chosen = config("chain_sum", task_options=SHORT, prompt_column="expression")
    prompts = Prompts(chosen, tokenizer)
    assert prompts.verifiers == ("reasoning_gym",)
    for _ in range(10):
        prompt = next(prompts)
        expression = prompt.text.removeprefix("<user>").removesuffix("<assistant>")
        left, sign, right = expression.split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert outcome(prompt.reference, str(value)) == Scored(reward=1.0)
        assert outcome(prompt.reference, f"so <answer>{value}</answer>!") == Scored(reward=1.0)
        wrong = outcome(prompt.reference, str(value + 1))
        assert isinstance(wrong, Scored)
        assert wrong.reward < 0.1


def test_the_question_is_the_prompt_unless_another_column_is_named(tokenizer: Tokenizer) -> None:
    assert "State the final answer" in next(Prompts(config("chain_sum"), tokenizer)).text


def test_another_verifier_compares_with_the_tasks_answer(tokenizer: Tokenizer) -> None:
    prompt = next(Prompts(config("gcd", verifier="numeric"), tokenizer))
    assert prompt.verifier == "numeric"
    assert prompt.reference.isdecimal()


def test_tasks_come_in_equal_parts(tokenizer: Tokenizer) -> None:
    prompts = Prompts(config("gcd", "lcm", shuffle=False, epochs=1), tokenizer)
    every = [prompt.reference for prompt in prompts]
    assert len(every) == 50
    assert sum('"task":"gcd"' in one for one in every) == 25


def test_another_seed_makes_other_entries_and_the_same_seed_the_same(tokenizer: Tokenizer) -> None:
    def texts(seed: int) -> set[str]:
        return {prompt.text for prompt in Prompts(config("gcd", seed=seed, epochs=1), tokenizer)}

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


@pytest.mark.parametrize("task", ["sudoku", "knights_knaves", "graph_color", "n_queens", "maze"])
def test_entries_that_json_cannot_hold_are_scored_all_the_same(
    task: str, tokenizer: Tokenizer
) -> None:
    chosen = DataConfig(tasks=(task,), task_size=2, max_prompt_tokens=20_000)
    prompt = next(Prompts(chosen, tokenizer))
    entry = open_task(task, {}, 0, 2)[json.loads(prompt.reference)["index"]]
    assert json.loads(json.dumps(entry)) != entry
    if entry["answer"] is not None:
        assert outcome(prompt.reference, entry["answer"]) == Scored(reward=1.0)
    scored = outcome(prompt.reference, "nonsense")
    assert isinstance(scored, Scored)
    assert scored.reward < 0.2


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("42", "the reference is not one of a reasoning-gym task"),
        ("{}", "the reference is not one of a reasoning-gym task"),
        (
            '{"task":"knights_knaves","seed":1,"size":5,"index":0,"question":"another"}',
            "makes another question of seed 1 and index 0",
        ),
    ],
)
def test_a_reference_that_is_not_the_tasks_is_rejected(reference: str, said: str) -> None:
    rejected = outcome(reference, "42")
    assert isinstance(rejected, Rejected)
    assert said in rejected.reason


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tasks": ("chain_sums",)}, r"no task 'chain_sums' \(did you mean 'chain_sum'\?\)"),
        (
            {"tasks": ("chain_sum",), "task_options": {"chain_sum": {"terms": 2}}},
            r"task 'chain_sum' with \{'terms': 2\}: .*unexpected keyword argument 'terms'",
        ),
        (
            {"tasks": ("chain_sum",), "task_options": {"chain_sum": {"min_terms": 20}}},
            "max_terms must be >= min_terms",
        ),
    ],
)
def test_a_wrong_task_is_an_error_that_says_what_is_wrong(
    tokenizer: Tokenizer, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Prompts(DataConfig(**fields), tokenizer)


FINGERPRINT = """
import sys
from rlinf_async.data.records import TaskRecords
print(TaskRecords([sys.argv[1]], {}, 0, 50).fingerprint)
"""


def fingerprint(task: str, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FINGERPRINT, task],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_position_is_refused_where_a_task_makes_other_entries_in_another_process() -> None:
    assert fingerprint("chain_sum", "1") == fingerprint("chain_sum", "2")
    assert fingerprint("isomorphic_strings", "1") != fingerprint("isomorphic_strings", "2")


def test_what_the_compiler_says_of_others_code_is_not_passed_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_others.py").write_text("found = 'x' is 'x'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert imported("of_others").found
    assert said == []
