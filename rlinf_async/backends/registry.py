"""Backends by name, imported only when one is asked for: nothing here needs torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from rlinf_async.backends.base import OffPolicyTrainer, PolicyBackend, TrainerBackend
from rlinf_async.backends.language import GenerationEngine, LanguageTrainer


class TrainerFactory(Protocol):
    """Builds one rank's trainer from the backend's own configuration."""

    def __call__(self, config: Any, world_size: int, rank: int, /) -> TrainerBackend: ...


class OffPolicyTrainerFactory(Protocol):
    """Builds one rank's trainer that learns from replay, for a policy of known spaces."""

    def __call__(
        self, config: Any, policy: Any, world_size: int, rank: int, /
    ) -> OffPolicyTrainer: ...


class PolicyFactory(Protocol):
    """Builds a policy that acts, from the backend's own configuration."""

    def __call__(self, config: Any, seed: int, device: str, /) -> PolicyBackend: ...


class EngineFactory(Protocol):
    """Makes an engine that generates, from the backend's own configuration. Cheap: `start` builds.

    ``seed``: for random numbers that a request's own seed does not set; ``device``: torch's name.
    """

    def __call__(self, config: Any, seed: int, device: str, /) -> GenerationEngine: ...


class LanguageTrainerFactory(Protocol):
    """Builds one rank's trainer of a language model from the backend's own configuration."""

    def __call__(self, config: Any, world_size: int, rank: int, /) -> LanguageTrainer: ...


TRAINERS = {"fsdp": "rlinf_async.backends.fsdp.embodied:EmbodiedTrainer"}
"""name -> ``module:factory``; the factory's module documents its configuration"""

OFF_POLICY_TRAINERS = {"sac": "rlinf_async.backends.fsdp.sac:SacTrainer"}

LANGUAGE_TRAINERS = {
    "toy": "rlinf_async.backends.toy.trainer:ToyTrainer",
    "cost": "rlinf_async.backends.cost.trainer:CostTrainer",
    "fsdp": "rlinf_async.backends.fsdp.language.trainer:PolicyTrainer",
    "megatron": "rlinf_async.backends.megatron.trainer:MegatronTrainer",
    "megatron_critic": "rlinf_async.backends.megatron.critic:MegatronCriticTrainer",
    "fsdp_critic": "rlinf_async.backends.fsdp.language.critic:CriticTrainer",
}

WITHOUT_COLLECTIVES = frozenset({"toy", "cost"})
"""language trainers whose ranks exchange nothing, and need no torch.distributed"""

_LANGUAGE = (
    "torch._dynamo",  # an optimizer's first step imports it
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
)
SLOW_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "rlinf_async.backends.fsdp.embodied": ("torch._dynamo", "torch.distributed.fsdp"),
    "rlinf_async.backends.fsdp.sac": ("torch._dynamo", "torch.distributed.fsdp"),
    "rlinf_async.backends.fsdp.language.trainer": _LANGUAGE,
    "rlinf_async.backends.fsdp.language.critic": _LANGUAGE,
    "rlinf_async.backends.megatron.trainer": (*_LANGUAGE, "megatron.core"),
    "rlinf_async.backends.megatron.critic": (*_LANGUAGE, "megatron.core"),
    "rlinf_async.backends.policies.serving": (),
    "rlinf_async.backends.transformers.engine": _LANGUAGE,
}
"""A backend's module, and what it imports only when it is at work. One that is not here imports
little, or starts threads meanwhile."""

POLICIES = {"torch": "rlinf_async.backends.policies.serving:serve_policy"}

ENGINES = {
    "toy": "rlinf_async.backends.toy.engine:ToyEngine",
    "cost": "rlinf_async.backends.cost.engine:CostEngine",
    "transformers": "rlinf_async.backends.transformers.engine:TransformersEngine",
    "vllm": "rlinf_async.backends.vllm.engine:VllmEngine",
}


class UnknownBackend(LookupError):
    """The message lists the known names."""


def load_trainer_backend(name: str) -> TrainerFactory:
    """Return the factory of the trainer ``name``; raises `UnknownBackend`."""
    factory: TrainerFactory = _load("trainer", TRAINERS, name)
    return factory


def load_off_policy_trainer(name: str) -> OffPolicyTrainerFactory:
    """Return the factory of the off-policy trainer ``name``; raises `UnknownBackend`."""
    factory: OffPolicyTrainerFactory = _load("off-policy trainer", OFF_POLICY_TRAINERS, name)
    return factory


def load_language_trainer(name: str) -> LanguageTrainerFactory:
    """Return the factory of the language trainer ``name``; raises `UnknownBackend`."""
    factory: LanguageTrainerFactory = _load("language trainer", LANGUAGE_TRAINERS, name)
    return factory


def load_policy_backend(name: str) -> PolicyFactory:
    """Return the factory of the policy backend ``name``; raises `UnknownBackend`."""
    factory: PolicyFactory = _load("policy", POLICIES, name)
    return factory


def load_generation_engine(name: str) -> EngineFactory:
    """Return the factory of the generation engine ``name``; raises `UnknownBackend`."""
    factory: EngineFactory = _load("generation", ENGINES, name)
    return factory


def slow_imports(table: Mapping[str, str], name: str | None) -> tuple[str, ...]:
    """The modules that a backend takes seconds to import, see `Worker.slow_imports`."""
    module = table.get(name or "", "").partition(":")[0]
    return (*SLOW_IMPORTS[module], module) if module in SLOW_IMPORTS else ()


def _load(kind: str, table: dict[str, str], name: str) -> Any:
    if name not in table:
        nearest = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownBackend(f"no {kind} backend is called {name!r}{hint} (known: {sorted(table)})")
    module, _, factory = table[name].partition(":")
    return getattr(importlib.import_module(module), factory)
