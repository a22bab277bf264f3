"""Tasks of Isaac Lab: thousands of environments in one call, on a GPU::

    [env]
    simulator = "vector"
    entry_point = "rlinf_async.workers.env.adapters.isaaclab:make"
    kwargs = {task = "Isaac-Reach-Franka-v0"}
    envs = 1024
    stages = 1

Isaac Lab's environments show groups of observations, of which ``policy`` is what a policy sees, and
begin the next episode in the step that ends one. Versions whose configurations have
``compute_final_obs`` show the last observation of the old one, too. In those before, it is nowhere:
what was shown one step earlier stands in for it, and gives the value of a cut episode.

It does not say whether an episode succeeded.

Written from Isaac Lab's sources (`ManagerBasedRLEnv` and `DirectRLEnv`, 2.x and 3.0), and not run:
it needs Isaac Sim, or its own physics on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from rlinf_async.config import UsageError

GROUP: Final = "policy"
FINAL: Final = "final_obs"


def make(task: str, num_envs: int, device: str = "cuda:0", **settings: Any) -> IsaacLabEnvs:
    """Many environments of a task, such as ``"Isaac-Reach-Franka-v0"``.

    Args:
        task: name that Isaac Lab has registered.
        num_envs: number of environments.
        device: where they are simulated.
        settings: what Isaac Lab's ``AppLauncher`` takes, such as ``enable_cameras``.

    Raises:
        UsageError: Isaac Lab is not installed.
    """
    try:
        launcher = importlib.import_module("isaaclab.app")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Isaac Lab is not installed ({error}): install it as its own documentation says, and "
            "name its Python in cluster.placement.env.python"
        ) from error
    # The simulator has to run before anything else of Isaac Lab is imported.
    app = launcher.AppLauncher(**{"headless": True, "device": device} | settings).app
    utils = importlib.import_module("isaaclab_tasks.utils")
    gymnasium: Any = importlib.import_module("gymnasium")
    config = utils.parse_env_cfg(task, device=device, num_envs=num_envs)
    if hasattr(config, "compute_final_obs"):
        config.compute_final_obs = True
    return IsaacLabEnvs(gymnasium.make(task, cfg=config).unwrapped, app)


class IsaacLabEnvs:
    """Environments of Isaac Lab, as those of a vectorised simulator of Gymnasium."""

    def __init__(self, env: Any, app: Any = None) -> None:
        """``app`` is the simulator, which lives as long as this."""
        vector: Any = importlib.import_module("gymnasium.vector")
        self.metadata: dict[str, Any] = {"autoreset_mode": vector.AutoresetMode.SAME_STEP}
        self._env, self._app = env, app
        self.num_envs: int = env.num_envs
        self.single_observation_space: Any = env.single_observation_space[GROUP]
        self.single_action_space: Any = env.single_action_space
        self._shown: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes."""
        seen, _ = self._env.reset(seed=seed, options=options)
        self._shown = _copied(seen[GROUP])
        return seen[GROUP], {}

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take one step in every environment."""
        torch: Any = importlib.import_module("torch")
        on_device = torch.as_tensor(actions, dtype=torch.float32, device=self._env.device)
        seen, reward, terminated, truncated, extras = self._env.step(on_device)
        last = extras[FINAL][GROUP] if FINAL in extras else self._shown
        # The simulator may write the next observations into the same tensors.
        self._shown = _copied(seen[GROUP])
        return seen[GROUP], reward, terminated, truncated, {FINAL: last}

    def close(self) -> None:
        """Close the environments; the simulator ends with this process."""
        self._env.close()


def _copied(seen: Any) -> Any:
    if isinstance(seen, Mapping):
        return {name: _copied(part) for name, part in seen.items()}
    return seen.clone()
