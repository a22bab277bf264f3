"""What trained policies reach, against Stable-Baselines3's with the same settings, and its figures.

::

    sac     Pendulum-v1, examples/sac_pendulum.toml: 10,000 steps, 9,800 gradient steps
    pixel   examples/pixel_reach.toml: a CNN on images of 32 x 32 pixels, PPO, 102,400 steps

The published return of Stable-Baselines3's SAC on Pendulum-v1 is -156.995, with a deviation of
88.714 over 750 episodes, after 20,000 steps with layers of 256: the benchmark page of RL Baselines3
Zoo (one run). A mean over fewer episodes is in its range where it is at most two standard errors
below.
"""

from __future__ import annotations

import math

from benchmarks.harness import Bar, Bench, Case, PeerSoftware

PUBLISHED, DEVIATION, EPISODES = -156.995, 88.714, 100
RANGE = PUBLISHED - 2.0 * DEVIATION / math.sqrt(EPISODES)
RETURN, SUCCESS = "return", "success"
SAC, SAC_SB3 = "sac, ours", "sac, sb3"
PIXEL, PIXEL_SB3 = "pixel, ours", "pixel, sb3"
STABLE_BASELINES3 = PeerSoftware(
    name="stable-baselines3-returns",
    requirements=(("torch==2.13.0",), ("stable-baselines3==2.9.2", "gymnasium==1.4.0")),
)


def _ours(name: str, file: str, *overrides: str) -> Case:
    settings = ("--seed", "{repetition}", "--evaluation.episodes", str(EPISODES), *overrides)
    return Case(
        name,
        ("{python}", "{here}/ours.py", f"{{here}}/../../examples/{file}", "{out}/run", *settings),
        requires=("gymnasium",),
        cores=2,
    )


def _sb3(name: str, script: str) -> Case:
    command = ("{python}", f"{{here}}/{script}", "{repetition}", str(EPISODES))
    return Case(name, command, peer=STABLE_BASELINES3, cores=2, timeout=1200.0)


BENCH = Bench(
    name="returns",
    summary="what SAC and a CNN reach, against Stable-Baselines3 and its published figures",
    cases=(
        _ours(SAC, "sac_pendulum.toml"),
        _sb3(SAC_SB3, "sb3_sac.py"),
        _ours(
            PIXEL,
            "pixel_reach.toml",
            *("--evaluation.video_episodes", "0"),
        ),
        _sb3(PIXEL_SB3, "sb3_pixel_reach.py"),
    ),
    bars=(
        Bar(
            name="SAC on Pendulum-v1: lowest return / the published range",
            cases=(SAC,),
            value=lambda results: min(results.values(SAC, RETURN)),
            target=lambda _: RANGE,
        ),
        Bar(
            name="SAC on Pendulum-v1: median return / lowest of theirs",
            cases=(SAC, SAC_SB3),
            value=lambda results: results.median(SAC, RETURN),
            target=lambda results: min(results.values(SAC_SB3, RETURN)),
        ),
        Bar(
            name="pixel_reach: lowest success / lowest of theirs",
            cases=(PIXEL, PIXEL_SB3),
            value=lambda results: min(results.values(PIXEL, SUCCESS)),
            target=lambda results: min(results.values(PIXEL_SB3, SUCCESS)),
        ),
    ),
    repetitions=3,
    notes=(
        "seeds 0, 1, 2; return and success are means of 100 deterministic episodes after training",
        f"published: {PUBLISHED} +- {DEVIATION} (RL Baselines3 Zoo); its range ends at {RANGE:.1f}",
    ),
)
