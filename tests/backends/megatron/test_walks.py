"""Eight real ranks over gloo: half of all ways from one strategy to another, tensor, stage and data
ranks being 1 or 2, and no number changes."""

from __future__ import annotations

import itertools

import pytest

from tests.backends.megatron.walks import EVERY, MOST, SETTINGS, differences, every_way, round_trip

pytest.importorskip("megatron.core")

WALKS = dict(zip(SETTINGS, map(round_trip, (1, 3, 5, 7)), strict=False))
"""the rest of them: `python -m tests.backends.megatron.walks`"""
SAVING = ("tied, distributed optimizer",)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return differences(tmp_path_factory.mktemp("ranks"), WALKS, SAVING)


@pytest.mark.parametrize("setting", WALKS)
def test_losses_weights_and_checkpoints_are_those_of_a_run_that_never_changes(
    found: dict[str, list[float]], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{setting}: loss, grad norm, lr, weights, again: {found[setting]}", end="")
    assert all(one <= limit for one, limit in zip(found[setting], MOST, strict=True))


def test_walks_take_the_ways_that_they_say() -> None:
    count = len(EVERY)
    every = every_way()
    assert sorted(itertools.pairwise(every)) == [(a, b) for a in range(count) for b in range(count)]
    short = [way for walk in WALKS.values() for way in itertools.pairwise(walk)]
    assert len(set(short)) == len(short) == 4 * count
