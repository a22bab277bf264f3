"""Whether policy and environments share a process: chosen by measuring both, before a run starts.

A pass is one step of all environments of an env worker, in ``S`` stages. With ``W`` env workers on
``C`` cores, a step of a stage of ``t`` seconds, and a forward pass for it of ``f`` seconds::

    together   S (t + f)                               x W / C, where there are more workers
    apart      the longest of   S t                    an env worker has something to do always
                                t + f + hop            each stage waits for its answer
                                W S f                  the rollout worker answers all
                                W S (t + f + hop) / C  what there is to compute, over the cores

With ``env.parallel`` the stages of a worker step at the same time: ``S t`` is ``t`` then.
Apart has to be a tenth better, because forward passes there are of what happens to be ready.

An environment is tried in a process of its own: a simulator that crashes for want of a driver, or
hangs, ends that process and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from rlinf_async.backends.policies.config import (
    VISION_LANGUAGE,
    PolicyConfig,
    cnn_misfit,
    mlp_misfit,
    policy_for,
)
from rlinf_async.config import UsageError
from rlinf_async.config.registry import raised
from rlinf_async.messages.spaces import EnvSpec, ObservationArray
from rlinf_async.runtime.jobs.embodied.settings import (
    EmbodiedClusterConfig,
    EnvironmentSettings,
    in_own_process,
    tried,
)
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.workers.base import Device, WorkerError
from rlinf_async.workers.env import EnvError, describe_env
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.trial import Stepped, seconds_of

HOP: Final = 3e-4
"""seconds from a question to its answer between two processes, without the forward pass"""
GAIN: Final = 0.9
"""share of the time together that apart has to stay below: its forward passes are of what happens
to be ready"""
ENOUGH: Final = 0.25
"""seconds for measuring each of the two"""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Number of rollout workers of a run, with the reason."""

    rollout_workers: int
    reason: str

    def __str__(self) -> str:
        how = "apart" if self.rollout_workers else "in one process"
        return f"rollout_workers = {self.rollout_workers} ({how}): {self.reason}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage."""

    step: float
    """seconds of a step of all environments of the stage"""
    forward: float
    """seconds of a forward pass of the policy for all observations of the stage"""


def planned(config: EnvironmentSettings, devices: Sequence[Device] | None) -> PlacementPlan:
    """The devices of every worker: on this host, or on a machine with these devices."""
    if config.cluster.rollout_workers == "auto":
        config = msgspec.structs.replace(config, cluster=foreseen(config, devices))
    return config.plan(config.cluster.devices() if devices is None else devices)


def tried_and_chosen(
    config: EnvironmentSettings, full: EnvironmentSettings
) -> EmbodiedClusterConfig:
    """Try the environment of a run that begins now, and choose as `chosen`; ``full`` is ``config``,
    fitted to the environment."""
    return chosen(full, tried(config, seconds_to_measure(config)))


def chosen(
    config: EnvironmentSettings, stepped: Stepped | None, devices: Sequence[Device] | None = None
) -> EmbodiedClusterConfig:
    """The configuration's ``cluster`` with a number of rollout workers; what was chosen is printed.

    ``stepped`` are steps that were measured; ``devices`` those of another machine, None: of this
    host.
    """
    cluster = config.cluster
    if cluster.rollout_workers != "auto":
        return cluster
    choice = decided(config, devices) or _measured(config, stepped)
    print(f"{config.name}: {choice}", flush=True)
    return msgspec.structs.replace(cluster, rollout_workers=choice.rollout_workers)


def foreseen(
    config: EnvironmentSettings, devices: Sequence[Device] | None = None
) -> EmbodiedClusterConfig:
    """Return the choice of `chosen`, as far as it can be made without a step of an environment."""
    if config.cluster.rollout_workers != "auto" or decided(config, devices) is not None:
        return chosen(config, None, devices)
    print(
        f"{config.name}: rollout_workers = 0 or 1, as measured when the run begins; planned for 1",
        flush=True,
    )
    return config.cluster


def decided(config: EnvironmentSettings, devices: Sequence[Device] | None = None) -> Choice | None:
    """The number of rollout workers, where it does not have to be measured: it matters only on CPUs
    of this host. None: it has to be."""
    cluster = config.cluster
    if not cluster.processes:
        return Choice(rollout_workers=0, reason="everything is in one process")
    if cluster.backend == "ray":
        return Choice(rollout_workers=1, reason="other hosts are not measured")
    seen = cluster.devices() if devices is None else devices
    if any(device.kind != "cpu" for device in seen):
        return Choice(rollout_workers=1, reason="the policy has a device of its own")
    if not config.env.probe:
        return Choice(rollout_workers=1, reason="not measured, because env.probe = false")
    if config.env.control.hz and config.env.simulator == "single":
        return Choice(rollout_workers=1, reason="the policy does not hold up a robot's loop")
    if config.env.asynchronous:
        # Its own process only hands on what is ready: the policy is answered there soonest.
        return Choice(rollout_workers=0, reason="the environments step beside the policy already")
    return None


def seconds_to_measure(config: EnvironmentSettings) -> float:
    """Seconds for which steps are to be measured; 0: they need not be."""
    auto = config.cluster.rollout_workers == "auto"
    return ENOUGH if auto and decided(config) is None else 0.0


def _measured(config: EnvironmentSettings, stepped: Stepped | None) -> Choice:
    if stepped is None:
        return Choice(rollout_workers=1, reason="not measured: the environment raised")
    try:
        forward = _answering(config, stepped.rows(config.acting_policy.sees))
    except Exception as error:  # its worker makes the policy again, and says more
        return Choice(rollout_workers=1, reason=f"not measured: {raised(error)}")
    measured = Measured(step=stepped.seconds, forward=forward)
    return compare(measured, config.env, config.cluster, len(os.sched_getaffinity(0)))


def compare(
    measured: Measured, env: EnvConfig, cluster: EmbodiedClusterConfig, cores: int
) -> Choice:
    """The faster of the two, by the model above."""
    step, forward = measured.step, measured.forward
    stages, workers = env.stages, cluster.env_workers
    stepping = step if env.parallel else stages * step
    together = (stepping + stages * forward) * max(1.0, workers / cores)
    apart = max(
        stepping,
        step + forward + HOP,
        workers * stages * forward,
        workers * stages * (step + forward + HOP) / cores,
    )
    return Choice(
        rollout_workers=int(apart < GAIN * together),
        reason=f"{env.envs_per_stage} environments step in {step * 1e3:.2f} ms, the policy answers "
        f"in {forward * 1e3:.2f} ms; a step of {stages} x {env.envs_per_stage} takes "
        f"{together * 1e3:.2f} ms in one process, {apart * 1e3:.2f} ms apart, on {cores} cores",
    )


def _answering(config: EnvironmentSettings, seen: ObservationArray) -> float:
    import torch

    from rlinf_async.backends.parts import DEFAULT_POLICY_BACKEND, policy_backends

    before = torch.get_num_threads()
    random = torch.random.get_rng_state()
    try:
        torch.set_num_threads(config.rollout.torch_threads or before)
        part = policy_backends.load(DEFAULT_POLICY_BACKEND)
        policy = part.make(config.acting_policy, 0, "cpu")
        return seconds_of(lambda: policy.act(seen), ENOUGH)
    finally:
        torch.set_num_threads(before)
        torch.random.set_rng_state(random)


class MadeEnv(msgspec.Struct, frozen=True, kw_only=True):
    """Result of making one environment."""

    spec: EnvSpec | None = None
    policy: str = ""
    """built-in policy that fits its spaces; empty: none does"""
    problem: str = ""
    """reason why the environment could not be made, or why no policy fits; empty: all is well"""


def fit_of(spec: EnvSpec) -> MadeEnv:
    """The built-in policy that a run would take, or why there is none."""
    config = PolicyConfig(
        observation_size=spec.observation_size,
        action_size=spec.action_size,
        observation=spec.observation,
        action=spec.action,
    )
    name = policy_for(config)
    problem = cnn_misfit(config) if name == "cnn" else mlp_misfit(config)
    if not problem:
        return MadeEnv(spec=spec, policy=name)
    if spec.observation.of_kind("image") and spec.observation.of_kind("text"):
        if importlib.util.find_spec("transformers") is None:
            needed = "it needs the package 'transformers': pip install 'rlinf-async[llm]'"
            return MadeEnv(spec=spec, problem=f"{VISION_LANGUAGE}: {needed}")
        from rlinf_async.backends.policies.vision_language.fitting import misfit

        problem = misfit(msgspec.structs.replace(config, name=VISION_LANGUAGE, action_chunk=1))
        if not problem:
            return MadeEnv(spec=spec, policy=VISION_LANGUAGE)
    return MadeEnv(spec=spec, problem=problem)


def asked(config: EnvConfig) -> MadeEnv:
    """Make the environment in another process, and say which policy fits it."""
    try:
        return fit_of(in_own_process(describe_env, config, returns=EnvSpec))
    except (UsageError, EnvError, WorkerError) as error:
        return MadeEnv(problem=str(error).splitlines()[0])


def asked_all(configs: Sequence[EnvConfig]) -> Iterator[MadeEnv]:
    """Yield what `asked` returns for each configuration, in order; two are asked at a time."""
    with ThreadPoolExecutor(2) as threads:
        yield from threads.map(asked, configs)
