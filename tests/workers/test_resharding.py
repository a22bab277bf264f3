"""Plans carried out between ranks that share nothing but two channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

import rlinf_async as ra
from rlinf_async.backends.reshard import (
    BucketDamaged,
    BuffersDiffer,
    NotAgreed,
    PeerLost,
    State,
    allocate,
    buckets,
)
from rlinf_async.messages.reshard import ReshardVote, ShardBucket
from rlinf_async.parallel import FSDP2, Layout, Plan, Strategy, layout, plan, together
from rlinf_async.parallel.decoders import Decoder, huggingface, vllm
from rlinf_async.testing import explore, run
from rlinf_async.workers.resharding import ReshardPorts, reshard_over_channels
from tests.parallel.arrays import scatter

CPU = torch.device("cpu")
DECODER = Decoder(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocabulary=37)
TRAINERS = layout(huggingface(DECODER), Strategy(dp=2, sharding=FSDP2()))
ENGINES = together(
    [
        layout(vllm(DECODER), Strategy(tp=2), [2, 3]),
        layout(vllm(DECODER), Strategy(), [4]),
    ]
)
RANKS = range(5)
BUCKET = 4096


def made() -> Plan:
    return plan(TRAINERS, ENGINES)


def filled(one: Layout, rank: int, seed: int) -> dict[str, Tensor]:
    """What a rank should have: random whole tensors, cut without a plan."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = {tensor.name: tensor.shape for tensor in one.tensors}
    whole = {n: torch.randn(shapes[n], generator=numbers).numpy() for n in sorted(shapes)}
    held = scatter(one, whole).get(rank, {})
    return {name: torch.from_numpy(array) for name, array in held.items()}


def states(rank: int) -> list[State]:
    """Weights, and something else of the same shapes."""
    return [
        State(filled(TRAINERS, rank, seed), allocate(ENGINES, rank, device=CPU))
        for seed in range(2)
    ]


def arrived(rank: int, found: list[State]) -> bool:
    return all(
        torch.equal(one.new[name], tensor)
        for seed, one in enumerate(found)
        for name, tensor in filled(ENGINES, rank, seed).items()
    )


class Wires:
    """The two channels; buckets are few, so that senders wait."""

    def __init__(self, cluster: ra.Cluster) -> None:
        self.buckets = cluster.channel(ShardBucket, name="shards", capacity=2)
        self.votes = cluster.channel(ReshardVote, name="votes", capacity=64)
        self._ports: list[ReshardPorts] = []

    def ports(self) -> ReshardPorts:
        ports = ReshardPorts(
            self.buckets.new_sender(),
            self.buckets.new_receiver(),
            self.votes.new_sender(),
            self.votes.new_receiver(),
        )
        self._ports.append(ports)
        return ports

    def close(self) -> None:
        for ports in self._ports:
            for end in ports:
                end.close()


async def exchange(
    wires: Wires, held: dict[int, list[State]], number: int = 0, timeout: float = 60.0
) -> dict[int, Any]:
    """Run the exchange on these ranks; what it came to on each."""
    calls: list[Awaitable[Any]] = [
        reshard_over_channels(
            made(),
            rank,
            mine,
            wires.ports(),
            exchange=number,
            bucket_bytes=BUCKET,
            timeout=timeout,
        )
        for rank, mine in held.items()
    ]
    found = await asyncio.gather(*calls, return_exceptions=True)
    return dict(zip(held, found, strict=True))


async def with_wires(body: Callable[[Wires], Coroutine[Any, Any, None]]) -> None:
    async with ra.Cluster.local() as cluster:
        wires = Wires(cluster)
        try:
            await body(wires)
        finally:
            wires.close()


def test_engines_of_any_strategy_get_the_trainers_shards_in_any_order_of_events() -> None:
    async def body(wires: Wires) -> None:
        held = {rank: states(rank) for rank in RANKS}
        reports = await exchange(wires, held)
        assert all(arrived(rank, mine) for rank, mine in held.items())
        sent = sum(reports[rank].sent_bytes for rank in (0, 1))
        assert sent == sum(reports[rank].received_bytes for rank in (2, 3, 4)) > 0
        assert reports[0].rounds > 4
        # Runs here are small, and each is padded to 16 bytes.
        assert all(0 < one.peak_bytes <= 1.6 * BUCKET for one in reports.values())

    explore(lambda: with_wires(body), seeds=range(10))


def test_a_damaged_bucket_fails_every_rank_and_the_next_exchange_is_not_confused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal, damaged = buckets.seal, iter([True])

    def corrupt(bucket: Tensor, checksum: int, now: int) -> None:
        seal(bucket, checksum, now)
        if next(damaged, False):
            bucket[len(bucket) // 3] ^= 4

    async def body(wires: Wires) -> None:
        monkeypatch.setattr(buckets, "seal", corrupt)
        held = {rank: states(rank) for rank in RANKS}
        found = await exchange(wires, held)
        assert [type(one) for one in found.values()].count(BucketDamaged) == 1
        assert [type(one) for one in found.values()].count(NotAgreed) == 4
        [struck] = [rank for rank, one in found.items() if isinstance(one, BucketDamaged)]
        assert f"elsewhere: rank {struck}: the bucket of round" in str(found[0])
        await exchange(wires, held, number=1)
        assert all(arrived(rank, mine) for rank, mine in held.items())

    run(with_wires(body))


def test_a_rank_without_its_buffers_fails_all_before_anything_is_sent() -> None:
    async def body(wires: Wires) -> None:
        held = {rank: states(rank) for rank in RANKS}
        name = next(iter(held[3][0].new))
        held[3][0] = State({}, {k: v for k, v in held[3][0].new.items() if k != name})
        found = await exchange(wires, held)
        assert isinstance(found[3], BuffersDiffer)
        assert f"rank 3 has no new buffer {name!r}" in str(found[3])
        assert all(isinstance(found[rank], NotAgreed) for rank in (0, 1, 2, 4))
        assert (await wires.buckets.new_receiver().statistics()).depth == 0

    run(with_wires(body))


def test_a_rank_that_does_not_come_is_named_and_its_leftovers_are_passed_over() -> None:
    async def body(wires: Wires) -> None:
        held = {rank: states(rank) for rank in RANKS}
        found = await exchange(wires, {rank: held[rank] for rank in (0, 1, 2, 4)}, timeout=30.0)
        assert all(isinstance(one, PeerLost) for one in found.values())
        assert "nothing came from rank [3] in 30 s" in str(found[0])
        assert "nothing came from rank 0, which counts the votes" in str(found[1])
        again = await exchange(wires, held, number=1)
        assert not any(isinstance(one, BaseException) for one in again.values())
        assert all(arrived(rank, mine) for rank, mine in held.items())

    run(with_wires(body))


def test_a_channel_that_fails_is_a_lost_peer() -> None:
    async def body(wires: Wires) -> None:
        held = {rank: states(rank) for rank in RANKS}
        wires.buckets.fail(RuntimeError("the trainer died"))
        found = await exchange(wires, held)
        assert all(isinstance(one, PeerLost) for one in found.values())
        assert "the trainer died" in str(found[2])

    run(with_wires(body))


class Rank(ra.Worker):
    """A rank of one of two groups of processes."""

    async def move(
        self,
        first: int,
        buckets: ra.Sender[ShardBucket],
        arrivals: ra.Receiver[ShardBucket],
        votes: ra.Sender[ReshardVote],
        verdicts: ra.Receiver[ReshardVote],
    ) -> bool:
        rank = first + self.rank
        mine = states(rank)
        await reshard_over_channels(
            made(),
            rank,
            mine,
            ReshardPorts(buckets, arrivals, votes, verdicts),
            exchange=0,
            bucket_bytes=BUCKET,
            compute=self.compute,
        )
        return arrived(rank, mine)


@pytest.mark.timeout(300)  # processes that import torch, on a busy machine
def test_two_groups_of_processes_need_no_process_group() -> None:
    async def body() -> None:
        async with ra.Cluster.process() as cluster:
            wires = Wires(cluster)
            ends = (
                wires.buckets.sender,
                wires.buckets.receiver,
                wires.votes.sender,
                wires.votes.receiver,
            )
            trainers = await cluster.launch(Rank, count=2, name="trainers")
            engines = await cluster.launch(Rank, count=3, name="engines")
            sending = trainers.call(Rank.move, 0, *ends)
            taking = engines.call(Rank.move, 2, *ends)
            assert await sending == [True] * 2
            assert await taking == [True] * 3

    ra.run(body())
