"""``make test``: the environment is what Gymnasium expects, and can be solved."""

import numpy as np
from gymnasium.utils.env_checker import check_env

from push import EPISODE_STEPS, PushDisc


def test_gymnasium_has_nothing_against_it() -> None:
    check_env(PushDisc(), skip_render_check=True)


def test_a_hand_that_pushes_towards_the_goal_succeeds() -> None:
    env = PushDisc()
    for seed in range(10):
        env.reset(seed=seed)
        over, info = False, {"is_success": False}
        for _ in range(EPISODE_STEPS):
            push = 4.0 * (env.goal - env.position) - 8.0 * env.speed
            _, _, _, over, info = env.step(np.asarray(push, np.float32))
        assert over
        assert info["is_success"], f"seed {seed}"
