"""Steps of several tasks in a written order."""

import asyncio

import pytest

from rlinf_async.testing import SequenceBroken, Sequencer, explore, run, wait_all_blocked


def test_steps_run_in_numeric_order_on_every_seed() -> None:
    async def main() -> list[int]:
        sequence = Sequencer()
        ran: list[int] = []

        async def steps(*numbers: int) -> None:
            for number in numbers:
                async with sequence(number):
                    ran.append(number)
                    await asyncio.sleep(0)

        await asyncio.gather(steps(1, 4), steps(0, 3), steps(2, 5))
        return ran

    assert all(ran == [0, 1, 2, 3, 4, 5] for ran in explore(main))


def test_a_step_whose_block_fails_lets_the_next_one_go_on() -> None:
    async def main() -> None:
        sequence = Sequencer()
        with pytest.raises(ValueError, match="block"):
            async with sequence(0):
                raise ValueError("block")
        async with sequence(1):
            pass

    run(main())


def test_a_repeated_step_is_an_error() -> None:
    async def main() -> None:
        sequence = Sequencer()
        async with sequence(0):
            pass
        with pytest.raises(SequenceBroken, match="step 0 was entered twice"):
            async with sequence(0):
                pass

    run(main())


def test_a_negative_step_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(SequenceBroken, match="numbered from 0"):
            async with Sequencer()(-1):
                pass

    run(main())


def test_a_step_cancelled_while_it_waits_breaks_the_steps_after_it() -> None:
    async def main() -> None:
        sequence = Sequencer()

        async def enter(step: int) -> None:
            async with sequence(step):
                pass

        given_up = asyncio.create_task(enter(1))
        waiting = asyncio.create_task(enter(2))
        await wait_all_blocked()
        given_up.cancel()
        with pytest.raises(SequenceBroken, match="step 2 cannot run: step 1 was cancelled"):
            await waiting
        with pytest.raises(SequenceBroken, match="step 3 cannot run"):
            await enter(3)

    explore(main, seeds=range(50))
