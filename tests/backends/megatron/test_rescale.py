"""Four real ranks over gloo: strategies change in the middle of training, the numbers do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_async.parallel import FSDP2, Strategy, StrategyError
from tests.backends.fsdp_helpers import in_processes
from tests.backends.megatron.rescaling import (
    EXACT,
    LAUNCHED,
    MATRIX,
    RING,
    SHAPES,
    Fault,
    alone,
    changing,
    differences,
)

pytest.importorskip("megatron.core")

SHORT = ("tied, distributed optimizer", "untied, copies of the optimizer")
"""the rest of them: `python -m tests.backends.megatron.rescaling`"""
EACH = 2
"""optimizer steps on each strategy"""
FAULTS: list[list[Fault]] = [
    [("raises", "propose", 0)],
    [("raises after", "connect", 1)],
    [("raises", "drain", 2), ("raises after", "build", 3)],
    [("damages", "move", 0), ("raises after", "move", 2)],
    [("raises after", "verify", 1), ("raises", "decide", 2)],
]
"""before each change"""


class Runs:
    """What became of both runs."""

    def __init__(self, folder: Path) -> None:
        settings = {name: MATRIX[name] for name in SHORT}
        (folder / "alone").mkdir()
        [self.expected] = in_processes(alone, 1, folder / "alone", settings, EACH)
        self.found: list[dict[str, Any]] = in_processes(
            changing, LAUNCHED, folder, settings, EACH, FAULTS
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SHORT)
def test_losses_on_tp2_dp2_pp2_tp2pp2_and_tp1_are_those_of_a_run_that_does_not_change(
    runs: Runs, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = differences(runs.found, runs.expected, name)
    with capsys.disabled():
        print(f"\n{name}: loss, grad norm, lr, weights differ by at most {worst}", end="")
    assert all(one <= limit for one, limit in zip(worst, EXACT, strict=True))


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_at_any_stage_leaves_all_ranks_on_the_old_strategy(runs: Runs, name: str) -> None:
    faults = [one for before in FAULTS for one in before]
    for rank, result in enumerate(runs.found):
        assert len(result[name]["faults"]) == len(faults)
        for (how, stage, culprit), (asked, kind, text) in zip(
            faults, result[name]["faults"], strict=True
        ):
            assert tuple(asked) == (how, stage, culprit)
            assert kind == "RescaleError"
            if how == "damages":
                assert "BucketDamaged" in text
            else:
                assert "as the test wants it" in text, (rank, text)


@pytest.mark.parametrize("name", SHORT)
def test_ranks_join_and_leave_and_know_the_version_and_their_random_numbers(
    runs: Runs, name: str
) -> None:
    for rank, result in enumerate(runs.found):
        reports = result[name]["reports"]
        assert [one[0] for one in reports] == [rank < one.world_size for one in RING]
        assert all(result[name]["random"])
        # One step is made after the faults, before the change.
        assert [one[3] for one in reports] == [0, *(EACH * at + 1 for at in range(1, len(RING)))]


@pytest.mark.parametrize("name", SHORT)
def test_a_checkpoint_of_one_active_rank_of_four_is_loaded_after_the_next_change(
    runs: Runs, name: str
) -> None:
    first, again = runs.found[0][name]["again"]
    assert again == pytest.approx(first, abs=1e-5)


def test_what_a_rank_keeps_is_not_moved(runs: Runs) -> None:
    name = "untied, copies of the optimizer"
    for result in runs.found[:2]:
        _, sent, kept, _ = result[name]["reports"][0]  # tp=2, dp=2 -> tp=2
        assert sent == 0
        assert kept > 0


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Strategy(tp=3), "tp=3 does not divide .*; nearest tp that fits all of it: 2"),
        (Strategy(pp=3), r"pp=3 does not divide 2 layers; nearest: 2$"),
        (Strategy(pp=2, virtual_stages=2), "virtual_stages=2: only tp, pp and dp can change"),
        (Strategy(tp=2, dp=3), r"tp=2 x dp=3: only 4 ranks were launched; nearest dp: 2"),
        (Strategy(cp=2), "cp=2: only tp, pp and dp can change"),
        (Strategy(dp=2, sharding=FSDP2()), "sharding=.*distributed_optimizer"),
    ],
    ids=lambda one: one.sizes if isinstance(one, Strategy) else "",
)
def test_strategies_that_do_not_fit_are_refused_with_the_nearest_that_do(
    strategy: Strategy, text: str
) -> None:
    from rlinf_async.backends.megatron.config import architecture_of
    from rlinf_async.backends.megatron.rescale import check_strategy

    architecture = architecture_of(SHAPES["tied"] | {"rms_norm_eps": 1e-6})
    with pytest.raises(StrategyError, match=text):
        check_strategy(strategy, architecture, launched=LAUNCHED)
