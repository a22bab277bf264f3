"""Whether environments can be made here, and which policy fits them.

Each is made in a process of its own: a simulator that crashes for want of a driver, or hangs, ends
that process and nothing else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rlinf_async.backends.policies.config import (
    VISION_LANGUAGE,
    PolicyConfig,
    cnn_misfit,
    mlp_misfit,
    policy_for,
)
from rlinf_async.config import UsageError
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.jobs.embodied.settings import in_own_process
from rlinf_async.workers.env import EnvConfig, EnvError, describe_env
from rlinf_async.workers.errors import WorkerError


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What came of making one environment."""

    spec: EnvSpec | None = None
    policy: str = ""
    """built-in policy that fits its spaces; empty: none does"""
    problem: str = ""
    """why it could not be made, or why no policy fits; empty: all is well"""


def fit_of(spec: EnvSpec) -> Fit:
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
        return Fit(spec=spec, policy=name)
    if spec.observation.of_kind("image") and spec.observation.of_kind("text"):
        if importlib.util.find_spec("transformers") is None:
            needed = "it needs the package 'transformers': pip install 'rlinf-async[llm]'"
            return Fit(spec=spec, problem=f"{VISION_LANGUAGE}: {needed}")
        from rlinf_async.backends.policies.vision_language.fitting import misfit

        problem = misfit(msgspec.structs.replace(config, name=VISION_LANGUAGE, action_chunk=1))
        if not problem:
            return Fit(spec=spec, policy=VISION_LANGUAGE)
    return Fit(spec=spec, problem=problem)


def asked(config: EnvConfig) -> Fit:
    """Make the environment in another process, and say which policy fits it."""
    try:
        return fit_of(in_own_process(describe_env, config, returns=EnvSpec))
    except (UsageError, EnvError, WorkerError) as error:
        return Fit(problem=str(error).splitlines()[0])


def asked_all(configs: Sequence[EnvConfig]) -> Iterator[Fit]:
    """`asked` of each, in their order; two at a time."""
    with ThreadPoolExecutor(2) as threads:
        yield from threads.map(asked, configs)
