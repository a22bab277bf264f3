"""Programs over real processes, some of which are killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.channels.model import processes
from tests.channels.model.generate import generate
from tests.channels.model.kit import hold, holds
from tests.channels.model.processes import end_workers
from tests.channels.model.program import Kill, Op, Program, Task
from tests.channels.model.runners import run

SEEDS = range(200)


@pytest.fixture(autouse=True, scope="module")
def workers_end() -> Iterator[None]:
    """They are kept from one program to the next."""
    yield
    end_workers()


def test_programs_over_processes() -> None:
    hold([seed for seed in SEEDS if not generate(seed, "process").kills][:12], "process")


def test_programs_over_processes_that_are_killed() -> None:
    hold([seed for seed in SEEDS if generate(seed, "process").kills][:12], "process")


@pytest.mark.parametrize("transport", ["direct", "far"])
def test_programs_over_processes_whose_arrays_pass_the_owner_or_go_far(transport: str) -> None:
    killed = [seed for seed in SEEDS if generate(seed, transport).kills]
    hold([*range(6), *killed[:6]], transport)


def test_programs_over_a_channel_that_another_process_has_made() -> None:
    killed = [seed for seed in SEEDS if generate(seed, "home").kills]
    hold([*range(8), *killed[:8]], "home")


def test_a_process_that_is_killed_in_a_lease_gives_its_items_back() -> None:
    takes = Task("take", (Op("lease", 3, weight=4, turns=5),), 1)
    sends = Task("send", (Op("put", 12), Op("flush")), 2)
    for after in range(1, 9):
        holds(Program((sends, takes), kills=(Kill(1, after),)), "process")


def test_a_process_that_is_killed_while_it_puts_loses_only_what_it_had_not_flushed() -> None:
    sends = Task("send", (Op("put", 5), Op("flush"), Op("put", 20)), 1)
    for after in (9, 13, 20, 40):
        program = Program(
            (sends, Task("take", (Op("get", 9),), 2)), capacity=3, kills=(Kill(1, after),)
        )
        holds(program, "process")


def test_a_process_that_loses_its_connection_is_named_and_nobody_waits_for_its_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "CUT_PATIENCE", 0.0)
    sends = Task("send", (Op("put", 40), Op("flush")), 1)
    program = Program((sends, Task("take", (Op("get", 40),))), capacity=3, cuts=(5,))
    result = run(program, "process", patience=1.0)
    assert "process 1 lost its connection" in result.violations
    assert not result.hung
