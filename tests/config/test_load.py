"""Reading a TOML file into Structs: what is accepted, and the error for each mistake."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from rlinf_async.config import ConfigError, Document, load
from tests.config.example import Actor, Env, Kind, Linear, Optimizer, Run


def read(text: str, overrides: dict[str, str] | None = None) -> Run:
    return Document("run.toml", text).to(Run, overrides)


def complaint(text: str, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, overrides)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults() -> None:
    assert read("") == Run()


def test_values_are_read_into_their_types() -> None:
    run = read(
        """
        folder = "out"
        offload = true
        [actor]
        hidden = [32]
        optimizer = {kind = "sgd", lr = 1, clip = "none"}
        [[envs]]
        id = "Reach"
        options.steps = 50
        [slow.first]
        lr = 0.1
        """
    )
    assert run == Run(
        folder=pathlib.Path("out"),
        offload=True,
        actor=Actor(hidden=(32,), optimizer=Optimizer(kind=Kind.SGD, lr=1.0, clip=None)),
        envs=[Env(id="Reach", options={"steps": 50})],
        slow={"first": Optimizer(lr=0.1)},
    )
    assert isinstance(run.actor.optimizer.lr, float)


def test_a_section_that_sets_one_field_keeps_its_parents_defaults_for_the_others() -> None:
    assert read("actor.optimizer.clip = 1.0").actor.optimizer == Optimizer(lr=1e-3, clip=1.0)


def test_a_union_of_structs_is_chosen_by_its_tag() -> None:
    assert read('actor.decay = {schedule = "linear", until = 5}').actor.decay == Linear(until=5)


def test_an_unknown_name_is_an_error_with_its_line_and_the_nearest_valid_name() -> None:
    text = '# a comment\nname = "x"\n\n[actor.optimizer]\nlr = 1e-3\nclipp = 0.2\n'
    assert complaint(text) == (
        "run.toml:6: actor.optimizer.clipp: unknown name (did you mean 'clip'?); "
        "valid names here: clip, kind, lr"
    )


def test_an_unknown_name_is_refused_even_where_the_struct_itself_would_ignore_it() -> None:
    class Lax(msgspec.Struct):
        lr: float = 1.0

    with pytest.raises(ConfigError, match="lrr: unknown name"):
        Document("lax.toml", "lrr = 2.0").to(Lax)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[actor.optimizer]\nlr = 'fast'",
            "run.toml:2: actor.optimizer.lr: expected a number, found the string 'fast'",
        ),
        (
            "offload = 1",
            "run.toml:1: offload: expected true or false, found the integer 1",
        ),
        (
            "[actor]\nmini_batch = true",
            "run.toml:2: actor.mini_batch: expected an integer >= 1, found the boolean true",
        ),
        (
            "actor.mini_batch = 0",
            "run.toml:1: actor.mini_batch: expected an integer >= 1, found the integer 0",
        ),
        (
            "actor.hidden = [64, 'wide']",
            "run.toml:1: actor.hidden[1]: expected an integer, found the string 'wide'",
        ),
        (
            "actor = 3",
            "run.toml:1: actor: expected a table, found the integer 3",
        ),
        (
            "actor.precision = 'float23'",
            (
                "run.toml:1: actor.precision: expected one of 'bfloat16', 'float32', "
                "found the string 'float23' (did you mean 'float32'?)"
            ),
        ),
        (
            "actor.optimizer.kind = 'adamw'",
            (
                "run.toml:1: actor.optimizer.kind: expected one of 'adam', 'sgd', "
                "found the string 'adamw' (did you mean 'adam'?)"
            ),
        ),
        (
            "[[envs]]\nid = 'a'\n[[envs]]\noptions.k = 1",
            "run.toml:3: envs[1].id: must be given: a string",
        ),
        (
            "[slow]\nfirst = {lr = 'x'}",
            "run.toml:2: slow.first.lr: expected a number, found the string 'x'",
        ),
        (
            "[actor]\nmini_batch = 7",
            "run.toml:1: actor: mini_batch must be even, got 7",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_was_expected(
    text: str, message: str
) -> None:
    assert complaint(text) == message


def test_a_setting_inside_a_multi_line_string_is_not_taken_for_its_line() -> None:
    text = 'name = """\noffload = 1\n"""\noffload = 1\n'
    assert complaint(text).startswith("run.toml:4: offload:")


def test_a_missing_tag_is_reported_as_an_expected_table() -> None:
    assert "actor.decay: expected a table or a table" in complaint("actor.decay = {until = 1}")


def test_text_that_is_not_toml_is_an_error_with_its_line() -> None:
    assert "run.toml: not valid TOML" in complaint("lr = = 3")
    assert "line 2" in complaint("name = 'x'\nlr = = 3")


def test_a_missing_file_is_an_error_with_its_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load(tmp_path / "absent.toml", {}, Run)


def test_a_file_that_is_not_text_is_an_error_with_its_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml: is not UTF-8"):
        load(tmp_path / "binary.toml", {}, Run)


def test_load_reads_the_file_and_puts_the_overrides_over_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("name = 'first'\n[actor]\nmini_batch = 8\n", encoding="utf-8")
    run = load(file, {"actor.mini_batch": "16"}, Run)
    assert (run.name, run.actor.mini_batch) == ("first", 16)
