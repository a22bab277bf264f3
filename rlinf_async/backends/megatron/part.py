"""Megatron as a trainer of language models in a run: what it refuses. No torch, no Megatron."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from rlinf_async.backends.megatron.config import (
    MegatronConfig,
    MegatronOptions,
    MegatronTrainerConfig,
    architecture_of,
    check_offered,
    layout_of,
)
from rlinf_async.backends.parts import (
    DEFAULT_LANGUAGE_TRAINER,
    LANGUAGE_IMPORTS,
    LanguageTrainerPart,
    Learner,
    TrainerRun,
)
from rlinf_async.config.registry import ConfigError
from rlinf_async.config.registry import Path as Setting
from rlinf_async.parallel import ModelMismatch, Strategy, StrategyError

MODULE = "rlinf_async.backends.megatron.trainer"
OPTIONS = ("actor", "megatron")
"""section of its settings"""


class Megatron(LanguageTrainerPart):
    """Tensor and pipeline parallel ranks."""

    Config = MegatronOptions
    library = "transformers"
    extra = "llm"
    factory = f"{MODULE}:MegatronTrainer"
    slow_imports = (*LANGUAGE_IMPORTS, "megatron.core", MODULE)
    cuts = True
    sees_every_gpu = True
    actor = "rlinf_async.workers.actor:MegatronActor"
    critic = "rlinf_async.workers.critic:MegatronCritic"
    critic_trainer = "megatron_critic"
    inference = DEFAULT_LANGUAGE_TRAINER
    tells_distributions = True
    honours = frozenset({"logit_bias"})

    def config(self, learner: Learner) -> MegatronTrainerConfig:
        """Return the trainer's configuration."""
        return MegatronTrainerConfig(
            megatron=MegatronConfig(
                model=learner.model,
                device=learner.device,
                precision=learner.precision,
                optimizer=learner.optimizer,
                scheduler=learner.scheduler,
                tp=learner.tp,
                pp=learner.pp,
                **msgspec.structs.asdict(learner.options),
            ),
            **learner.training(),
        )

    def strategy(self, tp: int, pp: int, options: MegatronOptions) -> Strategy:
        """Return tensor ranks, stages and their chunks."""
        return Strategy(tp=tp, pp=pp, virtual_stages=options.virtual_stages)

    def critic_options(self, options: MegatronOptions, *, same_stages: bool) -> MegatronOptions:
        """Return the actor's, interleaved where both have as many stages."""
        return options if same_stages else msgspec.structs.replace(options, virtual_stages=1)

    def check(self, run: TrainerRun) -> None:
        """Refuse what it cannot train, or not cut so, and where it is not installed."""
        from rlinf_async.backends.megatron.cpu import MegatronUnavailable, check_installed

        if not run.model:
            return
        parts, options = run.parts, run.options
        try:
            check_installed()
            architecture = architecture_of(_complete(dict(run.model)))
        except MegatronUnavailable as error:
            raise ConfigError(str(error), path=(run.role, "backend")) from error
        except ModelMismatch as error:
            raise ConfigError(str(error), path=run.model_at) from error
        try:
            check_offered(architecture, parts, cp=options.cp, ep=options.ep)
            layout_of(architecture, parts)
        except StrategyError as error:
            if options.cp > 1 or options.ep > 1:
                path: Setting = (*OPTIONS, "cp" if options.cp > 1 else "ep")
            else:
                path = _at_fault(run.role, parts, partial(layout_of, architecture))
            raise ConfigError(str(error).replace("\n", "; "), path=path) from error

    def check_options(self, options: MegatronOptions, *, pp: int, instead: str) -> None:
        """Refuse chunks of a single stage, and any setting that is given for another trainer."""
        if options.virtual_stages > 1 and pp == 1:
            raise ConfigError(
                f"virtual_stages is {options.virtual_stages}, but pp is 1: one stage has nothing "
                "to interleave; leave it out, or set actor.pp",
                path=(*OPTIONS, "virtual_stages"),
            )
        for field in msgspec.structs.fields(MegatronOptions):
            given = getattr(options, field.name)
            if instead and given != field.default:
                raise ConfigError(
                    f"{given} is for the backend 'megatron', and actor.backend is {instead!r}: set "
                    "that to 'megatron', or leave it out",
                    path=(*OPTIONS, field.name),
                )

    def check_scheduled(self, learner_strategy: str, options: MegatronOptions, wanted: str) -> None:
        """Refuse interleaved stages."""
        if options.virtual_stages > 1:
            raise ConfigError(
                "actors with interleaved stages cannot change while they train: "
                f"{wanted}set virtual_stages to 1",
                path=(*OPTIONS, "virtual_stages"),
            )


class MegatronCriticPart(Megatron):
    """The Megatron trainer of a critic: a language model with a value head."""

    factory = f"{MODULE}:MegatronCriticTrainer"
    actor = ""


def _at_fault(role: str, parts: Strategy, check: Callable[[Strategy], object]) -> Setting:
    """Return the setting without which a strategy would pass the check."""
    replace = msgspec.structs.replace
    without = {
        (*OPTIONS, "virtual_stages"): replace(parts, virtual_stages=1),
        (role, "pp"): replace(parts, pp=1, virtual_stages=1),
    }
    for path, others in without.items():
        with contextlib.suppress(StrategyError):
            if others != parts:
                check(others)
                return path
    return (role, "tp")


def _complete(described: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the architecture's defaults, as transformers has them."""
    from transformers import AutoConfig

    fields = {name: value for name, value in described.items() if name != "model_type"}
    try:
        complete: dict[str, Any] = AutoConfig.for_model(described["model_type"], **fields).to_dict()
    except (KeyError, ValueError, TypeError):
        return described  # whoever builds the model reports it
    return complete
