"""The engine's analytic times are those of a token-by-token computation."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from rlinf_async.backends.cost.config import CostEngineConfig, Empirical, LogNormal
from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.backends.language import EngineDied
from rlinf_async.messages.language import Prompt, Request, Sampling
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.scheduling.policy import Predictor
from rlinf_async.testing import VirtualLoop, run_on


def request(number: int, *, longest: int = 10_000) -> Request:
    prompt = Prompt(index=0, text="", token_ids=np.ones(4, np.int32), verifier="", reference="")
    return Request(
        group=number,
        index=0,
        group_size=1,
        iteration=0,
        min_version=0,
        prompt=prompt,
        sampling=Sampling(max_tokens=longest),
        seed=number,
    )


def engine(**changes: object) -> CostEngine:
    values = {
        "decode_seconds": 0.5,
        "sequence_seconds": 0.25,
        "prefill_seconds": 0.0,
        "lengths": LogNormal(median=20.0, ratio=4.0, longest=100),
        "slots": 3,
    } | changes
    return CostEngine(CostEngineConfig(**values))  # type: ignore[arg-type]


def by_tokens(lengths: list[int], slots: int, fixed: float, each: float) -> list[float]:
    """When each finishes, a step at a time."""
    left, ends = dict(enumerate(lengths)), [0.0] * len(lengths)
    running, now = list(left)[:slots], 0.0
    waiting = list(left)[slots:]
    while running:
        now += fixed + each * len(running)
        for one in list(running):
            left[one] -= 1
            if not left[one]:
                ends[one] = now
                running.remove(one)
                if waiting:
                    running.append(waiting.pop(0))
    return ends


def test_two_requests_of_one_name_are_two() -> None:
    """As after the death of an episode's worker, whose turn is asked for again."""

    async def main(*, dies: bool) -> list[int | str]:
        one = engine()
        await one.start()
        drawing = [asyncio.create_task(one.generate(request(1))) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert one.running == 2
        if dies:
            one.die()
        done, _ = await asyncio.wait(drawing, timeout=1000.0)
        assert len(done) == 2
        assert one.running == 0
        found = await asyncio.gather(*drawing, return_exceptions=True)
        return [str(n) if isinstance(n, BaseException) else len(n.token_ids) for n in found]

    first, second = run_on(VirtualLoop(None), main(dies=False))
    assert first == second
    assert run_on(VirtualLoop(None), main(dies=True)) == ["the engine crashed"] * 2


def test_samples_end_when_they_would_token_by_token() -> None:
    async def main() -> tuple[list[float], list[int]]:
        one = engine()
        await one.start()
        loop = asyncio.get_running_loop()

        async def generate(number: int) -> tuple[float, int]:
            made = await one.generate(request(number))
            return loop.time(), len(made.token_ids)

        found = await asyncio.gather(*(generate(n) for n in range(8)))
        return [when for when, _ in found], [count for _, count in found]

    loop = VirtualLoop(None)
    ends, lengths = run_on(loop, main())
    assert ends == pytest.approx(by_tokens(lengths, 3, 0.5, 0.25))
    assert loop.steps < 30 * 8  # by samples, not by tokens


def test_an_aborted_request_goes_on_after_its_tokens_elsewhere() -> None:
    async def main() -> tuple[int, int, list[int]]:
        first, second = engine(), engine()
        for one in (first, second):
            await one.start()
        await first.load(WeightUpdate(1, (), 1))
        await second.load(WeightUpdate(2, (), 2))
        asked = request(1)
        running = asyncio.create_task(first.generate(asked))
        await asyncio.sleep(0.75 * 5 + 0.1)
        await first.abort()
        part = await running
        assert part.finish == "abort"
        whole = await second.generate(msgspec.structs.replace(asked, partial=part))
        return len(part.token_ids), len(whole.token_ids), whole.version.tolist()

    made, total, versions = run_on(VirtualLoop(None), main())
    assert made == 5
    assert total == engine().config.lengths.length(1)
    assert versions == [1] * 5 + [2] * (total - 5)


def test_new_weights_and_wider_devices_change_what_is_running() -> None:
    async def main() -> tuple[float, list[int]]:
        one = engine(load_seconds=10.0, wider=1.0, lengths=Empirical(tokens=(10,)))
        await one.start()
        await one.load(WeightUpdate(0, (), 0))
        began = asyncio.get_running_loop().time()
        running = asyncio.create_task(one.generate(request(0)))
        await asyncio.sleep(0.75 * 4)
        await one.load(WeightUpdate(1, (), 1))
        one.change(width=3.0)
        made = await running
        return asyncio.get_running_loop().time() - began, made.version.tolist()

    seconds, versions = run_on(VirtualLoop(None), main())
    assert seconds == pytest.approx(4 * 0.75 + 10.0 + 6 * 0.25)
    assert versions == [0] * 4 + [1] * 6


def test_a_wider_instance_reads_prompts_as_much_faster_as_it_decodes() -> None:
    async def main(width: float) -> float:
        one = engine(prefill_seconds=1.0, wider=0.5, lengths=Empirical(tokens=(10,)))
        await one.start()
        one.change(width=width)
        await one.generate(request(0))
        return asyncio.get_running_loop().time()

    alone, wide = (run_on(VirtualLoop(None), main(width)) for width in (1.0, 4.0))
    assert wide == pytest.approx(alone / 2)


def test_a_dead_engine_fails_its_requests() -> None:
    async def main() -> None:
        one = engine()
        await one.start()
        running = asyncio.create_task(one.generate(request(0)))
        await asyncio.sleep(1.0)
        one.die()
        with pytest.raises(EngineDied):
            await running
        with pytest.raises(EngineDied):
            await one.generate(request(1))

    run_on(VirtualLoop(None), main())


def test_lengths_have_the_median_and_tail_that_were_asked_for() -> None:
    lengths = LogNormal(median=3500.0, ratio=8.0, longest=28_000)
    many = lengths.many(40_000, seed=3)
    assert np.median(many) == pytest.approx(3500.0, rel=0.02)
    assert np.quantile(many, 0.98) == pytest.approx(3500.0 * 8 ** (2.0537 / 2.3263), rel=0.05)
    assert many.max() == 28_000
    assert lengths.length(5) == lengths.length(5)


def test_who_has_come_far_is_expected_to_go_far() -> None:
    predictor = Predictor([10.0, 20.0, 90.0])
    assert predictor.left(0) == pytest.approx(40.0)
    assert predictor.left(15) == pytest.approx(40.0)
    assert predictor.left(20) == pytest.approx(70.0)
    assert predictor.left(95) >= 1.0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"decode_seconds": 0.0}, "decode_seconds is 0.0; it must be above 0"),
        ({"prefill_seconds": -1.0}, "prefill_seconds is -1.0; it must be at least 0"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
    ],
)
def test_a_cost_that_is_impossible_is_refused(values: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine(**values)
