"""Runs programs in a test, and says of one that fails how it is run again, as small as it gets."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.channels.model.generate import generate
from tests.channels.model.program import Program, as_test
from tests.channels.model.runners import Result, fails_so, kind_of, run
from tests.channels.model.shrink import shrink

SHRINK_SECONDS = 20.0
SHOWN = 2


def holds(program: Program, transport: str) -> None:
    """Run one program; fail with what does not hold of it.

    Raises:
        AssertionError: with what it is.
    """
    found = run(program, transport).violations
    assert not found, "\n".join([*found[:5], as_test(program, transport, "")])


def hold(seeds: Iterable[int], transport: str) -> None:
    """Run the programs of these seeds; of the first that fails, the smallest that does is shown."""
    failed: dict[int, Result] = {}
    for seed in seeds:
        result = run(generate(seed, transport), transport)
        if result.violations:
            failed[seed] = result
    if not failed:
        return
    seed, result = next(iter(failed.items()))
    kind = kind_of(result.violations[0])
    fails = fails_so(transport, kind, patience=1.0, tries=3)
    smallest = shrink(generate(seed, transport), fails, seconds=SHRINK_SECONDS)
    said = [
        f"seed {seed}: {what}" for seed, one in failed.items() for what in one.violations[:SHOWN]
    ]
    pytest.fail(
        "\n".join(said) + f"\nthe smallest like seed {seed}:\n\n"
        + as_test(smallest, transport, "\n".join(result.violations[:1])),
        pytrace=False,
    )  # fmt: skip
