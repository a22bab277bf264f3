"""The schedule of somebody who knows only how lengths are distributed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlinf_async.simulate import SimulationConfig, simulate
from rlinf_async.simulate.bounds import TOLERANCE, all_alike, oracle
from tests.simulate.kit import small


def free_of_moves(**work: Any) -> SimulationConfig:
    """Instances of one device; nothing takes time but decoding and training."""
    config = small(**work)
    free = {"load_seconds": 0.0, "move_seconds": 0.0, "prefill_seconds": 0.0}
    return msgspec.structs.replace(
        config,
        generation=msgspec.structs.replace(config.generation, **free),
        actor=msgspec.structs.replace(
            config.actor, rescale_seconds=0.0, move_seconds=0.0, step_seconds=0.0
        ),
        hardware=msgspec.structs.replace(config.hardware, instance_widths=(1,)),
    )


@pytest.mark.parametrize("prompts", [1.0, 12.0])
def test_knowing_the_lengths_is_never_worse(prompts: float) -> None:
    config = small(prompts_per_device=prompts)
    lengths = simulate(config).lengths
    known = oracle(config, lengths)
    assert known.seconds <= (1.0 + TOLERANCE) * all_alike(config, lengths).seconds


def test_of_equal_responses_there_is_nothing_to_know() -> None:
    config = small(prompts_per_device=8.0, mini_batches=1)
    lengths = [[500] * config.samples]
    known, alike = oracle(config, lengths), all_alike(config, lengths)
    assert alike.seconds == pytest.approx(known.seconds, rel=2 * TOLERANCE)
    assert alike.ranks == known.ranks == [(8,)]


def test_tokens_are_made_by_as_many_responses_as_are_that_long() -> None:
    """Half of 64 responses have 100 tokens, half of them 300, on 8 devices."""
    config = free_of_moves(prompts_per_device=2.0, mini_batches=1)
    generation, actor = config.generation, config.actor
    eight, four = (
        generation.decode_seconds + running * generation.sequence_seconds for running in (8, 4)
    )
    lengths = [[100] * 32 + [300] * 32]
    tokens = sum(lengths[0]) + 64 * config.work.prompt_tokens
    training = (300 * 4 + 100 * 4 + 8 * config.work.prompt_tokens) * actor.token_seconds
    assert training * 8 == pytest.approx(tokens * actor.token_seconds)  # a short group, and a long
    found = all_alike(config, lengths)
    assert found.seconds == pytest.approx(100 * eight + 200 * four + training)


def test_the_actor_trains_what_is_there_beside_what_is_not() -> None:
    """The short half is a mini-batch, which is trained while the long half is generated."""
    config = free_of_moves(prompts_per_device=2.0, mini_batches=2)
    balanced = msgspec.structs.replace(config.actor, token_seconds=4e-4)
    config = msgspec.structs.replace(config, actor=balanced)
    lengths = [[100] * 32 + [300] * 32]
    found = all_alike(config, lengths)
    [(first, last)] = found.ranks
    assert first < last == 8
    one_after_the_other = all_alike(
        msgspec.structs.replace(config, work=msgspec.structs.replace(config.work, mini_batches=1)),
        lengths,
    )
    assert found.seconds < one_after_the_other.seconds


def test_iterations_that_overlap_are_refused() -> None:
    config = small(max_staleness=1)
    with pytest.raises(ValueError, match="max_staleness is above 0"):
        all_alike(config, [[100] * config.samples])
