"""What a scoring process has of the one that started it; a program of the model in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.program_output import prints_the_answer
from rlinf_async.channels.wire.session.tls import FILE_VARIABLE, VARIABLE
from rlinf_async.episodes.sandbox import NoSandbox, check_sandbox
from rlinf_async.messages.language import Scored
from rlinf_async.rewards import Answer
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.workers.reward import RewardConfig


def answer_of(text: str, reference: str = "") -> Answer:
    return Answer(prompt="", text=text, reference=reference)


async def inside(monkeypatch: pytest.MonkeyPatch, *named: str) -> dict[str, float]:
    """What a verifier finds, with secrets in this process's environment."""
    for name in (VARIABLE, FILE_VARIABLE, "SOME_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "hunter2-secret")
    async with ScoringPool(processes=1, time_limit=60.0, environment=named) as pool:
        outcome = await pool.judge("tests.rewards.verifiers:what_is_inherited", answer_of(""))
    assert isinstance(outcome, Scored), outcome
    return outcome.parts


async def test_a_scoring_process_has_no_secret_and_no_variable_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await inside(monkeypatch)
    assert found == {"in os.environ": 0, "in /proc": 0, "PATH": 1, "other files": 0}


async def test_a_scoring_process_has_the_variables_that_the_user_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await inside(monkeypatch, "SOME_API_KEY")
    assert found == {"in os.environ": 1, "in /proc": 1, "PATH": 1, "other files": 0}


@pytest.mark.parametrize("name", [VARIABLE, FILE_VARIABLE])
def test_the_clusters_secret_cannot_be_named(name: str) -> None:
    with pytest.raises(ValueError, match="with the cluster's secret a verifier could be a worker"):
        RewardConfig(environment=(name,))


def can_be_made() -> bool:
    """Whether bubblewrap is installed and may make namespaces here."""
    try:
        check_sandbox()
    except NoSandbox:
        return False
    return Path("/usr/bin/python3").exists()


@pytest.mark.skipif(not can_be_made(), reason="bubblewrap is not installed, or not allowed")
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("print(6 * 7)", 1),
        ("print(41)", 0),
        ("print(42); raise SystemExit(1)", 0),
        ("import os; print(42 if not set(os.environ) - {'HOME', 'LANG', 'PATH', 'PWD'} else 0)", 1),
        ("import os; print(42 if not os.path.exists('/etc/passwd') else 0)", 1),
        ("import os; print(42 if sum(p.isdigit() for p in os.listdir('/proc')) < 4 else 0)", 1),
        ("import socket; socket.create_connection(('127.0.0.1', 1), 1); print(42)", 0),
        ("open('/usr/x', 'w'); print(42)", 0),
        ("", 0),
    ],
)
def test_a_program_of_the_model_has_nothing_but_python(program: str, reward: int) -> None:
    text = f"Here it is:\n```python\n{program}\n```\n"
    assert prints_the_answer(answer_of(text, "42")) == reward
