"""A few of the random schedules with faults; ``python -m tests.simulate.schedules`` runs more."""

from __future__ import annotations

import pytest

from tests.simulate import schedules


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_schedules_keep_every_invariant(first: int) -> None:
    failures = [text for seed in range(first, first + 10) if (text := schedules.failure(seed))]
    assert not failures, "\n".join(failures)


def test_one_seed_is_replayed_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert schedules.main(["--seed", "3"]) == 0
        printed.append(capsys.readouterr().out.partition("real_seconds")[0])
    assert printed[0] == printed[1]
    assert "name='schedule 3'" in printed[0]
