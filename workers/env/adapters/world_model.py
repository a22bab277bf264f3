"""A world model as a simulator of many environments: ``env.simulator = "vector"``.

The job ``world_model`` leaves a file, ``RUN/world_model.safetensors``; what acts in it sees and
does what it would in the environment that the model is of.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

from rlinf_async.config import ConfigError


def make(
    *,
    num_envs: int,
    model: str,
    horizon: int | None = None,
    begins: Literal["first", "anywhere"] = "first",
    success: Literal["terminated"] | None = None,
) -> Any:
    """Make ``num_envs`` environments in a world model.

    Args:
        num_envs: environments that step in one call.
        model: the model's file.
        horizon: steps after which an episode is cut; as many as it was trained for when left out.
        begins: ``"first"``: episodes begin as recorded ones did; ``"anywhere"``: anywhere in them.
        success: ``"terminated"``: an episode that ends for good has succeeded; None: nothing is
            said of success.

    Raises:
        ConfigError: with the argument that is wrong.
    """
    if success not in (None, "terminated"):
        raise ConfigError(
            f"{success!r}; it is 'terminated', or left out", path=("kwargs", "success")
        )
    dreaming = importlib.import_module("rlinf_async.backends.world_model.dreaming")
    file = Path(model)
    try:
        return dreaming.Dreams(file, num_envs, horizon=horizon, begins=begins, success=success)
    except ConfigError as error:
        raise (
            error if error.path else ConfigError(error.problem, path=("kwargs", "model"))
        ) from error
