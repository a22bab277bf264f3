"""Real processes and FSDP: a run whose actor changes in every iteration, and one that does not."""

from __future__ import annotations

from tests.workers.scheduler.losses import compare


async def test_a_run_that_changes_its_ranks_learns_what_one_that_does_not_learns() -> None:
    """More iterations: ``python -m tests.workers.scheduler.losses``."""
    found = await compare(2)
    assert found["iterations_on_two_ranks"] == 2
    assert found["loss_difference"] < 1e-6
    assert found["weight_difference"] < 1e-6
    assert (found["lost"], found["doubled"], found["untrained"]) == (0, 0, 0)
