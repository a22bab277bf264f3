"""Random programs of whole clusters, beside a sequential reference.

``python -m tests.channels.model.jobs --backend process --count 100 --seed 0 --beside 4``

Each channel of a program has one worker that puts and one that gets, each `Latest` one that
publishes. So what a worker sees does not depend on who is quick: where its program ends, or on what
it waits for ever, `reference` says by carrying the workers out one after the other. A cluster must
end where the reference does, and its report of a deadlock must name exactly who waits there, and on
what. Some workers are idle for a while (longer than a deadlock takes to be found), some poll a
`Latest`, some send 256 MiB. Beside them ranks pull micro-batches whose number they agree on, and
give up pulls now and then.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

import rlinf_async as ra
from rlinf_async.channels import (
    BatchResizingIterator,
    ChannelClosed,
    EndOfChannel,
    NoReceivers,
)
from rlinf_async.channels.batching import ListOps
from rlinf_async.runtime import deadlock
from rlinf_async.testing import VirtualLoop, wait_all_blocked

LARGE: Final = 256 * 1024**2
AFTER: Final = 0.5
"""Seconds until a deadlock of processes is reported."""
IDLE: Final = 3 * AFTER
WAITED: Final = re.compile(r"(\S+)\.play has waited [\d.]+ s to (get|put) on channel '([^']+)'")

Do = Literal["put", "get", "publish", "newer", "poll", "close", "idle"]
DOES: Final[tuple[Do, ...]] = get_args(Do)


class Step(msgspec.Struct, frozen=True):
    """One operation of a worker."""

    do: Do
    on: int = 0
    """number of the channel or `Latest`"""
    than: int = 0
    """of ``newer``: the version that it must be newer than"""
    size: int = 0
    """of ``put``: bytes of the item's array"""


class Program(msgspec.Struct, frozen=True):
    """What each worker does, and what there is between them."""

    workers: tuple[tuple[Step, ...], ...]
    channels: tuple[tuple[int, int, int], ...]
    """of each: the worker that puts, the one that gets, its capacity"""
    latest: tuple[int, ...]
    """of each: the worker that publishes"""
    ranks: int = 0
    """how many ranks pull micro-batches beside the workers"""
    seed: int = 0


class Item(msgspec.Struct):
    """What is put: its number counts the items of its channel."""

    number: int
    values: NDArray[np.uint8]


Stuck = frozenset[tuple[str, str, str]]
"""Who waits for ever, to get or to put, on what."""


# ---- programs


def generate(seed: int, *, processes: bool) -> Program:
    """The program of this seed."""
    rng = Random(seed)
    count = rng.randint(2, 3) if processes else rng.randint(2, 5)
    channels = tuple(
        (*_two(rng, count), rng.choice((1, 1, 2, 5))) for _ in range(rng.randint(1, 2 * count))
    )
    latest = tuple(rng.randrange(count) for _ in range(rng.randint(0, 2)))
    large = processes and rng.random() < 0.03
    make = rng.choice((_any_steps, _matched_steps))
    workers = make(rng, count, channels, latest, processes)
    for steps in workers:
        first = next((at for at, step in enumerate(steps) if step.do == "put"), None)
        if large and first is not None:
            steps[first] = msgspec.structs.replace(steps[first], size=LARGE)
    ranks = rng.choice((0, 0, 0, 2, 3)) if not processes else rng.choice((0, 0, 0, 2))
    return Program(tuple(map(tuple, workers)), channels, latest, ranks, seed)


def _two(rng: Random, count: int) -> tuple[int, int]:
    first, second = rng.sample(range(count), 2)
    return first, second


Channels = tuple[tuple[int, int, int], ...]


def _any_steps(
    rng: Random, count: int, channels: Channels, latest: tuple[int, ...], processes: bool
) -> list[list[Step]]:
    """Steps of each worker, whatever the others do."""
    found = [
        [_step(rng, worker, channels, latest, processes) for _ in range(rng.randint(0, 10))]
        for worker in range(count)
    ]
    return [[step for step in steps if step is not None] for steps in found]


def _matched_steps(
    rng: Random, count: int, channels: Channels, latest: tuple[int, ...], processes: bool
) -> list[list[Step]]:
    """Steps that all come to their end: each item is got, each version is published before it is
    waited for. Then some of them are left out, or move."""
    workers: list[list[Step]] = [[] for _ in range(count)]
    queued, versions = [0] * len(channels), [0] * len(latest)

    def take(on: int) -> None:
        workers[channels[on][1]].append(Step("get", on))
        queued[on] -= 1

    for _ in range(rng.randint(4, 40)):
        worker = rng.randrange(count)
        step = _step(rng, worker, channels, latest, processes)
        if step is None or step.do == "close" or (step.do == "get" and not queued[step.on]):
            continue
        if step.do == "get":
            take(step.on)
            continue
        if step.do == "newer" and versions[step.on] <= step.than:
            continue
        if step.do == "put":
            if queued[step.on] == channels[step.on][2]:
                take(step.on)
            queued[step.on] += 1
        if step.do == "publish":
            versions[step.on] += 1
        workers[worker].append(step)
    for on, left in enumerate(queued):
        for _ in range(left):
            take(on)
    for _ in range(rng.choice((0, 1, 2, 4))):
        if steps := rng.choice(workers):
            step = steps.pop(rng.randrange(len(steps)))
            if rng.random() < 0.5:
                steps.insert(rng.randint(0, len(steps)), step)
    return workers


def _step(
    rng: Random,
    worker: int,
    channels: Channels,
    latest: tuple[int, ...],
    processes: bool,
) -> Step | None:
    puts = [number for number, one in enumerate(channels) if one[0] == worker]
    gets = [number for number, one in enumerate(channels) if one[1] == worker]
    own = [number for number, one in enumerate(latest) if one == worker]
    do: Do = rng.choices(DOES, (10, 10, 4, 3, 3, 1, 1))[0]
    if do == "put" and puts:
        return Step("put", rng.choice(puts), size=rng.choice((0, 10, 100_000)))
    if do == "get" and gets:
        return Step("get", rng.choice(gets))
    if do in ("publish", "close") and own:
        return Step(do, rng.choice(own))
    if do in ("newer", "poll") and latest:
        return Step(do, rng.randrange(len(latest)), than=rng.choice((0, 0, 1, 2)))
    if do == "idle" and (not processes or rng.random() < 0.1):
        return Step("idle")
    return None


# ---- the reference


def reference(program: Program) -> tuple[Stuck, list[list[str]]]:
    """Who waits for ever, and what each worker sees of the channels that it gets from."""
    at = [0] * len(program.workers)
    queued = [[0, 0] for _ in program.channels]
    """of each channel: the items that were put, and that were taken"""
    versions, closed = [0] * len(program.latest), [False] * len(program.latest)
    seen: list[list[str]] = [[] for _ in program.workers]

    def over(worker: int) -> bool:
        return at[worker] == len(program.workers[worker])

    def goes(worker: int, step: Step) -> bool:
        if step.do == "put":
            _, taker, capacity = program.channels[step.on]
            put, taken = queued[step.on]
            if put - taken >= capacity and not over(taker):
                return False
            queued[step.on][0] += 1
        elif step.do == "get":
            putter, _, _ = program.channels[step.on]
            put, taken = queued[step.on]
            if put == taken and not over(putter):
                return False
            queued[step.on][1] += put > taken
            seen[worker].append(f"{step.on}: {taken if put > taken else 'end'}")
        elif step.do == "newer":
            return versions[step.on] > step.than or closed[step.on]
        elif step.do == "publish":
            versions[step.on] += not closed[step.on]
        elif step.do == "close":
            closed[step.on] = True
        return True

    moved = True
    while moved:
        moved = False
        for worker, steps in enumerate(program.workers):
            while not over(worker) and goes(worker, steps[at[worker]]):
                at[worker] += 1
                moved = True
    stuck = {
        (
            f"Player[{worker}]",
            "put" if step.do == "put" else "get",
            f"{'latest' if step.do == 'newer' else 'channel'} {step.on}",
        )
        for worker, steps in enumerate(program.workers)
        if not over(worker)
        for step in [steps[at[worker]]]
    }
    return frozenset(stuck), seen


def features(program: Program) -> Iterator[str]:
    """What a program has that not every one has."""
    steps = [step for worker in program.workers for step in worker]
    has = {
        "Latest": any(step.do in ("publish", "newer", "poll", "close") for step in steps),
        "agree": program.ranks,
        "idle": any(step.do == "idle" for step in steps),
        "256 MiB": any(step.size == LARGE for step in steps),
        "deadlock": reference(program)[0],
    }
    return (name for name, found in has.items() if found)


# ---- the workers


class Forked(ra.Worker):
    """A worker whose process is forked: a new interpreter for each would take most of the time."""

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return ("tests.channels.model.jobs",)


class Player(Forked):
    """Carries out its steps."""

    async def play(
        self,
        steps: list[Step],
        idle: float,
        put: dict[int, ra.Sender[Item]],
        get: dict[int, ra.Receiver[Item]],
        publish: dict[int, ra.LatestSender[Item]],
        read: dict[int, ra.LatestReceiver[Item]],
    ) -> list[str]:
        """What it saw, in order; what must never be is among it."""
        seen: list[str] = []
        sent: Counter[int] = Counter()
        newest: Counter[int] = Counter()
        for step in steps:
            try:
                if step.do == "put":
                    item = Item(sent[step.on], _values(sent[step.on], step.size))
                    sent[step.on] += 1
                    await put[step.on].put(item)
                elif step.do == "get":
                    seen.append(f"{step.on}: {_number(await get[step.on].get())}")
                elif step.do == "publish":
                    version = await publish[step.on].publish(Item(0, _values(0, step.size)))
                    if version <= newest[step.on]:
                        seen.append(f"version {version} after {newest[step.on]}")
                    newest[step.on] = version
                elif step.do == "close":
                    publish[step.on].close()
                elif step.do == "idle":
                    await asyncio.sleep(idle)
                else:
                    before = read[step.on].version
                    if step.do == "newer":
                        await read[step.on].get(newer_than=step.than)
                    elif read[step.on].get_nowait() is None and read[step.on].version != before:
                        seen.append("a version without its value")
                    if step.do == "newer" and read[step.on].version <= step.than:
                        seen.append(f"version {read[step.on].version} is not newer")
            except EndOfChannel:
                if step.do == "get":
                    seen.append(f"{step.on}: end")
            except (NoReceivers, ChannelClosed):
                pass
        return seen


class Rank(Forked):
    """Pulls micro-batches, and gives pulls up now and then."""

    async def pull(
        self,
        seed: int,
        samples: ra.Receiver[list[int]],
        say: dict[int, ra.Sender[int]],
        hear: dict[int, ra.Receiver[int]],
    ) -> list[int]:
        """The calls of ``agree``, the micro-batches, and the sum of the samples."""
        rng, calls = Random(seed), 0

        async def agree(count: int) -> int:
            nonlocal calls
            calls += 1
            for sender in say.values():
                await sender.put(count)
            return max([count, *[await receiver.get() for receiver in hear.values()]])

        batches = BatchResizingIterator(
            samples, ListOps[int](length=lambda sample: sample),
            total_batch_size=12, max_tokens_per_micro_batch=20, balance_window=4, agree=agree,
        )  # fmt: skip
        found: list[list[int]] = []
        while True:
            pull = asyncio.ensure_future(anext(batches))
            if rng.random() < 0.7:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                pull.cancel()
            try:
                found.append(await pull)
            except asyncio.CancelledError:
                continue
            except StopAsyncIteration:
                return [calls, len(found), sum(map(sum, found))]


def _values(number: int, size: int) -> NDArray[np.uint8]:
    return np.full(size, number % 251, np.uint8)


def _number(item: Item) -> str:
    right = (item.values[:: max(1, len(item.values) // 1000)] == item.number % 251).all()
    return str(item.number) if right else f"item {item.number} has changed"


# ---- running them


async def _begin(cluster: ra.Cluster, program: Program, idle: float) -> tuple[list[Any], list[Any]]:
    """Start the program; the calls of its workers, and of its ranks."""
    players = await cluster.launch(Player, count=len(program.workers))
    channels = [
        cluster.channel(Item, name=f"channel {number}", capacity=capacity)
        for number, (_, _, capacity) in enumerate(program.channels)
    ]
    latest = [
        cluster.latest(Item, name=f"latest {number}") for number in range(len(program.latest))
    ]
    calls = [
        players[worker].call(
            Player.play,
            list(steps),
            idle,
            {n: one.sender for n, one in enumerate(channels) if program.channels[n][0] == worker},
            {n: one.receiver for n, one in enumerate(channels) if program.channels[n][1] == worker},
            {n: one.sender for n, one in enumerate(latest)},
            {n: one.receiver for n, one in enumerate(latest)},
        )
        for worker, steps in enumerate(program.workers)
    ]
    return calls, await _begin_ranks(cluster, program)


async def _begin_ranks(cluster: ra.Cluster, program: Program) -> list[Any]:
    if not program.ranks:
        return []
    rng = Random(program.seed)
    ranks = await cluster.launch(Rank, count=program.ranks)
    samples = [
        cluster.channel(list[int], name=f"samples {rank}", capacity=64)
        for rank in range(program.ranks)
    ]
    counts = {
        (of, to): cluster.channel(int, name=f"count {of} {to}")
        for of in range(program.ranks)
        for to in range(program.ranks)
        if of != to
    }
    for channel in samples:
        left = 24
        with channel.sender as sender:
            while left:
                size = min(left, rng.randint(1, 7))
                await sender.put([rng.randint(1, 20) for _ in range(size)])
                left -= size
    return [
        ranks[rank].call(
            Rank.pull,
            rng.randrange(2**32),
            samples[rank].receiver,
            {to: one.sender for (of, to), one in counts.items() if of == rank},
            {of: one.receiver for (of, to), one in counts.items() if to == rank},
        )
        for rank in range(program.ranks)
    ]


def _ranks_wrong(results: list[Any]) -> list[str]:
    """Ranks call ``agree`` once for each of six windows, and make equally many micro-batches."""
    found = [f"agree was called {one[0]} times" for one in results if one[0] != 6]
    if len({one[1] for one in results}) > 1:
        found.append(f"ranks made {[one[1] for one in results]} micro-batches")
    return found


def _compare(expected: list[list[str]], results: list[Any], program: Program) -> list[str]:
    """What workers saw that they should not have."""
    return [
        f"Player[{worker}] saw {seen}, not {should}"
        for worker, (should, seen) in enumerate(zip(expected, results, strict=True))
        if seen is not None and seen != should
    ]


def run_local(program: Program) -> list[str]:
    """Violations of a run in virtual time."""
    stuck, expected = reference(program)

    async def main() -> list[str]:
        async with ra.Cluster.local(deadlock_after=None) as cluster:
            calls, ranks = await _begin(cluster, program, idle=60.0)
            tasks = [asyncio.ensure_future(_result(call)) for call in [*calls, *ranks]]
            await asyncio.sleep(3600)
            await wait_all_blocked()
            waits = [one for one in cluster.waits() if one.party.startswith("Player")]
            seen = {(one.party.removesuffix(".play"), one.operation, one.channel) for one in waits}
            found = []
            if seen != stuck:
                found.append(f"the report says that {sorted(seen)} wait, not {sorted(stuck)}")
            results = [task.result() if task.done() else None for task in tasks]
            found += _compare(expected, results[: len(calls)], program)
            found += _ranks_wrong(results[len(calls) :])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    loop = VirtualLoop(program.seed, max_steps=1_000_000, trace_lines=0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


async def _result(call: Any) -> Any:
    return await call


def run_processes(program: Program) -> list[str]:
    """Violations of a run with a process for each worker."""
    stuck, expected = reference(program)
    deadlock.PERIOD = 0.05

    async def main() -> list[str]:
        results: list[Any] = []
        said = ""
        try:
            async with ra.Cluster.process(deadlock_after=AFTER) as cluster:
                calls, ranks = await _begin(cluster, program, idle=IDLE)
                results = await asyncio.gather(*calls)
                found = _ranks_wrong(await asyncio.gather(*ranks))
        except ra.Deadlock as error:
            said, found = str(error), []
        except BaseExceptionGroup as several:
            deadlocks, others = several.split(ra.Deadlock)
            said, found = _texts(deadlocks), [f"failed: {others!r}"] if others else []
        seen = {(party, operation, channel) for party, operation, channel in WAITED.findall(said)}
        if seen != stuck:
            found.append(f"the report says that {sorted(seen)} wait, not {sorted(stuck)}")
        return found + (_compare(expected, results, program) if results else [])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _texts(several: BaseException | None) -> str:
    if isinstance(several, BaseExceptionGroup):
        return "\n".join(map(_texts, several.exceptions))
    return "" if several is None else str(several)


RUNS: Final[dict[str, Callable[[Program], list[str]]]] = {
    "local": run_local,
    "process": run_processes,
}


def judge(seed: int, backend: str) -> list[str]:
    """Violations of the program of this seed."""
    try:
        return RUNS[backend](generate(seed, processes=backend == "process"))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
