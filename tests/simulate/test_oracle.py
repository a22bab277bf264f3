"""What somebody who knows every length could do: between the bound and every policy."""

from __future__ import annotations

import msgspec
import pytest

from rlinf_async.simulate import simulate
from rlinf_async.simulate.bounds import TOLERANCE, at_best, oracle
from tests.simulate.kit import small


@pytest.mark.parametrize("prompts", [1.0, 12.0])
@pytest.mark.parametrize("policy", ["static", "tail", "longest_first"])
def test_no_policy_is_faster_and_it_is_not_faster_than_the_bound(
    policy: str, prompts: float
) -> None:
    config = small(policy, prompts_per_device=prompts)
    record = simulate(config)
    known = oracle(config, record.lengths)
    assert known.seconds <= (1.0 + TOLERANCE) * record.result.seconds
    assert known.seconds >= at_best(config, record.lengths)


def test_of_equal_responses_it_keeps_all_devices_busy() -> None:
    """Every token at the best batch, and all devices for training: nothing else takes time."""
    config = small(prompts_per_device=8.0, mini_batches=1)
    free = {"load_seconds": 0.0, "move_seconds": 0.0, "prefill_seconds": 0.0}
    generation = msgspec.structs.replace(config.generation, **free)
    actor = msgspec.structs.replace(
        config.actor, rescale_seconds=0.0, move_seconds=0.0, step_seconds=0.0
    )
    config = msgspec.structs.replace(config, generation=generation, actor=actor)
    lengths = [[500] * config.samples]
    found = oracle(config, lengths)
    token = (generation.decode_seconds + 8 * generation.sequence_seconds) / 8
    decoding = config.samples * 500 * token / 8
    training = config.samples * (500 + config.work.prompt_tokens) * actor.token_seconds / 8
    assert found.ranks == [(8,)]
    assert found.seconds == pytest.approx(decoding + training, rel=2 * TOLERANCE)


def test_longer_responses_take_it_longer() -> None:
    config = small(iterations=1)
    lengths = [100 + 7 * number for number in range(config.samples)]
    longer = [*lengths[:-1], 2400]
    assert oracle(config, [longer]).seconds > oracle(config, [lengths]).seconds


def test_iterations_that_overlap_are_refused() -> None:
    config = small(max_staleness=1)
    with pytest.raises(ValueError, match="max_staleness is above 0"):
        oracle(config, [[100] * config.samples])
