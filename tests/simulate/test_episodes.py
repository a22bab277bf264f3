"""Simulated episodes: as many turns and waits as were drawn, and the throughput of real ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.backends.cost.config import (
    CostEngineConfig,
    CostTrainerConfig,
    Empirical,
    EpisodeCostConfig,
    LogNormal,
    LogNormalSeconds,
)
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.cli import main
from rlinf_async.config import to_toml
from rlinf_async.episodes import Episode, Parsed, ToolCall
from rlinf_async.messages.language import Sample, Sampling, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.trace import Span
from rlinf_async.simulate import SimulationConfig, SimulationRecord, simulate
from rlinf_async.simulate.config import FaultConfig, HardwareConfig, ScalingPolicyConfig, WorkConfig
from rlinf_async.testing import run
from rlinf_async.workers.episode import EpisodeConfig
from rlinf_async.workers.episode.worker import Language
from tests.simulate.kit import small
from tests.workers.episode.kit import Acting, Flow, language, replaced, task, wait
from tests.workers.rollout.language_kit import Rollout, update

TURNS = (1, 2, 2, 3, 5)
WAITS = (0.5, 1.0, 4.0)


def with_episodes(
    faults: FaultConfig | None = None, policy: str = "static", **episode: Any
) -> SimulationConfig:
    """Two short iterations of episodes."""
    costs = EpisodeCostConfig(**{"turns": TURNS, "tool_seconds": WAITS} | episode)
    return msgspec.structs.replace(small(policy, faults=faults), episode=costs)


def spoken(record: SimulationRecord) -> tuple[int, float, int]:
    """Turns, seconds of tools and cut episodes."""
    result = record.result
    return result.turns, round(result.tool_seconds, 6), result.cut


@pytest.mark.parametrize(
    ("policy", "workers"),
    [("static", 1), ("static", 3), ("tail", 2), ("greedy", 2), ("longest_first", 2), ("turns", 2)],
)
@pytest.mark.parametrize(
    "faults",
    [FaultConfig(), FaultConfig(crash_every=8.0, slow_every=9.0, host_lost_every=12.0)],
    ids=["calm", "faults"],
)
def test_every_episode_is_trained_once_with_the_turns_and_waits_of_its_seed(
    policy: str, workers: int, faults: FaultConfig
) -> None:
    record = simulate(with_episodes(faults, policy, workers=workers), check=True)
    assert not record.result.fault
    assert (record.result.decisions > 0) == (policy != "static")
    assert Counter(Counter(record.trained).values()) == {1: 2 * small().samples}
    assert spoken(record) == spoken(simulate(with_episodes()))
    assert record.result.turns > 2 * len(record.trained)


def test_limits_cut_episodes() -> None:
    record = simulate(with_episodes(max_turns=2))
    share = sum(one > 2 for one in TURNS) / len(TURNS)
    assert record.result.cut / len(record.trained) == pytest.approx(share, abs=0.15)
    assert record.result.turns < simulate(with_episodes()).result.turns
    tokens = simulate(with_episodes(given_tokens=5000, max_tokens=5000))
    assert tokens.result.cut == pytest.approx(
        len(tokens.trained) * (1 - TURNS.count(1) / len(TURNS)), abs=10
    )


def test_longer_waits_and_fewer_open_episodes_take_longer() -> None:
    several: list[dict[str, Any]] = [
        {}, {"tool_seconds": (40.0,)}, {"tool_seconds": (40.0,), "concurrent": 4},
    ]  # fmt: skip
    seconds = [simulate(with_episodes(**one)).result.seconds for one in several]
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("engines", [1, 3])
def test_turns_find_what_was_read_in_the_prefix_cache(engines: int) -> None:
    """A prompt is read once by an episode, and so is each answer: what later turns read is new."""
    config = with_episodes(turns=(4,), tool_seconds=(0.0,), given_tokens=50)
    devices = engines + 1
    hardware = HardwareConfig(devices=devices, devices_per_host=devices, actor_devices=1)
    work = msgspec.structs.replace(config.work, mini_batches=1, iterations=1)
    config = msgspec.structs.replace(config, hardware=hardware, work=work)
    record = simulate(config)
    read = len(record.trained) * (config.work.prompt_tokens + 3 * 50)
    seconds = record.result.spent["prefill"] * record.result.seconds * devices
    # With several engines a turn goes elsewhere where its own one has no room.
    least = read * config.generation.prefill_seconds
    assert seconds == pytest.approx(least, rel=1e-6 if engines == 1 else 0.25)


def test_seconds_are_drawn_from_a_distribution() -> None:
    waits = LogNormalSeconds(median=2.0, ratio=10.0, longest=15.0)
    costs = EpisodeCostConfig(turns=(2,), tool_seconds=waits)
    drawn = sorted(costs.seconds_of(seed, 1) for seed in range(4000))
    assert drawn[2000] == pytest.approx(2.0, rel=0.1)
    assert drawn[-1] == 15.0
    assert drawn[3800] == pytest.approx(2.0 * 10.0 ** (1.645 / 2.326), rel=0.15)
    assert costs.seconds_of(7, 1) == costs.seconds_of(7, 1) != costs.seconds_of(7, 2)


ENGINE = ToyEngineConfig(
    slots=8,
    seconds_per_step=0.02,
    seconds_per_sequence=0.002,
    mean_tokens=40,
    tail=0.6,
    vocabulary=16,
)
GROUPS, GROUP = 24, 4


def calls(text: str) -> Parsed:
    """Every answer is a call that waits as long as its letters say."""
    seconds = 1.0 + sum(map(ord, text)) % 30 / 5
    return Parsed(text=text, tool_calls=(ToolCall(name="wait", arguments={"seconds": seconds}),))


async def works(episode: Episode) -> float:
    """So many turns as the question says, with calls in between."""
    chat = episode.chat(tools=[wait])
    turn = await chat.turn()
    for _ in range(TURNS[episode.task.index % len(TURNS)] - 1):
        await chat.answer(turn)
        turn = await chat.turn()
    return 0.0


class Calling(Acting):
    """Its model calls a tool in each answer."""

    async def setup(self) -> None:
        template, _, decode = language()
        self._language = Language(template, calls, decode)


async def real_run() -> tuple[float, list[Sample], list[Span]]:
    """Real episodes on two engines: the seconds of all, the samples, the spans."""
    config = EpisodeConfig(run="works", max_tokens=100_000)
    async with ra.Cluster.local() as cluster:
        flow = Flow(cluster)
        weights = cluster.latest(WeightUpdate, name="weights")
        taken = cluster.channel(WeightsTaken, name="taken", capacity=100)
        rollouts = await cluster.launch(Rollout, ENGINE, count=2)
        workers = await cluster.launch(Calling, works, config, count=1)
        with flow.tasks.receiver, flow.episodes.sender, flow.requests.sender, taken.receiver:
            serving = rollouts.call(
                Rollout.serve,
                flow.requests.receiver,
                flow.turns.sender,
                weights.receiver,
                taken.sender,
            )
            acting = flow.run(workers)
            await weights.sender.publish(update(0))
            began = asyncio.get_running_loop().time()
            for group in range(GROUPS):
                for index in range(GROUP):
                    one = task(group, index=index, group_size=GROUP)
                    sampling = Sampling(max_tokens=400)
                    await flow.put(replaced(one, seed=GROUP * group + index, sampling=sampling))
            flow.tasks.sender.close()
            await acting
            seconds = asyncio.get_running_loop().time() - began
            flow.requests.close()
            await serving
            samples = [await flow.episodes.receiver.get() for _ in range(GROUPS * GROUP)]
        return seconds, samples, await cluster.spans()


def simulation_of(samples: list[Sample], spans: list[Span]) -> SimulationConfig:
    """The same run, from what was measured of it."""
    answers = [span.stop - span.start for one in samples for span in one.turns]
    waits = [one.duration / 1e9 for one in spans if one.name == "tool wait"]
    records = [one.episode for one in samples if one.episode is not None]
    assert len(waits) == sum(one.turns for one in records) - len(samples)
    return SimulationConfig(
        generation=CostEngineConfig(
            decode_seconds=ENGINE.seconds_per_step,
            sequence_seconds=ENGINE.seconds_per_sequence,
            prefill_seconds=0.0,
            slots=ENGINE.slots,
            lengths=Empirical(tokens=tuple(answers)),
        ),
        actor=CostTrainerConfig(token_seconds=1e-9),
        work=WorkConfig(
            iterations=1, prompts_per_device=GROUPS / 3, group_size=GROUP, mini_batches=1
        ),
        hardware=HardwareConfig(devices=3, devices_per_host=3, actor_devices=1),
        scheduler=ScalingPolicyConfig(policy="static"),
        episode=EpisodeCostConfig(
            turns=tuple(one.turns for one in records), tool_seconds=tuple(waits)
        ),
    )


def test_measured_turns_and_waits_predict_the_throughput_of_a_run() -> None:
    """Within 15 %, in the mean of four seeds: a simulation draws other episodes than the run had.
    Without the waits, or with a single turn, it would be far off."""
    seconds, samples, spans = run(real_run(), max_steps=100_000_000)
    config = simulation_of(samples, spans)
    assert mean_seconds(config) == pytest.approx(seconds, rel=0.15)
    for wrong in ({"tool_seconds": (0.0,)}, {"turns": (1,)}):
        episode = msgspec.structs.replace(config.episode, **wrong)
        assert mean_seconds(msgspec.structs.replace(config, episode=episode)) < 0.8 * seconds


def mean_seconds(config: SimulationConfig) -> float:
    """Mean over seeds."""
    runs = [simulate(msgspec.structs.replace(config, seed=seed)) for seed in range(4)]
    return sum(one.result.seconds for one in runs) / len(runs)


def test_the_table_says_what_episodes_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "episodes.toml"
    file.write_text(to_toml(with_episodes(tool_seconds=LogNormalSeconds(median=1.0))))
    assert main(["simulate", str(file)]) == 0
    printed = capsys.readouterr().out
    for column in ("samples/s", "turns", "tool s", "cut"):
        assert column in printed
    assert main(["simulate", str(file), "--compare", "static,tail"]) == 0
    assert "tail" in capsys.readouterr().out
    assert main(["simulate", str(file), "--oracle"]) == 2
    assert "the oracle plans single answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"turns": (0, 1)}, "turns has 0; an episode has at least 1 turn"),
        ({"tool_seconds": ()}, "it must hold at least one number of seconds"),
        ({"tool_seconds": (1.0, -1.0)}, "none below 0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"given_tokens": -1}, "given_tokens is -1"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        with_episodes(**wrong)


def test_single_answers_are_as_before() -> None:
    lengths = LogNormal(median=300.0, ratio=8.0, longest=2400)
    assert EpisodeCostConfig().mean_turns == 1.0
    assert small().mean_tokens == 300 + lengths.many(4096, 1).mean()
