"""Random programs of whole clusters end, or wait for ever, as the reference says."""

from __future__ import annotations

import pytest

from tests.channels.model.jobs import Program as Job
from tests.channels.model.jobs import Step, generate, reference, run_local, run_processes


@pytest.mark.parametrize("part", range(2))
def test_programs_of_local_workers(part: int) -> None:
    for seed in range(part * 60, part * 60 + 60):
        assert not (found := run_local(generate(seed, processes=False))), f"seed {seed}: {found}"


def test_a_ring_of_processes_is_reported_as_the_reference_says_it() -> None:
    """A third worker is idle for longer than a deadlock takes to be found, and then polls."""
    program = Job(
        workers=(
            (Step("get", 0), Step("put", 1)),
            (Step("get", 1), Step("put", 0)),
            (Step("publish", 0), Step("idle"), Step("poll", 0), Step("put", 2, size=100_000)),
        ),
        channels=((1, 0, 1), (0, 1, 1), (2, 0, 1)),
        latest=(2,),
    )
    stuck, _ = reference(program)
    assert stuck == {("Player[0]", "get", "channel 0"), ("Player[1]", "get", "channel 1")}
    assert run_processes(program) == []


def test_processes_that_poll_and_are_idle_come_to_their_end() -> None:
    program = Job(
        workers=(
            (Step("publish", 0), Step("idle"), Step("publish", 0), Step("put", 0, size=10)),
            (Step("poll", 0), Step("newer", 0, than=1), Step("poll", 0), Step("get", 0)),
        ),
        channels=((0, 1, 1),),
        latest=(0,),
        ranks=2,
    )
    assert reference(program) == (frozenset(), [[], ["0: 0"]])
    assert run_processes(program) == []
