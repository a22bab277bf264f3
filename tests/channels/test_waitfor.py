"""Who waits for whom: the report that answers "why does nothing happen?"."""

from __future__ import annotations

import asyncio

from rlinf_async.channels import Channel, current_party
from rlinf_async.channels.statistics import Wait, find_cycle, render
from rlinf_async.testing import run
from tests.channels.transport import Transport


def wait_of(party: str, *unblockers: str, seconds: float = 1.0, channel: str = "c") -> Wait:
    return Wait(party, "get", channel, None, seconds, unblockers)


async def two_workers_that_wait_for_each_other() -> str:
    """Each wants to get before it puts: the report after 30 s."""
    questions = Channel(int, name="questions")
    answers = Channel(int, name="answers")

    async def work(party: str, gets: Channel[int], puts: Channel[int]) -> None:
        current_party.set(party)
        with gets.receiver.clone() as receiver, puts.sender.clone() as sender:
            await sender.put(await receiver.get())

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(work("Asker[0].run", answers, questions))
        answering = group.create_task(work("Answerer[0].run", questions, answers))
        await asyncio.sleep(30)  # virtual
        report = render([*questions.waits(), *answers.waits()])
        asking.cancel()
        answering.cancel()
    return report


def test_a_ring_is_named_with_its_parties_channels_and_times() -> None:
    title, *lines = run(two_workers_that_wait_for_each_other()).splitlines()
    assert title == "nobody can go on:"
    for line, who, channel, other in zip(
        sorted(lines),
        ("Answerer", "Asker"),
        ("questions", "answers"),
        ("Asker", "Answerer"),
        strict=True,
    ):
        assert line == (
            f"  {who}[0].run has waited 30.0 s to get on channel {channel!r}; "
            f"only {other}[0].run can end this wait"
        )


async def test_a_producer_that_is_gone_is_named_as_such() -> None:
    channel = Channel(int, name="numbers")
    waiting = asyncio.create_task(channel.receiver.get(key="env 3"))
    await asyncio.sleep(0)
    [wait] = channel.waits()
    assert find_cycle([wait]) == (wait,)
    waited = f"main has waited {wait.seconds:.1f} s"
    assert f"{waited} to get on channel 'numbers' (key env 3)" in str(wait)
    assert "no open sender: its producer is gone or was never started" in str(wait)
    channel.close()
    await asyncio.wait([waiting])
    assert waiting.exception() is not None


async def test_a_consumer_that_was_never_started_is_named_as_such() -> None:
    channel = Channel(int, name="numbers", capacity=1)
    channel.sender.put_nowait(0)
    waiting = asyncio.create_task(channel.sender.put(1))
    await asyncio.sleep(0)
    [wait] = channel.waits()
    assert wait.operation == "put"
    assert "no open receiver: its consumer is gone or was never started" in str(wait)
    assert channel.receiver.get_nowait() == 0
    await waiting


async def test_at_the_end_only_the_holder_of_a_lease_can_end_a_wait() -> None:
    channel = Channel(int, name="numbers")
    channel.sender.put_nowait(0)

    async def others_get() -> None:
        current_party.set("Env[1].run")
        async for _ in channel.receiver:
            raise AssertionError("the lease was acknowledged, so nothing can come")

    async with asyncio.TaskGroup() as group:
        group.create_task(others_get())  # a task of the block would count as the lease's holder
        async with channel.receiver.lease():
            channel.sender.close()
            await asyncio.sleep(0)
            [wait] = channel.waits()
            assert (wait.party, wait.unblockers) == ("Env[1].run", ("main",))


async def test_waits_are_told_oldest_first_and_by_who_made_them(transport: Transport) -> None:
    channel = Channel(int, name="numbers")
    sender, receiver = await transport.ends(channel)
    tasks: list[asyncio.Task[int]] = []
    for rank in range(3):
        current_party.set(f"Doubler[{rank}].run")
        tasks.append(asyncio.create_task(receiver.get(key=rank)))
        await transport.settle()
    assert [wait.party for wait in channel.waits()] == [f"Doubler[{rank}].run" for rank in range(3)]
    assert [wait.key for wait in channel.waits()] == ["0", "1", "2"]
    for rank in range(3):
        await sender.put(rank, key=rank)
    assert await asyncio.gather(*tasks) == [0, 1, 2]
    await transport.settle()
    assert channel.waits() == []


def test_a_party_that_runs_breaks_the_ring() -> None:
    waits = [wait_of("a", "b"), wait_of("b", "a", "somebody who runs")]
    assert find_cycle(waits) == ()
    assert render(waits).startswith("waiting:\n  a has waited")


def test_a_party_with_one_wait_that_can_end_is_free() -> None:
    assert find_cycle([wait_of("a", "b"), wait_of("b", "a"), wait_of("b", "runs")]) == ()


def test_a_ring_of_three_is_found_among_others() -> None:
    ring = [wait_of("a", "b"), wait_of("b", "c"), wait_of("c", "a")]
    free = wait_of("d", "runs", seconds=9.0)
    victim = wait_of("e", "a", seconds=8.0)
    assert set(find_cycle([free, victim, *ring])) == set(ring)
    assert render([free, victim, *ring]).splitlines()[4:] == [
        "also waiting:",
        f"  {free}",
        f"  {victim}",
    ]


def test_nobody_waiting_is_said_in_words() -> None:
    assert render([]) == "nobody waits on a channel"
    assert find_cycle([]) == ()
