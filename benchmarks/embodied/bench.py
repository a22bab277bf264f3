"""Whole PPO trainings against others', and first-ready batching against lock-step.

Both sides train with the same settings and seeds, alternating, with two cores at their disposal.
Others run with one torch thread and with two, and are judged by whichever is faster. Seconds are
those of training: neither side's imports, start or evaluation count.

::

    cheetah    HalfCheetah-v5, 200,000 steps: Stable-Baselines3; ours strictly on-policy, and with
               the next iteration collected while one is trained (``max_staleness = 1``)
    sac        Pendulum-v1, the shipped example of SAC, a gradient step for each of the steps:
               Stable-Baselines3
    envpool    HalfCheetah-v4 over EnvPool on both sides: a script after CleanRL's documentation;
               ours in both forms, as for cheetah
    reach      FetchReachDense-v4, the shipped example: Stable-Baselines3, `DummyVecEnv` of 8
    slow       one step in ten takes 50 ms: the same run with all environments in lock-step
"""

from __future__ import annotations

import math

from benchmarks.harness import Bar, Bench, Case, PeerSoftware, Results

SPEED, RETURN, SECONDS = "steps_per_second", "return", "seconds_to_success"
TRAIN_RETURN = "train_return"
OVERLAPPED = "cheetah, ours, overlapped"
CHEETAH, CHEETAH_SB3 = "cheetah, ours", ("cheetah, sb3, 1 thread", "cheetah, sb3, 2 threads")
SAC, SAC_SB3 = "sac, ours", "sac, sb3"
ENVPOOL, ENVPOOL_OVERLAPPED = "envpool, ours", "envpool, ours, overlapped"
ENVPOOL_CLEANRL = ("envpool, CleanRL's recipe, 1 thread", "envpool, CleanRL's recipe, 2 threads")
REACH, REACH_SB3 = "reach, ours", ("reach, sb3, 1 thread", "reach, sb3, 2 threads")
SLOW, LOCK_STEP = "slow, ours", "slow, lock-step"

STABLE_BASELINES3 = PeerSoftware(
    name="stable-baselines3",
    requirements=(
        ("torch==2.13.0",),
        (
            "stable-baselines3==2.9.2",
            "gymnasium==1.4.0",
            "gymnasium-robotics==1.4.2",
            "mujoco==3.11.0",
            "imageio==2.38.1",
            "packaging==26.3",
        ),
    ),
)


def fastest(results: Results, theirs: tuple[str, ...]) -> str:
    """The peer's case with whichever thread count is faster."""
    return max(theirs, key=lambda case: results.median(case, SPEED))


def _faster(name: str, ours: str, theirs: tuple[str, ...], at_least: float) -> Bar:
    return Bar(
        name=f"{name}: steps/s / theirs",
        cases=(ours, *theirs),
        value=lambda results: (
            results.median(ours, SPEED) / results.median(fastest(results, theirs), SPEED)
        ),
        target=lambda _: at_least,
        unit="x",
    )


def _as_good(name: str, ours: str, theirs: tuple[str, ...], metric: str = RETURN) -> Bar:
    """No lower than the lowest of the peer's seeds."""
    return Bar(
        name=f"{name}: median {metric.replace('_', ' ')} / lowest of theirs over the seeds",
        cases=(ours, *theirs),
        value=lambda results: results.median(ours, metric),
        target=lambda results: min(results.values(fastest(results, theirs), metric)),
    )


def _sooner(results: Results) -> float:
    """Their seconds to success by ours; inf where they alone did not reach it."""
    own = results.median(REACH, SECONDS)
    theirs = min(results.median(case, SECONDS) for case in REACH_SB3)
    return 0.0 if math.isinf(own) else theirs / own


def _ours(name: str, file: str, *overrides: str, needs: tuple[str, ...] = ()) -> Case:
    return Case(
        name,
        ("{python}", "{here}/ours.py", f"{{here}}/{file}", "{out}/run", *overrides),
        requires=("gymnasium", *needs),
        cores=2,
        threads=None,
    )


def _sb3(name: str, script: str, threads: int) -> Case:
    return Case(
        name,
        ("{python}", f"{{here}}/{script}", "{repetition}", str(threads)),
        peer=STABLE_BASELINES3,
        cores=2,
        threads=threads,
    )


def _cleanrl(name: str, threads: int) -> Case:
    return Case(
        name,
        ("{python}", "{here}/cleanrl_style.py", "{repetition}", str(threads)),
        cores=2,
        threads=threads,
    )


_SEED = ("--seed", "{repetition}")
_MEANWHILE = ("--training.max_staleness", "1")
"""the next iteration is collected while one is trained"""

BENCH = Bench(
    name="embodied",
    summary="PPO and SAC against Stable-Baselines3 and CleanRL's recipe; slow steps in lock-step",
    cases=(
        _ours(CHEETAH, "../half_cheetah_ppo.toml", *_SEED, needs=("mujoco",)),
        _ours(
            OVERLAPPED,
            "../half_cheetah_ppo.toml",
            *_SEED,
            *_MEANWHILE,
            needs=("mujoco",),
        ),
        _sb3(CHEETAH_SB3[0], "sb3_ppo.py", 1),
        _sb3(CHEETAH_SB3[1], "sb3_ppo.py", 2),
        _ours(SAC, "../../examples/sac_pendulum.toml", *_SEED),
        Case(
            SAC_SB3,
            ("{python}", "{here}/../returns/sb3_sac.py", "{repetition}", "20"),
            peer=STABLE_BASELINES3,
            cores=2,
        ),
        _ours(ENVPOOL, "half_cheetah_envpool.toml", *_SEED),
        _ours(
            ENVPOOL_OVERLAPPED,
            "half_cheetah_envpool.toml",
            *_SEED,
            *_MEANWHILE,
        ),
        _cleanrl(ENVPOOL_CLEANRL[0], 1),
        _cleanrl(ENVPOOL_CLEANRL[1], 2),
        _ours(
            REACH,
            "../../examples/fetch_reach_ppo.toml",
            *_SEED,
            "--evaluation.video_episodes",
            "0",
            needs=("gymnasium_robotics",),
        ),
        _sb3(REACH_SB3[0], "sb3_fetch_reach.py", 1),
        _sb3(REACH_SB3[1], "sb3_fetch_reach.py", 2),
        _ours(SLOW, "slow_steps.toml", *_SEED),
        _ours(
            LOCK_STEP,
            "slow_steps.toml",
            *_SEED,
            *("--env.simulator", "vector", "--env.entry_point", "slow_steps:LockStep"),
        ),
    ),
    bars=(
        _faster("HalfCheetah, Stable-Baselines3", CHEETAH, CHEETAH_SB3, 2.0),
        _faster("HalfCheetah, overlapped, Stable-Baselines3", OVERLAPPED, CHEETAH_SB3, 2.0),
        _as_good("HalfCheetah", CHEETAH, CHEETAH_SB3),
        _as_good("HalfCheetah, overlapped", OVERLAPPED, CHEETAH_SB3),
        _faster("SAC on Pendulum-v1, Stable-Baselines3", SAC, (SAC_SB3,), 1.5),
        _faster("HalfCheetah over EnvPool, CleanRL's recipe", ENVPOOL, ENVPOOL_CLEANRL, 2.5),
        _faster(
            "HalfCheetah over EnvPool, overlapped, CleanRL's recipe",
            ENVPOOL_OVERLAPPED,
            ENVPOOL_CLEANRL,
            2.5,
        ),
        _as_good("HalfCheetah over EnvPool", ENVPOOL, ENVPOOL_CLEANRL, TRAIN_RETURN),
        _as_good(
            "HalfCheetah over EnvPool, overlapped",
            ENVPOOL_OVERLAPPED,
            ENVPOOL_CLEANRL,
            TRAIN_RETURN,
        ),
        _faster("FetchReach, Stable-Baselines3", REACH, REACH_SB3, 2.0),
        Bar(
            name="FetchReach: their seconds to success 0.95 / ours",
            cases=(REACH, *REACH_SB3),
            value=_sooner,
            target=lambda _: 1.8,
            unit="x",
        ),
        _faster("10 % of the steps take 50 ms, lock-step", SLOW, (LOCK_STEP,), 3.0),
    ),
    repetitions=3,
    notes=(
        "two cores each; seeds 0, 1, 2; theirs is the faster of one and two torch threads",
        "return: mean of deterministic evaluation episodes after training",
        "train_return: mean of the last 32 episodes of the training, with sampled actions",
        "success: of the last 100 episodes of the training, with sampled actions",
    ),
)
