"""Programs nobody thought of, over every transport.

What they did not hold, before there was one delivery mechanism, stands in `test_found`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.channels.model.kit import hold, holds
from tests.channels.model.program import Program
from tests.channels.model.strategies import programs


@pytest.mark.parametrize("part", range(4))
def test_programs_over_a_channel_of_this_process(part: int) -> None:
    hold(range(part * 375, part * 375 + 375), "local")


@pytest.mark.parametrize("part", range(3))
def test_programs_over_a_unix_socket(part: int) -> None:
    hold(range(part * 100, part * 100 + 100), "unix")


@pytest.mark.parametrize("part", range(2))
def test_programs_over_tcp(part: int) -> None:
    hold(range(part * 90, part * 90 + 90), "tcp")


@settings(max_examples=80)
@given(programs())
def test_programs_of_hypothesis_over_a_channel_of_this_process(program: Program) -> None:
    holds(program, "local")


@settings(max_examples=30)
@given(programs(wire=True))
def test_programs_of_hypothesis_over_a_unix_socket(program: Program) -> None:
    holds(program, "unix")
