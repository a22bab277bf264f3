"""The configuration of environments."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environments of each env worker."""

    id: str = ""
    """registered Gymnasium id; with ``entry_point``, a name for reports"""
    entry_point: str = ""
    """``"module:function"`` or ``"file.py:function"``: takes ``kwargs``, returns the env"""
    kwargs: dict[str, Any] = {}
    """arguments of ``gymnasium.make`` or of the entry point"""
    envs: int = 8
    """number of environments in each worker"""
    stages: int = 2
    """number of groups of environments: while one waits for its actions, another steps"""
    seed: int = 0
    actions: Literal["clip", "rescale"] = "clip"
    """continuous actions are clipped to the bounds, or [-1, 1] is rescaled to the bounds"""

    action_chunk: int = 1
    """actions that the policy answers with at once, and that are executed one by one"""
    group_size: int = 1
    """environments that begin an iteration in the same state; above 1, an iteration is one episode
    of each: steps after its end are not trained"""

    def __post_init__(self) -> None:
        if not self.id and not self.entry_point:
            raise ValueError(
                'which environment? give id, as in id = "FetchReachDense-v4", or entry_point, '
                'as in entry_point = "my_module:make_env"'
            )
        module, _, function = self.entry_point.rpartition(":")
        if self.entry_point and not (module and function):
            raise ValueError(
                f"entry_point is {self.entry_point!r}; it must be 'module:function' or "
                "'file.py:function'"
            )
        if self.envs < 1 or self.stages < 1 or self.seed < 0:
            raise ValueError(
                f"envs is {self.envs}, stages is {self.stages}, seed is {self.seed}; envs and "
                "stages must be at least 1, seed at least 0"
            )
        if self.action_chunk < 1 or self.group_size < 1:
            raise ValueError(
                f"action_chunk is {self.action_chunk}, group_size is {self.group_size}; both must "
                "be at least 1"
            )
        if self.envs // self.stages % self.group_size:
            raise ValueError(
                f"envs = {self.envs} in stages = {self.stages} are {self.envs // self.stages} "
                f"environments in each stage, which are no whole groups of group_size = "
                f"{self.group_size}"
            )
        if self.envs % self.stages:
            raise ValueError(
                f"envs = {self.envs} cannot be divided into stages = {self.stages} groups of equal "
                f"size: take a multiple of {self.stages}, or stages = 1"
            )

    @property
    def name(self) -> str:
        """The name of the environment in reports."""
        return self.id or self.entry_point

    @property
    def envs_per_stage(self) -> int:
        """The number of environments in each group."""
        return self.envs // self.stages

    @property
    def rendering(self) -> bool:
        """Whether the environment has a renderer, which must stay in the thread that made it."""
        return self.kwargs.get("render_mode") is not None
