"""Backends by name, imported only when one is asked for: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rlinf_async.backends.base import OffPolicyTrainer, PolicyBackend, TrainerBackend
from rlinf_async.backends.language import GenerationEngine, LanguageTrainer
from rlinf_async.config.registry import Registry, UnknownName

UnknownBackend = UnknownName


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


ONE_RANK = ("config", "world_size", "rank")
"""arguments of a trainer"""

_trainers: Registry[TrainerFactory] = Registry(
    "trainer backend",
    entries={"fsdp": "rlinf_async.backends.fsdp.embodied:EmbodiedTrainer"},
    group="rlinf_async.trainers",
    called_with=ONE_RANK,
)
TRAINERS = _trainers.paths
"""name -> ``module:factory``; the factory's module documents its configuration"""

_off_policy_trainers: Registry[OffPolicyTrainerFactory] = Registry(
    "off-policy trainer backend",
    entries={"sac": "rlinf_async.backends.fsdp.sac:SacTrainer"},
    group="rlinf_async.off_policy_trainers",
    called_with=("config", "policy", "world_size", "rank"),
)

OFF_POLICY_TRAINERS = _off_policy_trainers.paths

_language_trainers: Registry[LanguageTrainerFactory] = Registry(
    "language trainer backend",
    group="rlinf_async.language_trainers",
    called_with=ONE_RANK,
)
LANGUAGE_TRAINERS = _language_trainers.paths
LANGUAGE_TRAINERS |= {
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

_policies: Registry[PolicyFactory] = Registry(
    "policy backend",
    entries={"torch": "rlinf_async.backends.policies.serving:serve_policy"},
    group="rlinf_async.policy_backends",
    called_with=("config", "seed", "device"),
)
POLICIES = _policies.paths

_engines: Registry[EngineFactory] = Registry(
    "generation backend",
    group="rlinf_async.engines",
    called_with=("config", "seed", "device"),
)
ENGINES = _engines.paths
ENGINES |= {
    "toy": "rlinf_async.backends.toy.engine:ToyEngine",
    "cost": "rlinf_async.backends.cost.engine:CostEngine",
    "transformers": "rlinf_async.backends.transformers.engine:TransformersEngine",
    "vllm": "rlinf_async.backends.vllm.engine:VllmEngine",
}


def load_trainer_backend(name: str) -> TrainerFactory:
    """Return the factory of the trainer ``name``; raises `UnknownBackend`."""
    return _trainers.load(name)


def load_off_policy_trainer(name: str) -> OffPolicyTrainerFactory:
    """Return the factory of the off-policy trainer ``name``; raises `UnknownBackend`."""
    return _off_policy_trainers.load(name)


def load_language_trainer(name: str) -> LanguageTrainerFactory:
    """Return the factory of the language trainer ``name``; raises `UnknownBackend`."""
    return _language_trainers.load(name)


def load_policy_backend(name: str) -> PolicyFactory:
    """Return the factory of the policy backend ``name``; raises `UnknownBackend`."""
    return _policies.load(name)


def load_generation_engine(name: str) -> EngineFactory:
    """Return the factory of the generation engine ``name``; raises `UnknownBackend`."""
    return _engines.load(name)


def slow_imports(table: Mapping[str, str], name: str | None) -> tuple[str, ...]:
    """The modules that a backend takes seconds to import, see `Worker.slow_imports`."""
    module = table.get(name or "", "").partition(":")[0]
    return (*SLOW_IMPORTS[module], module) if module in SLOW_IMPORTS else ()
