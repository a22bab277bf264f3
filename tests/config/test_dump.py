"""A configuration written as TOML reads back as the same configuration."""

from __future__ import annotations

import math
import pathlib
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.config import Document, to_toml
from tests.config.example import Actor, Constant, Env, Kind, Linear, Optimizer, Run

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
optimizers = st.builds(
    Optimizer,
    kind=st.sampled_from(Kind),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    clip=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
actors = st.builds(
    Actor,
    optimizer=optimizers,
    hidden=st.lists(st.integers(-(2**40), 2**40), max_size=3).map(tuple),
    mini_batch=st.integers(1, 1000).map(lambda half: 2 * half),
    decay=st.builds(Linear, until=st.integers(0, 9)) | st.just(Constant()),
)
runs = st.builds(
    Run,
    name=text,
    folder=st.none() | st.just(pathlib.Path("some/folder")),
    actor=actors,
    envs=st.lists(st.builds(Env, id=text, options=st.dictionaries(text, st.integers(0, 5)))),
    slow=st.dictionaries(text, optimizers, max_size=2),
    offload=st.booleans(),
)


@given(runs)
def test_reading_what_was_written_gives_the_same_configuration(run: Run) -> None:
    assert Document("dumped.toml", to_toml(run)).to(Run) == run


def test_defaults_are_written_too_so_that_the_file_says_what_was_run() -> None:
    assert tomllib.loads(to_toml(Run()))["actor"]["optimizer"] == {
        "kind": "adam",
        "lr": 1e-3,
        "clip": 0.5,
    }


def test_plain_settings_come_before_the_tables() -> None:
    lines = to_toml(Run(offload=True)).splitlines()
    assert lines.index("offload = true") < lines.index("[actor]") < lines.index("[actor.optimizer]")


def test_numbers_that_are_not_finite_are_written_as_toml_has_them() -> None:
    class Numbers(msgspec.Struct):
        low: float
        odd: float

    read = tomllib.loads(to_toml(Numbers(-math.inf, math.nan)))
    assert read["low"] == -math.inf
    assert math.isnan(read["odd"])


def test_a_value_that_toml_cannot_hold_is_named() -> None:
    class Odd(msgspec.Struct):
        value: complex

    with pytest.raises(TypeError, match="value: TOML cannot hold a complex"):
        to_toml(Odd(1j))
