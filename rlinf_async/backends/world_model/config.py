"""Sizes of a world model, and what its file says of it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.spaces import ActionSpec, EnvSpec, ObservationSpec

FILE: Final = "world_model.safetensors"
"""name of the file that a run leaves"""
METADATA: Final = "world_model"
"""key of a `WorldModelInfo`, in JSON, in the metadata of the file"""
STARTS: Final = "starts."
"""before the names of the arrays of recorded observations in which episodes may begin"""
FIRST: Final = "first"
"""name of the array that says which of these an episode has begun with"""


class WorldModelSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the networks, and how far the model is trained to look ahead."""

    latent_size: int = 128
    """numbers that stand for what an environment shows"""
    hidden_sizes: tuple[int, ...] = (256, 256)
    """layers of each network; SiLU and layer norm between them"""
    channels: tuple[int, ...] = (16, 32, 32)
    """of images: outputs of the convolutions, each of which halves height and width"""
    horizon: int = 16
    """steps that it is trained to predict from one observation"""
    starts: int = 2048
    """recorded observations that its file keeps, in which episodes in it may begin"""

    def __post_init__(self) -> None:
        check_bounds(self, "latent_size", "horizon", "starts", least=1)
        if any(size < 1 for size in (*self.hidden_sizes, *self.channels)):
            raise ValueError(
                f"hidden_sizes are {list(self.hidden_sizes)}, channels {list(self.channels)}; all "
                "must be at least 1"
            )
        if not self.hidden_sizes:
            raise ValueError("hidden_sizes are empty; a network has at least one layer")


class WorldModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a world model is of."""

    env: str
    """name of the environment"""
    observation: ObservationSpec
    action: ActionSpec
    bounds: tuple[tuple[float, float], ...] = ()
    """lowest and highest value of each number of an action, as the environment takes it"""
    sizes: WorldModelSizes = WorldModelSizes()

    @property
    def spec(self) -> EnvSpec:
        """What a policy in it sees and does."""
        return EnvSpec(observation=self.observation, action=self.action, bounds=self.bounds)

    @property
    def action_size(self) -> int:
        """Numbers of an action as the model gets it: choices are one-hot."""
        return self.action.outputs


class WorldModelTrainerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that trains a world model."""

    info: WorldModelInfo
    fsdp: ShardingConfig
    folders: tuple[str, ...]
    """demonstrations with transitions"""
    held_out: int
    """last episodes of all, which it does not learn from"""
    batch_size: int
    """windows of an optimizer step, over all ranks"""
    seed: int = 0


def read_info(file: Path) -> WorldModelInfo:
    """Return what the world model in this file is of; reads no tensor.

    Raises:
        ConfigError: there is none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="np") as opened:
            said = (opened.metadata() or {}).get(METADATA, "")
        return msgspec.json.decode(said, type=WorldModelInfo)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{str(file)!r} is no world model: {error}; a run of the job "
            f"world_model leaves one, RUN/{FILE}"
        ) from error
