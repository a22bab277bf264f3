"""Episodes of a data set in RLDS, as demonstrations. ``tests/data/rlds`` was written by
tensorflow-datasets 4.9.10; its numbers are those of `shown` and `done`."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.cli import main
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import check_demonstrations, read_episodes, read_info
from rlinf_async.data.rlds import RldsFolder, _example, _records

DATA = Path(__file__).parents[2] / "data/rlds/tiny/1.0.0"
SIZES = (3, 5, 1, 4)
"""steps of the episodes"""
ENV = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Arm(gymnasium.Env):
    def __init__(self, height=8, discrete=False, numbers=3, words=11):
        self.observation_space = spaces.Dict(
            {
                "image_0": spaces.Box(0, 255, (height, 6, 3), np.uint8),
                "instruction": spaces.Text(max_length=words, charset="abcdefghijklmnopqrstuvwxyz "),
                "state": spaces.Box(-9.0, 9.0, (numbers,), np.float32),
            }
        )
        wide = spaces.Box(-0.5, 0.5, (2,), np.float32)
        self.action_space = spaces.Discrete(3) if discrete else wide
"""
"""an environment that is asked for its spaces alone"""
STATE = "state=observation/joints,observation/gripper"
MOVE = "action=action/move"


def pixels(number: int, step: int) -> Any:
    return (np.arange(144) * (number + 1) + step).astype(np.uint8).reshape(8, 6, 3)


class Importing:
    """The command, with an environment of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.out, self._capsys = folder, folder / "out", capsys
        (folder / "arm.py").write_text(ENV)
        self.data = folder / "data"
        shutil.copytree(DATA, self.data)

    def __call__(self, *options: str, env: str = "", job: str = "embodied_ppo") -> tuple[int, str]:
        """Run it; return the exit code, and what it printed."""
        file = self.folder / "run.toml"
        file.write_text(
            f'job = "{job}"\n[env]\nentry_point = "{self.folder}/arm.py:Arm"\n{env}\n'
            "[training]\ntotal_steps = 64\nsteps_per_iteration = 16\n[cluster]\n"
            'backend = "local"\n'
        )
        out = ("--out", str(self.out), "--from-rlds", str(self.data))
        code = main(["demonstrations", str(file), *out, *options])
        printed = self._capsys.readouterr()
        return code, printed.out + printed.err


@pytest.fixture
def importing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Importing:
    return Importing(tmp_path, capsys)


def test_episodes_are_those_that_tensorflow_datasets_wrote(importing: Importing) -> None:
    code, printed = importing("--part", STATE, "--part", MOVE)
    assert code == 0, printed
    assert "3 episodes, 9 steps" in printed
    assert "image_0: observation/image_0" in printed
    assert "state: observation/joints + observation/gripper" in printed
    assert "instruction: language_instruction" in printed
    assert "left out, since one step has no action: 1" in printed
    assert "clipped" not in printed
    info = read_info(importing.out)
    assert (info.episodes, info.transitions, info.bounds) == (3, True, ((-0.5, 0.5),) * 2)
    check_demonstrations(
        importing.out, info.observation, 2, discrete=False, bounds=info.bounds, transitions=True
    )
    for number, one in zip((0, 3, 1), read_episodes(importing.out), strict=True):
        count = SIZES[number] - 1  # the last step is an observation alone
        every = [pixels(number, step) for step in range(count + 1)]
        assert np.array_equal(one.observation["image_0"], every[:-1])
        word = ("red", "green", "blue", "red")[number]
        assert bytes(one.observation["instruction"][0]).rstrip(b"\0") == f"reach {word}".encode()
        wanted = [[number, step, step / 4] for step in range(count + 1)]
        assert one.observation["state"].tolist() == wanted[:-1]
        assert one.action.tolist() == [[step / 8, -number / 8] for step in range(count)]
        outcome = one.outcome
        assert outcome is not None
        assert np.array_equal(outcome.last_observation["image_0"][0], every[-1])
        assert outcome.last_observation["state"].tolist() == wanted[-1:]
        assert outcome.reward.tolist() == [0.0] * (count - 1) + [1.0]
        assert outcome.terminated == (number % 2 == 0)


def test_actions_are_written_as_the_policy_says_them(importing: Importing) -> None:
    code, printed = importing("--part", STATE, "--part", MOVE, env='actions = "rescale"')
    assert code == 0, printed
    first = next(iter(read_episodes(importing.out)))
    assert first.action.tolist() == [[0.0, 0.0], [0.25, 0.0]]
    assert read_info(importing.out).bounds == ((-1.0, 1.0),) * 2


def test_choices_and_another_split(importing: Importing) -> None:
    options = ("--part", STATE, "--part", "action=action/choice", "--split", "val")
    code, printed = importing(*options, env="kwargs = { discrete = true }")
    assert code == 0, printed
    assert [one.action.tolist() for one in read_episodes(importing.out)] == [[0], [0, 1]]
    assert read_info(importing.out).discrete


def test_as_many_episodes_as_are_asked_for(importing: Importing) -> None:
    code, printed = importing("--part", STATE, "--part", MOVE, "--episodes", "1")
    assert (code, read_info(importing.out).episodes) == (0, 1), printed


def paid_at_last(folder: Path) -> None:
    """Have the last step of every episode of the data set pay 1, as some data sets do."""
    example, crc = _example(), importlib.import_module("google_crc32c")
    for file in folder.glob("*train*"):
        written = b""
        for record in _records(file):
            episode = example.FromString(record)
            [reward] = [one for one in episode.features.feature if one.key == "steps/reward"]
            reward.value.float_list.value[-1] = 1.0
            data = episode.SerializeToString()
            head = len(data).to_bytes(8, "little")
            for part in (head, data):
                found = crc.value(part)
                masked = ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF
                written += part + masked.to_bytes(4, "little")
        file.write_bytes(written)


def test_a_reward_of_the_last_step_is_not_left_out_without_a_word(importing: Importing) -> None:
    paid_at_last(importing.data)
    options = ("--part", STATE, "--part", MOVE)
    code, printed = importing(*options)
    assert code == 2
    assert "its last step pays 1, though in RLDS" in printed
    shutil.rmtree(importing.out, ignore_errors=True)
    code, printed = importing(*options, "--last-step", "drop")
    assert (code, "3 episodes, 9 steps" in printed) == (0, True), printed
    shutil.rmtree(importing.out)
    code, printed = importing(*options, "--last-step", "keep")
    assert (code, "4 episodes, 13 steps" in printed) == (0, True), printed
    for number, one in zip((0, 3, 1, 2), read_episodes(importing.out), strict=True):
        assert one.outcome is not None
        assert one.outcome.reward.tolist()[-1] == 1.0
        assert len(one.action) == SIZES[number]
        assert one.outcome.last_observation["state"].tolist() == [
            one.observation["state"][-1].tolist()
        ]


def test_images_are_resized_where_that_is_asked_for(importing: Importing) -> None:
    options = ("--part", STATE, "--part", MOVE)
    code, printed = importing(*options, env="kwargs = { height = 4 }")
    assert code == 2
    assert "image 'image_0' is [8, 6, 3], but the environment shows [4, 6, 3]: --resize" in printed
    shutil.rmtree(importing.out)
    code, printed = importing(*options, "--resize", env="kwargs = { height = 4 }")
    assert code == 0
    assert "image_0: observation/image_0 (resized)" in printed
    first = next(iter(read_episodes(importing.out)))
    assert first.observation["image_0"].shape == (2, 4, 6, 3)
    assert abs(first.observation["image_0"][0].mean() - pixels(0, 0).mean()) < 3


def test_actions_beyond_the_bounds_are_clipped_and_counted(importing: Importing) -> None:
    joints = "action=observation/joints"
    code, printed = importing("--part", STATE, "--part", joints)
    assert code == 0
    assert "clipped: the actions of 8 steps (88.9%)" in printed


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ((), "", "no observation/state for the state 'state' of the environment: name it with"),
        ((STATE,), "", "have no 'action'; is it action/move? They have: "),
        (("state=observation/joints", MOVE), "", "2 numbers, but the environment shows 3"),
        ((STATE, "action=action/mov"), "", "no 'action/mov'; is it action/move?"),
        ((STATE, MOVE, "wrist=observation/image_0"), "", "--part wrist: the environment shows"),
        ((STATE, MOVE, "instruction=observation/image_0"), "", "cannot be the text 'instruction'"),
        ((STATE, "action=language_instruction"), "", "is no action, which has numbers"),
        ((STATE, "action=action/move,action/choice"), "", "an action of 3 numbers, but the"),
        (
            (STATE, MOVE),
            "kwargs = { words = 8 }",
            "has 9 bytes, but the environment shows texts of at most",
        ),
        (
            (STATE, "action=observation/gripper"),
            "kwargs = { discrete = true }",
            "0.25 is no choice of Discrete(3)",
        ),
        ((STATE, "action"), "", "--part action: is it NAME=FEATURE?"),
    ],
)
def test_what_does_not_fit_is_named(
    importing: Importing, options: tuple[str, ...], env: str, said: str
) -> None:
    code, printed = importing(*(word for one in options for word in ("--part", one)), env=env)
    assert code == 2
    assert said in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "mine.py:f"), "whose episodes? --policy FILE.py:FUNCTION, or --from-rlds"),
        (("--seed", "3"), "--seed is for --policy"),
        (("--keep-failures",), "--keep-failures is for --policy"),
        (("--split", "test"), "no split 'test', but train, val"),
    ],
)
def test_options_of_the_other_source_are_refused(
    importing: Importing, options: tuple[str, ...], said: str
) -> None:
    code, printed = importing(*options)
    assert code == 2
    assert said in printed


def spoilt(folder: Path, how: str) -> None:
    """Damage a data set."""
    file = folder / "tiny-train.tfrecord-00000-of-00002"
    data = bytearray(file.read_bytes())
    info = json.loads((folder / "dataset_info.json").read_text())
    if how == "a byte":
        data[300] ^= 1
    elif how == "a length":
        data[0] ^= 1
    elif how == "its end":
        del data[-7:]
    elif how == "an episode":
        del data[12 + int.from_bytes(data[:8], "little") + 4 :]
    elif how == "a file":
        file.unlink()
        return
    elif how == "another format":
        info["fileFormat"] = "array_record"
        (folder / "dataset_info.json").write_text(json.dumps(info))
    elif how == "no steps":
        features = json.loads((folder / "features.json").read_text())
        del features["featuresDict"]["features"]["steps"]
        (folder / "features.json").write_text(json.dumps(features))
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a byte", r"is damaged: a checksum of record 0 is wrong"),
        ("a length", r"is damaged: a checksum of record 0 is wrong"),
        ("its end", r"ends in record 1"),
        ("an episode", r"has 1 episodes of the 2 that dataset_info.json counts"),
        ("a file", r"tiny-train.tfrecord-00000-of-00002.*No such file"),
        ("another format", r"files of the format 'array_record'"),
        ("no steps", r"features.json' describes no episodes of steps"),
    ],
)
def test_damage_is_named(tmp_path: Path, how: str, said: str) -> None:
    folder = tmp_path / "1.0.0"
    shutil.copytree(DATA, folder)
    spoilt(folder, how)
    with pytest.raises(DataError, match=said):
        list(RldsFolder(folder, "train").arrays(["action/move", "observation/image_0"]))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no data set in RLDS.*name the folder of a version"):
        RldsFolder(tmp_path, "train")
