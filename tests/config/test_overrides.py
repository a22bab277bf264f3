"""Settings from the command line are read by the type of the field they are for."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest

from rlinf_async.config import ConfigError, Document
from rlinf_async.workers.env import EnvConfig
from tests.config.example import Actor, Kind, Linear, Run


class OfEnv(msgspec.Struct, frozen=True):
    """A file with a section whose settings have to go together."""

    env: EnvConfig


def value_of(name: str, text: str | None, document: str = "") -> Any:
    """The value at ``name`` after ``--name text`` over the document."""
    value: Any = Document("run.toml", document).to(Run, {name: text})
    for part in name.replace("-", "_").split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def complaint(name: str, text: str | None, document: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        value_of(name, text, document)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("actor.optimizer.lr", "1e-5", 1e-5),
        ("actor.optimizer.lr", "2", 2.0),
        ("actor.optimizer.clip", "none", None),
        ("actor.optimizer.kind", "sgd", Kind.SGD),
        ("actor.mini-batch", "2_000", 2000),
        ("actor.hidden", "32,16", (32, 16)),
        ("actor.hidden", "[32, 16]", (32, 16)),
        ("actor.hidden", "32", (32,)),
        ("actor.precision", "bfloat16", "bfloat16"),
        ("name", "12", "12"),
        ("name", "a,b", "a,b"),
        ("name", "true", "true"),
        ("offload", "True", True),
        ("offload", "false", False),
        ("offload", None, True),
        ("folder", "runs/a", pathlib.Path("runs/a")),
        ("slow.first.lr", "2", 2.0),
        ("actor.decay", "{schedule = 'linear', until = 3}", Linear(until=3)),
    ],
)
def test_a_text_becomes_the_fields_type(name: str, text: str | None, expected: object) -> None:
    value = value_of(name, text)
    assert value == expected
    assert type(value) is type(expected)


def test_a_flag_without_a_value_is_true_for_a_switch_and_nothing_else() -> None:
    assert "no value is given: it takes a string" in complaint("name", None)
    assert "no value is given: it takes a number" in complaint("actor.optimizer.lr", None)


def test_an_override_changes_one_field_of_what_the_file_says() -> None:
    document = "[actor]\nmini_batch = 8\nhidden = [5]\n"
    run = Document("run.toml", document).to(Run, {"actor.mini_batch": "4"})
    assert (run.actor.mini_batch, run.actor.hidden) == (4, (5,))


def test_the_document_itself_is_left_as_it_was() -> None:
    document = Document("run.toml", "[actor]\nmini_batch = 8\n")
    document.to(Run, {"actor.mini_batch": "4"})
    assert document.to(Run).actor.mini_batch == 8


def test_a_field_of_the_chosen_union_member_can_be_set() -> None:
    document = "actor.decay = {schedule = 'linear', until = 3}"
    assert value_of("actor.decay.until", "9", document) == 9


def test_a_tag_and_then_a_field_of_its_struct_can_be_set() -> None:
    changes = {"actor.decay.schedule": "linear", "actor.decay.until": "7"}
    with_tag = Document("run.toml", "actor.decay = {schedule = 'constant'}").to(Run, changes)
    assert with_tag.actor == Actor(decay=Linear(until=7), optimizer=with_tag.actor.optimizer)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "actor.optimizer.lr",
            "fast",
            (
                "command line (--actor.optimizer.lr): actor.optimizer.lr: "
                "expected a number, found 'fast'"
            ),
        ),
        (
            "actor.optimiser.lr",
            "1",
            (
                "command line (--actor.optimiser.lr): actor.optimiser: "
                "unknown name (did you mean 'optimizer'?); "
                "valid names here: decay, hidden, mini_batch, optimizer, precision"
            ),
        ),
        (
            "actor.mini_batch.size",
            "1",
            (
                "command line (--actor.mini_batch.size): actor.mini_batch: "
                "has no settings inside it (it takes an integer >= 1)"
            ),
        ),
        (
            "actor.precision",
            "float16",
            (
                "command line (--actor.precision): actor.precision: "
                "expected one of 'bfloat16', 'float32', found 'float16' (did you mean 'bfloat16'?)"
            ),
        ),
        (
            "offload",
            "yes",
            "command line (--offload): offload: expected true or false, found 'yes'",
        ),
        (
            "actor.mini_batch",
            "1.5",
            (
                "command line (--actor.mini_batch): actor.mini_batch: "
                "expected an integer >= 1, found '1.5'"
            ),
        ),
    ],
)
def test_a_wrong_override_names_its_flag(name: str, text: str, message: str) -> None:
    assert complaint(name, text) == message


def test_a_mistake_in_the_file_is_not_blamed_on_another_flag() -> None:
    document = "[actor]\nhidden = 'wide'\n"
    assert complaint("actor.mini_batch", "4", document).startswith("run.toml:2: actor.hidden:")


def test_an_impossible_combination_that_a_flag_brought_about_names_the_flag() -> None:
    assert complaint("actor.mini_batch", "7") == (
        "command line (--actor.mini_batch): actor: mini_batch must be even, got 7"
    )


@pytest.mark.parametrize(
    ("flags", "blamed"),
    [
        (("--env.id", "X", "--env.envs", "3"), "command line (--env.envs): env: envs = 3 cannot"),
        (("--env.envs", "3", "--env.id", "X"), "command line (--env.envs): env: envs = 3 cannot"),
        (("--env.stages", "3"), "command line (--env.stages): env: envs = 8 cannot be"),
        (
            ("--env.stages", "2", "--env.envs", "3"),
            "command line (--env.stages, --env.envs): env: envs = 3 cannot",
        ),
        (("--env.id", "X", "--env.probe", "false"), ""),
    ],
)
def test_an_error_of_a_section_blames_the_flags_that_it_speaks_of(
    flags: tuple[str, ...], blamed: str
) -> None:
    overrides = dict(zip([one.removeprefix("--") for one in flags[::2]], flags[1::2], strict=True))
    document = Document("run.toml", '[env]\nid = "CartPole-v1"\n')
    if not blamed:
        document.to(OfEnv, overrides)
        return
    with pytest.raises(ConfigError) as raised:
        document.to(OfEnv, overrides)
    assert str(raised.value).startswith(blamed)


def test_a_section_that_is_wrong_in_the_file_is_not_blamed_on_another_flag_of_it() -> None:
    document = Document("run.toml", "[env]\nenvs = 3\nstages = 2\n")
    with pytest.raises(ConfigError, match=r"^run\.toml:1 with --env\.id: env: envs = 3 cannot"):
        document.to(OfEnv, {"env.id": "X"})
