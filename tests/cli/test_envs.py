"""``rlinf-async envs``: what it says of simulators that are there, missing, broken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from rlinf_async.messages.spaces import (
    ActionSpec,
    EnvSpec,
    Factor,
    ObservationPart,
    ObservationSpec,
)
from rlinf_async.runtime.jobs.embodied.choosing import asked, fit_of
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.simulators import SIMULATORS, Simulator, simulator_of
from tests.cli.conftest import CommandLine

ABSENT = Simulator(
    name="absent",
    modules=("no_such_simulator",),
    distribution="absent",
    install="absent",
    examples=(EnvConfig(id="Absent/One-v0"),),
    prefix="Absent/",
    note="needs a robot",
)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """One simulator that is installed, and one that is not."""
    here = msgspec.structs.replace(SIMULATORS[0], examples=SIMULATORS[0].examples[:1])
    monkeypatch.setattr("rlinf_async.workers.env.simulators.SIMULATORS", (here, ABSENT))


@pytest.mark.usefixtures("two")
def test_the_list_has_spaces_policies_and_what_is_missing(command_line: CommandLine) -> None:
    code, out, err = command_line.run("envs")
    assert (code, err) == (0, "")
    [row] = [line for line in out.splitlines() if "CartPole-v1" in line]
    assert "state 'state' [4]" in row
    assert "2 choices" in row
    assert "mlp_categorical" in row
    assert "absent               pip install absent   (needs a robot)" in out


@pytest.mark.usefixtures("two")
def test_scripts_get_json(command_line: CommandLine) -> None:
    code, out, _ = command_line.run("envs", "--json")
    assert code == 0
    here, absent = json.loads(out)
    assert here["envs"][0]["policy"] == "mlp_categorical"
    assert (absent["version"], absent["envs"]) == (None, [])
    assert absent["install"] == "pip install absent"


def test_one_environment_of_a_file_with_arguments(command_line: CommandLine) -> None:
    name = f"{Path('examples/custom_env.py').resolve()}:PushDisc"
    code, out, _ = command_line.run("envs", name, "--kwargs", '{"goal_radius": 0.1}')
    assert code == 0
    assert "takes        2 numbers" in out
    assert "policy       mlp_gaussian" in out


def test_an_unknown_environment_ends_with_1_and_the_nearest_name(
    command_line: CommandLine,
) -> None:
    code, out, _ = command_line.run("envs", "CartPol-v1")
    assert code == 1
    assert "did you mean 'CartPole-v1'" in out


def test_arguments_that_are_no_object_are_refused(command_line: CommandLine) -> None:
    code, _, err = command_line.run("envs", "CartPole-v1", "--kwargs", "[1]")
    assert code == 2
    assert "--kwargs [1]" in err
    assert "give an object" in err
    code, _, err = command_line.run("envs", "CartPole-v1", "--simulator", "async")
    assert code == 2
    assert "needs entry_point" in err


@pytest.mark.usefixtures("two")
def test_an_id_of_a_missing_simulator_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlinf_async.config import ConfigError
    from rlinf_async.workers.env import describe_env

    assert simulator_of("CartPole-v1") is None
    with pytest.raises(ConfigError, match=r"is of absent, .*: pip install absent"):
        describe_env(EnvConfig(id="Absent/One-v0"))


def crashing() -> None:
    """What a simulator does that finds no driver."""
    os.abort()


def test_a_simulator_that_crashes_is_a_problem_and_not_the_end() -> None:
    fit = asked(EnvConfig(entry_point="tests.cli.test_envs:crashing"))
    assert fit.spec is None
    assert fit.problem == (
        "the process ended by itself: killed by SIGABRT; under way was env "
        "tests.cli.test_envs:crashing, while it was made"
    )


IMAGE = ObservationPart(name="image", kind="image", shape=(32, 32, 3))
TEXT = ObservationPart(name="instruction", kind="text", shape=(16,))
NUMBERS = ActionSpec((Factor("continuous", 2),))


def test_images_get_a_cnn_and_texts_without_images_get_no_policy() -> None:
    assert fit_of(EnvSpec(observation=ObservationSpec((IMAGE,)), action=NUMBERS)).policy == "cnn"
    fit = fit_of(EnvSpec(observation=ObservationSpec((TEXT,)), action=NUMBERS))
    assert fit.policy == ""
    assert "an MLP takes one vector of numbers" in fit.problem


def test_images_with_an_instruction_get_the_vision_language_action_policy() -> None:
    pytest.importorskip("transformers")
    spec = EnvSpec(observation=ObservationSpec((IMAGE, TEXT)), action=NUMBERS)
    assert fit_of(spec).policy == "vision_language_action"
    choice = EnvSpec(
        observation=ObservationSpec((IMAGE, TEXT)), action=ActionSpec((Factor("choice", 3),))
    )
    assert fit_of(choice).policy == ""
