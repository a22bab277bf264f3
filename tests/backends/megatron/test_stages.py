"""Stages of Megatron's layers compute and learn what one process does, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import in_processes, save_result

pytest.importorskip("megatron.core")

STRATEGIES = {
    "tp2": Strategy(tp=2),
    "pp2": Strategy(pp=2),
    "dp2": Strategy(dp=2),
    "tp2pp2": Strategy(tp=2, pp=2),
    "tp2dp2": Strategy(tp=2, dp=2),
    "pp2 interleaved": Strategy(pp=2, virtual_stages=2),
    "pp2dp2 interleaved": Strategy(pp=2, dp=2, virtual_stages=2),
    "tp2pp2 interleaved": Strategy(tp=2, pp=2, virtual_stages=2),
}
STEPS = 6


def compute_and_train(rank: int, world_size: int, folder: Path, kind: str, tied: bool) -> None:
    """Each strategy takes the first ranks; what each saw, by strategy and option."""
    from rlinf_async.backends.megatron.manager import Sharding
    from rlinf_async.backends.megatron.model import Options
    from tests.backends.megatron.kit import hugging_face, samples, stage_of, statistics, train

    model = hugging_face(kind, tied=tied)
    found: dict[str, Any] = {}
    for name, strategy in {"alone": Strategy(), **STRATEGIES}.items():
        # Sequence parallelism and the distributed optimizer: wherever they make a difference.
        options = Options(sequence_parallel=strategy.dp == 2, recompute=strategy.pp == 2)
        stage = stage_of(model, strategy, options)
        if stage is not None:
            answers = statistics(stage, samples(0, 3))
            history = train(stage, Sharding(distributed=strategy.pp == 1), STEPS)
            found[name] = {"statistics": answers, "history": history}
    save_result(folder, rank, found)


def expected_statistics(kind: str, *, tied: bool) -> list[torch.Tensor]:
    """Log-probs and entropies by transformers, one sample at a time."""
    from tests.backends.megatron.kit import hugging_face, samples

    model = hugging_face(kind, tied=tied)
    log_probs, entropies = [], []
    with torch.no_grad():
        for ids in samples(0, 3):
            all_of = (1.25 * model(input_ids=ids[None, :-1]).logits[0]).log_softmax(-1)
            log_probs.append(all_of.gather(-1, ids[1:, None])[:, 0])
            entropies.append(-(all_of.exp() * all_of).sum(-1))
    return [torch.cat(log_probs), torch.cat(entropies)]


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3", True), ("llama", False)], ids=["qwen3-tied", "llama"]
)
def test_every_strategy_computes_and_learns_what_one_process_does(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    results = in_processes(compute_and_train, 4, tmp_path, kind, tied)
    expected = expected_statistics(kind, tied=tied)
    alone = torch.tensor(results[0]["alone"]["history"])
    assert alone.shape == (STEPS, 2)
    for name, strategy in {"alone": Strategy(), **STRATEGIES}.items():
        taking_part = results[: strategy.world_size]
        assert all(name not in idle for idle in results[strategy.world_size :])
        last_stage = [one[name]["statistics"] for one in taking_part if one[name]["statistics"]]
        assert len(last_stage) == strategy.world_size // strategy.pp
        for found in last_stage:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        for one in taking_part:
            history = torch.tensor(one[name]["history"])
            torch.testing.assert_close(history, alone, atol=1e-5, rtol=0, msg=name)
