"""Who says that an episode succeeded, and what silence counts as: the same in every simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.messages.embodied import success_at, success_of, success_rate
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.worker import Environments

EPISODES = 20


class Rare(gymnasium.Env[Any, Any]):
    """Episodes of 2 steps. One in five succeeds, by its seed, and only those say anything."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, key: str = "is_success", says_failure: bool = False) -> None:
        self.key, self.says_failure = key, says_failure
        self.episodes = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        self.episodes += 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        over = self.at == 2
        succeeded = self.episodes % 5 == 0
        info = {self.key: succeeded} if over and (succeeded or self.says_failure) else {}
        return np.zeros(1, np.float32), 0.0, over, False, info


def many(num_envs: int, mode: str, **kwargs: Any) -> SyncVectorEnv:
    """The same as a simulator of many."""
    return SyncVectorEnv([lambda: Rare(**kwargs)] * num_envs, autoreset_mode=AutoresetMode[mode])


SIMULATORS: dict[str, dict[str, Any]] = {
    "single": {},
    **{
        mode: {"simulator": "vector", "kwargs": {"mode": mode}}
        for mode in ("SAME_STEP", "NEXT_STEP", "DISABLED")
    },
}


@pytest.mark.parametrize("key", ["is_success", "success"])
@pytest.mark.parametrize("says_failure", [True, False])
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_every_simulator_tells_success_failure_and_silence_apart(
    simulator: str, says_failure: bool, key: str
) -> None:
    form = SIMULATORS[simulator]
    kwargs = {**form.get("kwargs", {}), "key": key, "says_failure": says_failure}
    entry = f"{__name__}:{'many' if form.get('simulator') == 'vector' else 'Rare'}"
    config = EnvConfig(entry_point=entry, envs=1, stages=1, **{**form, "kwargs": kwargs})
    environments = Environments(config, rank=0, incarnation=0)
    run = environments.evaluation(range(EPISODES), seed=0)
    try:
        while run.begin():
            run.step(np.zeros(len(run.observation), np.int64), 0)
    finally:
        run.close()
        environments.close()
    said = [one.success for one in sorted(run.done, key=lambda one: one.episode)]
    silent = False if says_failure else None
    assert said == [silent, silent, silent, silent, True] * (EPISODES // 5)
    assert success_rate(said) == 0.2


TRUE: tuple[Any, ...] = (True, 1, 1.0, np.True_, np.ones(1), np.float32(1), torch.tensor(True))
FALSE: tuple[Any, ...] = (False, 0, 0.0, np.zeros((1, 1), np.int8), torch.tensor([0.0]))
SILENT: tuple[Any, ...] = (None, np.nan, 0.7, 2, "False", "True", b"", [], [1, 1], {})
WORDS = [
    *((value, True) for value in TRUE),
    *((value, False) for value in FALSE),
    *((value, None) for value in SILENT),
]


@pytest.mark.parametrize(("value", "said"), WORDS)
def test_only_true_and_false_are_a_word(value: Any, said: bool | None) -> None:
    assert success_of({"is_success": value}) is said
    assert success_of({"success": value}) is said
    assert success_of({"is_success": value, "success": False}) is (said or False)


def test_one_of_many_is_found_in_every_form_of_info() -> None:
    array = {"is_success": np.array([True, True]), "_is_success": np.array([False, True])}
    assert [success_at(array, place) for place in (0, 1)] == [None, True]
    assert success_at({**array, "success": np.array([False, False])}, 0) is False
    dicts = np.array([{"success": True}, None], object)  # Gymnasium before 1.0
    assert [success_at(dicts, place) for place in (0, 1)] == [True, None]
    assert success_at({"success": torch.tensor([0, 1])}, 1) is True


words = st.lists(st.sampled_from([True, False, None]))


@given(words, st.booleans())
def test_silence_counts_as_no_success_where_others_are_told(
    said: list[bool | None], reports: bool
) -> None:
    rate = success_rate(said, reports=reports)
    if not said or (not reports and set(said) == {None}):
        assert rate is None
    else:
        assert rate == said.count(True) / len(said)
