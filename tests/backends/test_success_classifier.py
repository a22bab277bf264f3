"""A classifier of success: what it computes, learns, measures, refuses, and pays."""

from __future__ import annotations

import pathlib
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.backends.success.classifier import (
    ClassifierInfo,
    Figures,
    SuccessClassifier,
)
from rlinf_async.backends.success.training import (
    Wanted,
    _Network,
    read_labelled,
    train_classifier,
)
from rlinf_async.cli import main
from rlinf_async.config import ConfigError
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    read_episodes,
    write_episode,
    write_info,
)
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec
from rlinf_async.workers.env import EnvConfig, describe_env, make_env
from rlinf_async.workers.env.config import EnvRewardConfig

HERE = "tests.backends.test_success_classifier"
WANTED = Wanted(steps=150, batch=32)


class Lamp(gymnasium.Env[Any, Any]):
    """A lamp on a picture, and a number that says nothing; the episode is solved once it is lit."""

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (9, 12, 3), np.uint8),
            "noise": gymnasium.spaces.Box(-np.inf, np.inf, (1,)),
        }
    )
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._shown(lit=False), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        lit = bool(action[0] > 0)
        return self._shown(lit=lit), 0.0, lit, self.at == 6, {"is_success": lit}

    def _shown(self, *, lit: bool) -> dict[str, Any]:
        camera = self.np_random.integers(0, 100, (9, 12, 3)).astype(np.uint8)
        if lit:
            camera[3:6, 4:8] = 255
        return {"camera": camera, "noise": self.np_random.normal(size=1).astype(np.float32)}


def make() -> Lamp:
    return Lamp()


def lighting(env: Any, seed: int) -> Any:
    """Lights the lamp at the fourth step of every second episode."""
    calls = [0]

    def act(seen: Any) -> Any:
        calls[0] += 1
        return np.array([1.0 if calls[0] % 10 == 4 else -1.0])

    return act


TOML = f"""\
job = "embodied_ppo"

[env]
entry_point = "{HERE}:make"

[training]
total_steps = 64
steps_per_iteration = 8
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """24 episodes, of which 12 have succeeded."""
    folder = tmp_path_factory.mktemp("lamp")
    (folder / "lamp.toml").write_text(TOML)
    out = folder / "episodes"
    policy = ("--policy", f"{HERE}:lighting", "--episodes", "24", "--keep-failures")
    assert main(["demonstrations", str(folder / "lamp.toml"), *policy, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def classifier(recorded: pathlib.Path) -> pathlib.Path:
    out = recorded.parent / "classifier"
    train_classifier([recorded], WANTED).save(out)
    return out


def figures(**other: Any) -> Figures:
    zeros = dict.fromkeys(Figures.__struct_fields__, 0)
    return Figures(**{**zeros, **other})


def test_it_computes_what_torch_computes() -> None:
    spec = ObservationSpec(
        (
            ObservationPart(name="a.camera", kind="image", shape=(33, 20, 3)),
            ObservationPart(name="grey", kind="image", shape=(9, 9)),
            ObservationPart(name="state", kind="state", shape=(4,)),
        )
    )
    torch.manual_seed(0)
    network = _Network(spec, np.arange(4, dtype=np.float32), np.full(4, 2.0, np.float32))
    assert network.convolutions == 2
    info = ClassifierInfo(env="", observation=spec, layers=3, convolutions=2, figures=figures())
    rng, seen = np.random.default_rng(0), spec.empty(5)
    for part in spec.parts:
        seen[part.name] = rng.integers(0, 255, (5, *part.shape))
    with torch.no_grad():
        expected = torch.sigmoid(network(seen)).numpy()
    found = SuccessClassifier(info, network.tensors()).probability(seen)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_it_learns_and_says_how_often_it_is_wrong(
    recorded: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [one.success for one in read_episodes(recorded)]
    assert flags.count(True) == flags.count(False) == 12
    out = recorded.parent / "told"
    arguments = [str(recorded), "--out", str(out), "--steps", "150", "--batch", "32"]
    assert main(["classifier", *arguments]) == 0
    said = capsys.readouterr().out
    assert "measured on 6 episodes that it has not learnt from, 3 of them successful" in said
    found = SuccessClassifier.load(out).info.figures
    assert (found.episodes, found.succeeded, found.steps, found.positives) == (6, 3, 30, 3)
    assert found.accuracy >= 0.95
    assert f"false positives: {found.false_positives} of 27 steps" in said
    assert main(["classifier", *arguments]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_figures_are_what_the_classifier_says_of_episodes_it_has_not_seen(
    recorded: pathlib.Path,
) -> None:
    """Of one that is wrong often, since it has learnt next to nothing."""
    wanted = Wanted(steps=1, batch=2, held_out=0.99, threshold=0.48)
    made = train_classifier([recorded], wanted)
    found = made.info.figures
    assert found.episodes == 22
    _, _, episodes = read_labelled([recorded])
    called = [made.probability(one.shown) >= 0.48 for one in episodes]
    every = sum(int(one.sum()) for one in called)
    wrong = found.false_positives + found.positives - found.false_negatives
    assert 0 < wrong <= every
    assert found.accuracy == pytest.approx(
        1 - (found.false_positives + found.false_negatives) / found.steps
    )
    assert found.false_positive_rate == found.false_positives / (found.steps - found.positives)


def test_data_that_cannot_teach_it_are_refused(
    recorded: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ObservationSpec((ObservationPart(name="state", kind="state", shape=(1,)),))
    zeros = np.zeros((2, 1), np.float32)

    def folder(name: str, successes: list[bool | None]) -> pathlib.Path:
        place = tmp_path / name
        place.mkdir()
        for number, success in enumerate(successes):
            outcome = Outcome(np.zeros(2, np.float32), zeros[:1], terminated=True)
            write_episode(place, number, DemonstratedEpisode(zeros, zeros, outcome, success))
        info = DemonstrationsInfo(
            env="x", observation=spec, action_size=1, episodes=len(successes), transitions=True
        )
        write_info(place, info)
        return place

    for given, problem in (
        ([folder("solved", [True] * 4)], "4 of 4 episodes have succeeded.*--keep-failures"),
        ([folder("failed", [False] * 4)], "0 of 4 episodes have succeeded"),
        ([folder("silent", [True, None, False])], "whether its episode 1 has succeeded"),
        ([recorded, folder("other", [True, False])], "a classifier is of one environment"),
    ):
        with pytest.raises(DataError, match=problem):
            train_classifier(given, WANTED)
    code = main(["classifier", str(tmp_path / "solved"), "--out", str(tmp_path / "out")])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_pays_for_success_and_says_so(classifier: pathlib.Path) -> None:
    reward = EnvRewardConfig(classifier=str(classifier), ends=True)
    env = make_env(EnvConfig(entry_point=f"{HERE}:make", reward=reward))
    env.reset(seed=7)
    for action, paid in ((-1.0, 0.0), (-1.0, 0.0), (1.0, 1.0)):
        _, got, terminated, _, info = env.step(np.array([action], np.float32))
        assert (got, terminated, info["is_success"]) == (paid, bool(paid), bool(paid))


def test_a_classifier_of_something_else_is_refused(
    classifier: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for where, env, problem in (
        (classifier, "tests.workers.env.toy:make", "is of what .* shows, state .*image 'camera'"),
        (tmp_path, f"{HERE}:make", "holds no classifier of success"),
    ):
        reward = EnvRewardConfig(classifier=str(where))
        with pytest.raises(ConfigError, match=problem) as refused:
            describe_env(EnvConfig(entry_point=env, reward=reward))
        assert refused.value.path == ("reward", "classifier")
    info = msgspec.json.decode((classifier / "classifier.json").read_bytes())
    assert info["env"] == f"{HERE}:make"
