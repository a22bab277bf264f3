"""Plans carried out by four real ranks over gloo."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rlinf_async.backends.reshard import (
    BucketDamaged,
    BuffersDiffer,
    BufferState,
    NotAgreed,
    PeerLost,
    allocate,
    buckets,
    reshard,
)
from rlinf_async.parallel import (
    FSDP1,
    FSDP2,
    DistributedOptimizer,
    Layout,
    Strategy,
    layout,
    plan,
)
from rlinf_async.parallel.decoders import DecoderSizes, huggingface, megatron, vllm
from tests.backends.ranks import start_ranks
from tests.parallel.arrays import scatter

CPU = torch.device("cpu")
DECODER = DecoderSizes(
    layers=4, hidden=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocabulary=37, qk_norm=True
)
BUCKET = 4096


def ring() -> list[Layout]:
    """Ways to hold one model on up to 4 ranks."""
    hf, mcore, engine = huggingface(DECODER), megatron(DECODER), vllm(DECODER)
    return [
        layout(hf, Strategy(dp=1, sharding=FSDP2())),
        layout(hf, Strategy(dp=2, sharding=FSDP2())),
        layout(hf, Strategy(dp=4, sharding=FSDP2())),
        layout(hf, Strategy(dp=3, sharding=FSDP2())),
        layout(engine, Strategy(tp=2, dp=2)),
        layout(mcore, Strategy(tp=2, pp=2)),
        layout(mcore, Strategy(dp=4, sharding=DistributedOptimizer(bucket_elements=3000))),
        layout(hf, Strategy(dp=3, sharding=FSDP1()), [1, 2, 3]),
        layout(hf, Strategy(dp=1, sharding=FSDP2())),
    ]


def filled(one: Layout, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """What a rank should have: random whole tensors, cut without the executor."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = {tensor.name: tensor.shape for tensor in one.tensors}
    whole = {n: torch.randn(shapes[n], generator=numbers).numpy() for n in sorted(shapes)}
    held = scatter(one, whole).get(rank, {})
    return {name: torch.from_numpy(array) for name, array in held.items()}


def in_ranks(
    work: Any,
    folder: Path,
    *arguments: object,
    ranks: int = 4,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Any]:
    """Run ``work(rank, *arguments)`` in every rank of a gloo group; return what each returned."""
    start_ranks(_start, (work, ranks, str(folder), arguments), ranks, method)
    found = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(one, weights_only=True) if one.exists() else None for one in found]


def _start(rank: int, work: Any, ranks: int, folder: str, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rendezvous = f"file://{folder}/rendezvous"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=ranks, timeout=limit)
    torch.save(work(rank, *arguments), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def outcome(call: Any) -> str:
    """The name and text of what a call raises, or nothing."""
    try:
        call()
    except (BucketDamaged, BuffersDiffer, NotAgreed, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Outcomes(NamedTuple):
    """What each of four ranks came to, by scenario; they are run in the same processes."""

    shared: list[list[dict[str, int]]]
    messages: list[list[dict[str, int]]]
    narrowed: list[bool]
    lacking: list[str]
    damaged_shared: list[tuple[str, bool]]
    damaged_messages: list[tuple[str, bool]]


def every_scenario(rank: int) -> tuple[object, ...]:
    rings = round_the_ring(rank, True), round_the_ring(rank, False)
    return *rings, narrowed(rank), lacking(rank), damaged(rank, True), damaged(rank, False)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    found = in_ranks(every_scenario, tmp_path_factory.mktemp("ranks"), method="spawn")
    return Outcomes(*(list(column) for column in zip(*found, strict=True)))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def round_the_ring(rank: int, shared_memory: bool) -> list[dict[str, int | bool]]:
    """Weights and two moments from each layout to the next; what each step came to."""
    layouts = ring()
    held = [filled(layouts[0], rank, seed) for seed in range(3)]
    report = []
    for old, new in pairwise(layouts):
        fresh = [allocate(new, rank, device=CPU) for _ in held]
        states = [BufferState(*pair) for pair in zip(held, fresh, strict=True)]
        made = plan(old, new)
        done = reshard((made, states), device=CPU, bucket_bytes=BUCKET, shared_memory=shared_memory)
        arrived = all(equal(one, filled(new, rank, seed)) for seed, one in enumerate(fresh))
        runs = made.of_rank(rank)
        report.append(
            {
                "right": arrived,
                "sent": done.sent_bytes,
                "wanted": 3 * sum(run.bytes for run in runs.sends),
                "rounds": done.rounds,
                "peak": done.peak_bytes,
            }
        )
        held = fresh
    return report


@pytest.mark.parametrize("way", ["shared", "messages"])
def test_weights_and_moments_go_from_any_strategy_to_the_next_in_bounded_buckets(
    outcomes: Outcomes, way: str
) -> None:
    steps = [step for report in getattr(outcomes, way) for step in report]
    assert all(step["right"] for step in steps)
    assert max(step["rounds"] for step in steps) > 4
    for step in steps:
        # Runs here are small, and each is padded to 16 bytes; shared memory comes in pages.
        assert step["peak"] <= 1.6 * BUCKET + (2 * 4096 if way == "shared" else 0)
        assert step["wanted"] <= step["sent"] <= 1.6 * step["wanted"] + 16 * 4 * step["rounds"]


def narrowed(rank: int) -> bool:
    """float32 shards to a bfloat16 engine, moments in float32 whatever the layout says."""
    half = DecoderSizes(
        layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, mlp=8, vocabulary=9, dtype="bfloat16"
    )
    old = layout(huggingface(half), Strategy(dp=2, sharding=FSDP2()))
    new = layout(vllm(half), Strategy(tp=2), [2, 3])
    weights = BufferState(filled(old, rank, 0), allocate(new, rank, device=CPU))
    wide = allocate(new, rank, device=CPU, dtype=torch.float32)
    moments = BufferState(filled(old, rank, 1), wide, torch.float32)
    reshard((plan(old, new), [weights, moments]), device=CPU, bucket_bytes=512)
    rounded = {name: one.bfloat16() for name, one in filled(new, rank, 0).items()}
    return equal(dict(weights.new), rounded) and equal(wide, filled(new, rank, 1))


def test_an_engine_of_another_dtype_gets_rounded_weights_and_exact_moments(
    outcomes: Outcomes,
) -> None:
    assert outcomes.narrowed == [True] * 4


def damaged(rank: int, shared_memory: bool) -> tuple[str, bool]:
    """Rank 1 sends buckets whose bytes change after they were sealed."""
    old, new = ring()[1], ring()[2]
    seal = buckets.seal
    if rank == 1:

        def corrupt(bucket: torch.Tensor, checksum: int, now: int) -> None:
            seal(bucket, checksum, now)
            bucket[len(bucket) // 3] ^= 4

        buckets.seal = corrupt
    held = filled(old, rank, 0)
    states = [BufferState(held, allocate(new, rank, device=CPU))]
    said = outcome(
        lambda: reshard(
            (plan(old, new), states),
            device=CPU,
            bucket_bytes=BUCKET,
            shared_memory=shared_memory,
        )
    )
    buckets.seal = seal
    return said, equal(held, filled(old, rank, 0))


@pytest.mark.parametrize("way", ["shared", "messages"])
def test_a_damaged_bucket_fails_every_rank_and_leaves_the_old_buffers(
    outcomes: Outcomes, way: str
) -> None:
    found = getattr(outcomes, f"damaged_{way}")
    texts = [text for text, _ in found]
    struck = [rank for rank, text in enumerate(texts) if text.startswith("BucketDamaged")]
    assert struck
    assert all("from rank 1 (" in texts[rank] for rank in struck)
    for rank in set(range(4)) - set(struck):
        assert texts[rank] == (
            f"NotAgreed: resharding failed on rank {struck}; see that rank's error"
        )
    assert all(untouched for _, untouched in found)


def lacking(rank: int) -> str:
    old, new = ring()[1], ring()[2]
    fresh = allocate(new, rank, device=CPU)
    if rank == 2:
        del fresh["model.norm.weight"]
    states = [BufferState(filled(old, rank, 0), fresh)]
    return outcome(lambda: reshard((plan(old, new), states), device=CPU))


def test_a_rank_without_its_buffers_fails_all_before_anything_is_sent(outcomes: Outcomes) -> None:
    found = outcomes.lacking
    assert found[2] == "BuffersDiffer: rank 2 has no new buffer 'model.norm.weight' [4]"
    assert {found[rank].partition(":")[0] for rank in (0, 1, 3)} == {"NotAgreed"}


def dying(rank: int, shared_memory: bool) -> tuple[str, bool]:
    """Rank 1 dies in the middle: after some of its buckets."""
    old, new = ring()[1], ring()[2]
    seal = buckets.seal
    if rank == 1:

        def die(bucket: torch.Tensor, checksum: int, now: int) -> None:
            if now == 2:
                os._exit(0)
            seal(bucket, checksum, now)

        buckets.seal = die
    held = filled(old, rank, 0)
    states = [BufferState(held, allocate(new, rank, device=CPU))]
    limit = timedelta(seconds=20)
    said = outcome(
        lambda: reshard(
            (plan(old, new), states),
            device=CPU,
            bucket_bytes=BUCKET // 8,
            shared_memory=shared_memory,
            timeout=limit,
        )
    )
    return said, equal(held, filled(old, rank, 0))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_dies_in_the_middle_is_a_clear_error_everywhere(
    tmp_path: Path, shared_memory: bool
) -> None:
    found = in_ranks(dying, tmp_path, shared_memory)
    assert found[1] is None
    for rank in (0, 2, 3):
        text, untouched = found[rank]
        assert text.startswith("PeerLost: rank 1 " if shared_memory else "PeerLost: "), text
        assert untouched
