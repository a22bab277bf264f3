"""`Dreams`: a world model as many environments in one call, as `gymnasium.vector` has them.

::

    a recorded observation --encoder--> z --step--> reward, end; what is shown is decoded from z

An episode begins with a recorded observation, ends where the model says that it does, and is cut
after the horizon, within which the model has been trained. Another begins in the same step
(``SAME_STEP``). All is of one seed, but for the last bits of arithmetic on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_async.backends.policies.base import to_tensors
from rlinf_async.backends.world_model.config import FIRST, STARTS, WorldModelInfo, read_info
from rlinf_async.backends.world_model.model import Dreamt, WorldModel
from rlinf_async.backends.world_model.recorded import as_input
from rlinf_async.config import ConfigError
from rlinf_async.messages.spaces import STATE, ObservationArray, ObservationPart

Begins = Literal["first", "anywhere"]


class Dreams:
    """``num_envs`` environments in a world model; see `gymnasium.vector.VectorEnv`.

    Args:
        file: the model's.
        num_envs: number of environments.
        horizon: steps after which an episode is cut; None: as many as the model was trained for.
        begins: with the ``first`` observations of recorded episodes, or ``anywhere`` in them.
        success: ``"terminated"``: an episode that ends for good has succeeded; None: the model says
            nothing of success.

    Raises `ConfigError` where the file is no world model, or a setting does not fit it.
    """

    def __init__(
        self,
        file: Path,
        num_envs: int,
        *,
        horizon: int | None = None,
        begins: Begins = "first",
        success: Literal["terminated"] | None = None,
    ) -> None:
        from gymnasium.vector import AutoresetMode

        self.info = read_info(file)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self._success = success is not None
        trained = self.info.sizes.horizon
        self.horizon = _within(horizon, trained)
        self._model, self._starts = _loaded(file, self.info, begins)
        self._latent = torch.zeros(num_envs, self.info.sizes.latent_size)
        self._texts: dict[str, NDArray[np.uint8]] = {}
        self._length = np.zeros(num_envs, np.int64)
        self._random = np.random.default_rng(0)
        self.single_observation_space = _observation_space(self.info)
        self.single_action_space = _action_space(self.info)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        every = np.arange(self.num_envs)
        self._shown = self._begun(every)
        return self._as_shown(self._shown), {}

    @torch.no_grad()
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment."""
        acted = as_input(np.asarray(actions), self.info, self.info.bounds)
        dreamt = self._model(
            None, torch.from_numpy(acted)[:, None], torch.tensor([1]), self._latent
        )
        self._latent = dreamt.latent[:, -1]
        self._length += 1
        reward = self._model.rewards_of(dreamt.reward[:, 0]).numpy().astype(np.float64)
        terminated = (dreamt.ended[:, 0] > 0).numpy()
        truncated = ~terminated & (self._length >= self.horizon)
        shown = self._decoded(dreamt)
        info: dict[str, Any] = {}
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            over = terminated | truncated
            info = {"final_obs": self._as_shown(shown.copy()), "_final_obs": over}
            if self._success:
                info |= {"final_info": {"is_success": terminated.copy(), "_is_success": over}}
            shown[ended] = self._begun(ended)
        self._shown = shown
        return self._as_shown(shown), reward, terminated, truncated, info

    def close(self) -> None:
        """Do nothing: there is no process, and no window."""

    # ---- observations

    @torch.no_grad()
    def _begun(self, places: NDArray[np.int64]) -> ObservationArray:
        """Begin episodes in these environments; return what they show."""
        rows = self._starts[self._random.integers(len(self._starts), size=len(places))]
        self._latent[places] = self._model.encode(to_tensors(rows, torch.device("cpu")))
        self._length[places] = 0
        for part in self.info.observation.of_kind("text"):
            held = self._texts.setdefault(
                part.name, np.zeros((self.num_envs, *part.shape), np.uint8)
            )
            held[places] = rows[part.name]
        return rows

    def _decoded(self, dreamt: Dreamt) -> ObservationArray:
        spec, model = self.info.observation, self._model
        shown = spec.empty(self.num_envs)
        if dreamt.state is not None:
            numbers = (dreamt.state[:, 0] / model.state_scale + model.state_mean).numpy()
            if spec.flat:
                return numbers.astype(np.float32)
            shown[STATE] = numbers
        for name, drawn in dreamt.images.items():
            shown[name] = (drawn[:, 0].clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).numpy()
        for name, held in self._texts.items():
            shown[name] = held
        return shown

    def _as_shown(self, rows: ObservationArray) -> Any:
        """As a vector environment shows them: a Dict of arrays, texts as strings."""
        if self.info.observation.flat:
            return rows.copy()
        return {part.name: _field(rows[part.name], part) for part in self.info.observation.parts}


def _field(values: Any, part: ObservationPart) -> Any:
    if part.kind != "text":
        return values.copy()
    return tuple(bytes(row).rstrip(b"\0").decode() for row in values)


def _within(horizon: int | None, trained: int) -> int:
    if horizon is None:
        return trained
    if type(horizon) is not int or not 1 <= horizon <= trained:
        raise ConfigError(
            f"{horizon!r}, but the model was trained to predict 1 to {trained} steps from one "
            f"observation (its model.horizon): set at most {trained}, or train one that looks "
            "further ahead",
            path=("kwargs", "horizon"),
        )
    return horizon


def _loaded(
    file: Path, info: WorldModelInfo, begins: Begins
) -> tuple[WorldModel, ObservationArray]:
    """The model, and the observations in which its episodes begin."""
    from safetensors.torch import load_file

    if begins not in ("first", "anywhere"):
        raise ConfigError(f"{begins!r}; it is 'first' or 'anywhere'", path=("kwargs", "begins"))
    tensors = load_file(str(file))
    arrays = {
        name.removeprefix(STARTS): tensors.pop(name).numpy()
        for name in [*tensors]
        if name.startswith(STARTS)
    }
    first = arrays.pop(FIRST)
    starts = info.observation.empty(len(first))
    for part in info.observation.parts:
        if info.observation.flat:
            starts = arrays[STATE]
        else:
            starts[part.name] = arrays[part.name]
    model = WorldModel(info)
    model.load_state_dict(tensors)
    model.eval()
    return model, starts[first] if begins == "first" else starts


def _observation_space(info: WorldModelInfo) -> Any:
    from gymnasium import spaces

    def of(part: ObservationPart) -> Any:
        if part.kind == "state":
            return spaces.Box(-np.inf, np.inf, part.shape, np.float32)
        if part.kind == "image":
            return spaces.Box(0, 255, part.shape, np.uint8)
        return _text(part)

    if info.observation.flat:
        return of(info.observation.parts[0])
    return spaces.Dict({part.name: of(part) for part in info.observation.parts})


def _text(part: ObservationPart) -> Any:
    from gymnasium import spaces

    ascii_letters = "".join(chr(code) for code in range(32, 127))
    return spaces.Text(max_length=part.shape[0], charset=ascii_letters)


def _action_space(info: WorldModelInfo) -> Any:
    from gymnasium import spaces

    if info.action.discrete:
        return spaces.Discrete(info.action.factors[0].size)
    low, high = np.array(info.bounds, np.float32).T
    return spaces.Box(low, high, dtype=np.float32)
