"""State tasks of ManiSkill on a CPU, also on a host that cannot render::

    [env]
    entry_point = "rlinf_async.workers.env.adapters.maniskill:make"
    kwargs = {task = "PushCube-v1", control_mode = "pd_joint_delta_pos"}

ManiSkill gives every body a look when a scene is built, which needs a Vulkan driver even where no
picture is ever made. Where there is none, looks are left out here; physics are as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium

from rlinf_async.config import needed


class NoMaterial:
    """A stand-in for a material or texture of SAPIEN: it takes every property, and has none."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Take what a material takes."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave the property out."""


def make(task: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """One environment of a task, such as ``"PushCube-v1"``, that shows its state as one vector.

    An episode lasts to its time limit: it succeeds if the task is solved at its last step. So a
    policy gains by solving it early.

    Raises:
        MissingExtra: ManiSkill is not installed.
    """
    needed("mani_skill.envs", extra="maniskill", needed_for="the simulator maniskill")
    rendering = kwargs.get("render_mode") is not None
    if not rendering and not _can_render():
        _replace_materials()
    wrappers = importlib.import_module("mani_skill.utils.wrappers.gymnasium")
    backend = "gpu" if rendering else "none"
    made = gymnasium.make(
        task, obs_mode="state", num_envs=1, sim_backend="cpu", render_backend=backend, **kwargs
    )
    single: gymnasium.Env[Any, Any] = wrappers.CPUGymWrapper(made, ignore_terminations=True)
    return single


def _can_render() -> bool:
    sapien = importlib.import_module("sapien")
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:  # "failed to find a rendering device", and others
        return False
    return True


def _replace_materials() -> None:
    for module in ("sapien.render", "sapien.pysapien.render"):
        for name in ("RenderMaterial", "RenderTexture", "RenderTexture2D"):
            setattr(importlib.import_module(module), name, NoMaterial)
