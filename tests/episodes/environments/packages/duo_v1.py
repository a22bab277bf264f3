"""An environment of verifiers with two agents, of which one is not trained."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]

AGENT = {"harness": {"id": "sums-v1"}, "runtime": {"type": "subprocess"}}


class DuoConfig(vf.EnvConfig):  # type: ignore[misc]
    solver: vf.AgentConfig = vf.AgentConfig(**AGENT)
    judge: vf.AgentConfig = vf.AgentConfig(**AGENT)


class DuoEnv(vf.Env[DuoConfig]):  # type: ignore[misc]
    async def setup(self, agents: Any) -> None:
        """Say who is not trained."""
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        """Both play the same task."""
        await agents.solver.run(task)
        await agents.judge.run(task)


__all__ = ["DuoEnv"]
