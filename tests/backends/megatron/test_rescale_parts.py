"""Two real ranks over gloo: what a change of strategy moves besides what `test_rescale` compares,
what it leaves in its place, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.backends.rescale.transaction import RescaleError
from rlinf_async.parallel import Strategy, StrategyError
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import samples
from tests.backends.megatron.rescaling import (
    BUCKET,
    LIMIT,
    assert_same_as_stepped,
    config,
    step,
)
from tests.backends.megatron.test_critic import MODEL, fsdp, learn, megatron
from tests.backends.megatron.test_trainer import assert_same

pytest.importorskip("megatron.core")

TP2, DP2, PP2, ONE = Strategy(tp=2), Strategy(dp=2), Strategy(pp=2), Strategy()
CRITIC_RING = (TP2, DP2, PP2)


def change(trainer: Any, strategy: Strategy) -> Any:
    return trainer.rescale(strategy, timeout=LIMIT, bucket_bytes=BUCKET)


def of_critic(world_size: int, rank: int) -> list[dict[str, Any]]:
    """A critic that learns on each strategy."""
    critic = megatron(MODEL, {"tp": 2}, world_size, rank)
    found = []
    for strategy in CRITIC_RING:
        change(critic, strategy)
        found.append(learn(critic))
    return found


def places(trainer: Any) -> list[int]:
    """Where this rank's weights and gradients lie."""
    return [
        one.data_ptr()
        for held in trainer.manager.held
        for one in (held.parameter, held.parameter.main_grad)
    ]


def where_dp_changes(world_size: int, rank: int, folder: Path) -> dict[str, Any]:
    """One data rank, two, and one again: where rank 0's memory is. Two save, one loads."""
    found: dict[str, Any] = {}
    for name, distributed in (("distributed", True), ("copies", False)):
        trainer = trained(world_size, rank, tp=1, distributed_optimizer=distributed)
        change(trainer, ONE)
        seen = []
        for strategy in (DP2, ONE):
            before = places(trainer)
            report = change(trainer, strategy)
            seen.append((before == places(trainer), report.kept_bytes))
            if strategy == DP2:
                trainer.save_checkpoint(folder / name)
        if rank == 0:
            saved = masters(trainer)
            step(trainer, 1)
            trainer.load_checkpoint(folder / name)
            assert all(torch.equal(one, saved[key]) for key, one in masters(trainer).items())
        bytes_of = [one.parameter.nbytes for one in trainer.manager.held]
        found[name] = {"seen": seen, "bytes": sum(bytes_of)}
    return found


def trained(world_size: int, rank: int, **fields: Any) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(config("tied", **fields), world_size, rank)
    step(trainer, 0)
    return trainer


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    """The float32 weights and moments of this rank's parameters, which have one data rank."""
    from rlinf_async.backends.megatron.weights import MOMENTS, kept_of

    found = {}
    for held in trainer.manager.held:
        kept = kept_of(trainer.manager.optimizer, held.parameter)
        assert kept is not None
        found[f"{held.name}.param"] = kept.main.detach().clone()
        found |= {f"{held.name}.{kind}": kept.state[kind].clone() for kind in MOMENTS}
    return found


def of_bfloat16(world_size: int, rank: int) -> int:
    """Number of float32 weights that bfloat16 would not hold, all of which survived."""
    trainer = trained(world_size, rank, precision="bfloat16")
    before = masters(trainer)
    for strategy in (DP2, PP2, TP2):
        change(trainer, strategy)
        assert_same_as_stepped(trainer.manager)
    after = masters(trainer)
    assert after.keys() == before.keys()
    for name, one in before.items():
        assert torch.equal(after[name], one), name
    finer = [one != one.bfloat16().float() for name, one in after.items() if "param" in name]
    return int(sum(one.sum() for one in finer))


def refused(world_size: int, rank: int) -> list[Any]:
    """One rank alone is asked for what does not fit; the next attempt is all ranks'."""
    trainer = trained(world_size, rank)
    with pytest.raises((StrategyError, RescaleError)) as caught:
        change(trainer, Strategy(tp=3) if rank == 0 else DP2)
    change(trainer, DP2)
    trainer.offload()
    errors = []
    works: list[Callable[[], object]] = [
        lambda: trainer.training_step(iter(())),
        lambda: trainer.forward_backward(iter(())),
        lambda: change(trainer, TP2),
    ]
    for work in works:
        with pytest.raises(Exception, match="while the model is offloaded") as offloaded:
            work()
        errors.append(type(offloaded.value).__name__)
    trainer.onload()
    step(trainer, 1)
    return [type(caught.value).__name__, str(caught.value), trainer.strategy == DP2, errors]


def uneven(world_size: int, rank: int) -> int:
    """One data rank has no samples after a step whose parameters nobody has gathered yet."""
    trainer = trained(world_size, rank, tp=1, overlap=True)
    found = trainer.log_probs(samples(1) if rank == 0 else [])
    step(trainer, 1)
    return len(found)


def everything(rank: int, world_size: int, folder: Path) -> None:
    save_result(
        folder,
        rank,
        {
            "uneven": uneven(world_size, rank),
            "refused": refused(world_size, rank),
            "critic": of_critic(world_size, rank),
            "bfloat16": of_bfloat16(world_size, rank),
            "dp": where_dp_changes(world_size, rank, folder),
        },
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    results: list[dict[str, Any]] = in_processes(everything, 2, folder)
    for one in results:
        one["folder"] = folder
    return results


def test_a_critic_whose_strategy_changes_learns_what_one_does_that_stays(
    found: list[dict[str, Any]],
) -> None:
    critic = fsdp(MODEL)
    expected = [learn(critic) for _ in CRITIC_RING]
    for rank in found:
        results = rank["critic"]
        assert_same([one["metrics"] for one in results], [one["metrics"] for one in expected])
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one["values"], other["values"], atol=1e-4, rtol=0)


def test_float32_weights_and_moments_of_bfloat16_are_bit_equal_after_three_changes(
    found: list[dict[str, Any]],
) -> None:
    assert all(rank["bfloat16"] > 1000 for rank in found)


@pytest.mark.parametrize("name", ["distributed", "copies"])
def test_where_only_data_ranks_change_weights_and_gradients_stay_in_their_place(
    found: list[dict[str, Any]], name: str
) -> None:
    result = found[0]["dp"][name]
    for stayed, kept in result["seen"]:
        assert stayed
        # Of the moments, too: all of them, or those of which the rank has as much as before.
        assert kept >= result["bytes"] * (1.5 if name == "distributed" else 3.0)


@pytest.mark.parametrize(("name", "share"), [("distributed", 0.6), ("copies", 1.0)])
def test_each_data_rank_writes_what_it_has_of_the_optimizer(
    found: list[dict[str, Any]], name: str, share: float
) -> None:
    files = [found[0]["folder"] / name / f"rank_{rank}_of_2.safetensors" for rank in range(2)]
    sizes = [data_bytes(one) for one in files]
    whole = 3 * found[0]["dp"][name]["bytes"]  # weights and two moments
    assert whole <= sum(sizes) < whole + 1000  # once, and a step counter for each tensor
    assert max(sizes) <= share * sum(sizes)


def data_bytes(file: Path) -> int:
    """Bytes of the tensors in a file."""
    content = file.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_a_strategy_that_one_rank_refuses_is_refused_by_all_and_the_next_one_is_applied(
    found: list[dict[str, Any]],
) -> None:
    (kind, said, applied, _), (other, heard, also, _) = (rank["refused"] for rank in found)
    assert (kind, other) == ("StrategyError", "RescaleError")
    assert said.startswith("tp=3 does not divide")
    assert f"rank 0 failed at stage 'propose': StrategyError: {said}" in heard
    assert applied
    assert also


def test_log_probs_of_uneven_data_ranks_wait_for_none_whose_parameters_are_still_gathered(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["uneven"] > 0
    assert found[1]["uneven"] == 0


def test_an_offloaded_model_is_not_trained_and_says_so(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refused"][3] == ["OffloadedError", "OffloadedError", "RescaleError"]
