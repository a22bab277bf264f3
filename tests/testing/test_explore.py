"""A planted race is found, and the printed command replays it."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_async.testing import SEED_VARIABLE, explore, replay_command
from rlinf_async.testing.pytest_plugin import pytest_report_header

PLANTED = """
import asyncio
from rlinf_async.testing import explore

async def main():
    total = 0

    async def add(amount):
        nonlocal total
        seen = total
        await asyncio.sleep(0)  # another task may run here
        total = seen + amount

    async def add_twice():
        first = asyncio.create_task(add(1))
        if total == 0:  # most orders avoid the race
            await first
        await asyncio.gather(first, add(2))

    await add_twice()
    for step in range(3):
        await asyncio.sleep(0)
    late = asyncio.create_task(add(4))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await add(8)
    await late
    assert total == 15, f"lost update: {total}"

def test_planted():
    explore(main)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the planted test, for a pytest of its own."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    return tmp_path


def pytest_in(folder: Path, command: str) -> str:
    """What the command prints; it must fail."""
    environment = {name: value for name, value in os.environ.items() if name != SEED_VARIABLE}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_planted_lost_update_is_found_and_the_printed_command_replays_it(checkout: Path) -> None:
    found = pytest_in(checkout, "python -m pytest -q -p no:cacheprovider")
    command = re.search(r"replay it with: (.+)", found)
    assert command is not None, found
    assert re.fullmatch(
        r"RLINF_ASYNC_SEED=\d+ python -m pytest test_planted.py::test_planted -q", command[1]
    )
    replayed = pytest_in(checkout, command[1])
    for line in (r"lost update: \d+", r"seed \d+ fails", r"(?s)the last steps were\n(.*?)E +seed"):
        assert _found(line, found) == _found(line, replayed)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[0]


def test_results_come_in_the_order_of_the_seeds() -> None:
    async def main() -> str:
        said: list[str] = []

        async def say(letter: str) -> None:
            said.append(letter)

        await asyncio.gather(say("a"), say("b"))
        return "".join(said)

    results = explore(main, seeds=range(20))
    assert len(results) == 20
    assert results == explore(main, seeds=range(20))
    assert set(results) == {"ab", "ba"}


def test_the_environment_restricts_exploring_to_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "17")

    async def main() -> int:
        return 1

    assert explore(main) == [1]


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "seventeen")
    with pytest.raises(ValueError, match="RLINF_ASYNC_SEED='seventeen' is not a seed"):
        explore(lambda: asyncio.sleep(0))


def test_outside_pytest_the_command_runs_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "check.py", "--all keys"])
    assert replay_command(3) == "RLINF_ASYNC_SEED=3 python check.py '--all keys'"


def test_a_parameter_with_special_characters_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/test_a.py::test_b[x y] (call)")
    assert (
        replay_command(3) == "RLINF_ASYNC_SEED=3 python -m pytest 'tests/test_a.py::test_b[x y]' -q"
    )


def test_the_plugin_says_when_one_seed_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "17")
    assert pytest_report_header() == "RLINF_ASYNC_SEED=17: explore runs this seed only"
    monkeypatch.delenv(SEED_VARIABLE)
    assert pytest_report_header() is None
