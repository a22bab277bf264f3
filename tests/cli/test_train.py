"""``rlinf-async train`` and ``check``: what reaches the job, and how each mistake ends."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

from rlinf_async import cli
from tests.cli.conftest import CommandLine
from tests.cli.fake import FakeConfig, Settings


def test_a_job_runs_with_its_configuration(command_line: CommandLine) -> None:
    code, _, err = command_line.train()
    assert (code, err) == (0, "")
    assert command_line.job.runs == [(FakeConfig(actor=Settings(lr=0.5)), None, False)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "FILE", "--actor.lr", "1e-5", "--seed", "3"],
        ["train", "--seed", "3", "--actor.lr=1e-5", "FILE"],
        ["train", "--actor.lr", "1e-5", "FILE", "--seed=3"],
    ],
)
def test_settings_may_stand_before_and_after_the_file(
    command_line: CommandLine, arguments: list[str]
) -> None:
    placed = [command_line.file if word == "FILE" else word for word in arguments]
    code, _, err = command_line.run(*placed)
    assert (code, err) == (0, "")
    assert command_line.config == FakeConfig(seed=3, actor=Settings(lr=1e-5))


def test_a_negative_number_is_a_value_and_not_an_option(command_line: CommandLine) -> None:
    code, _, _ = command_line.train("--seed", "-3", "--end", "-x")
    assert code == 0
    assert command_line.config == FakeConfig(seed=-3, end="-x", actor=Settings(lr=0.5))


def test_a_run_that_fell_short_of_its_target_ends_with_code_1(command_line: CommandLine) -> None:
    assert command_line.train("--end", "fell short") == (1, "", "")


def test_the_run_folder_reaches_the_job(command_line: CommandLine, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "run"
    assert command_line.train("--out", out)[0] == 0
    assert command_line.job.runs[0][1:] == (out, False)


def test_a_run_is_not_written_over(command_line: CommandLine, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.json").touch()
    code, _, err = command_line.train("--out", tmp_path)
    assert code == 2
    assert "holds a run already" in err
    assert "--resume" in err
    assert command_line.job.runs == []


def test_a_folder_with_something_else_in_it_is_not_called_a_run(
    command_line: CommandLine, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "cat.jpg").touch()
    (tmp_path / "dog.jpg").touch()
    (tmp_path / "empty").mkdir()
    code, _, err = command_line.train("--out", tmp_path)
    assert code == 2
    assert "is no run's folder and holds 'cat.jpg' and 2 more; name an empty" in err
    assert "--resume" not in err
    assert command_line.job.runs == []


def test_what_a_start_that_was_killed_at_once_has_left_does_not_occupy_a_folder(
    command_line: CommandLine, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    assert command_line.train("--out", out) == (0, "", "")


def test_a_run_is_gone_on_with_when_asked(
    command_line: CommandLine, tmp_path: pathlib.Path
) -> None:
    assert command_line.train("--out", tmp_path, "--resume") == (0, "", "")
    assert command_line.job.runs[0][1:] == (tmp_path, True)


def test_resuming_an_empty_folder_prints_a_note_and_starts(
    command_line: CommandLine, tmp_path: pathlib.Path
) -> None:
    code, _, err = command_line.train("--out", tmp_path / "none", "--resume")
    assert code == 0
    assert "nothing to resume" in err


def test_resume_without_a_folder_is_wrong_input(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--resume")
    assert code == 2
    assert "--resume needs --out" in err


def test_going_on_without_a_file_names_the_one_that_the_run_has(
    command_line: CommandLine, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.toml").touch()
    code, _, err = command_line.run("train", "--resume", "--out", tmp_path)
    assert code == 2
    assert f"{tmp_path / 'config.toml'} is what it ran with" in err
    assert "--resume needs --out" in command_line.run("train", "--resume")[2]


def test_a_file_as_run_folder_is_wrong_input(command_line: CommandLine) -> None:
    code, _, err = command_line.train("--out", command_line.file)
    assert code == 2
    assert "is a file" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actor.rl", "1"], "command line (--actor.rl): actor.rl: unknown name"),
        (["--actor.lr", "fast"], "expected a number, found 'fast'"),
        (["--actor.lr"], "actor.lr: no value is given: it takes a number"),
        (["--device", "--seed", "3"], "device: no value is given: it takes a string"),
        (["--outt", "runs/a"], "outt: unknown name; valid names"),
        (["--outt", "runs/a"], "did you mean the option --out?"),
        (["--resum"], "did you mean the option --resume?"),
        (["--actor.lr", "-1"], "command line (--actor.lr): actor.lr: must not be negative"),
        (["--device", "cuda:7"], "device 'cuda:7' is not on this machine"),
        (["--seed", "x"], "'x' is not a valid integer"),
        (["another.toml"], "one configuration file at a time, found 2"),
    ],
)
def test_wrong_input_ends_with_code_2_before_anything_runs(
    command_line: CommandLine, arguments: list[str], message: str
) -> None:
    code, out, err = command_line.train(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert command_line.job.runs == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'job: the file must say which job it is for, at its top: job = "embodied_ppo" or'),
        ("job = 3", "job: the file must say which job it is for"),
        ('job = "walk"', "there is no job 'walk'; there are: fake"),
        ('job = "fake"\nactor.lr = -1', "fake.toml:2: actor.lr: must not be negative"),
        ('job = "fake"\n[actr]', "fake.toml:2: actr: unknown name (did you mean 'actor'?)"),
        ("job = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_ends_with_code_2_and_says_where(
    command_line: CommandLine, text: str, message: str
) -> None:
    command_line.file.write_text(text, encoding="utf-8")
    for command in ("train", "check"):
        code, out, err = command_line.run(command, command_line.file)
        assert (code, out) == (2, "")
        assert message in err
    assert command_line.job.runs == []


def test_a_missing_file_is_named(command_line: CommandLine) -> None:
    code, _, err = command_line.run("train", "absent.toml")
    assert code == 2
    assert "absent.toml: cannot be read: No such file or directory" in err


def test_a_missing_file_argument_is_reported(command_line: CommandLine) -> None:
    code, _, err = command_line.run("train")
    assert code == 2
    assert "Give a FILE.toml" in err


def test_check_says_ok_and_runs_nothing(command_line: CommandLine) -> None:
    code, out, _ = command_line.run("check", command_line.file)
    assert (code, out) == (0, f"{command_line.file}: ok\n")
    assert command_line.job.runs == []


def test_check_can_show_every_setting(command_line: CommandLine) -> None:
    _, out, _ = command_line.run("check", command_line.file, "--show", "--seed", "9")
    assert tomllib.loads(out)["actor"] == {"lr": 0.5}
    assert tomllib.loads(out)["seed"] == 9


def test_an_option_with_a_wrong_value_is_not_offered_in_its_own_place(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    example = pathlib.Path(__file__).parents[2] / "examples" / "grpo_arithmetic.toml"
    assert cli.main(["train", str(example), "--out", str(tmp_path / "run"), "--seed", "-3"]) == 2
    said = capsys.readouterr().err
    assert "seed: -3 is below 0" in said
    assert "did you mean" not in said
