"""FSDP as a trainer of embodied policies. No torch."""

from __future__ import annotations

from rlinf_async.backends.parts import OffPolicyTrainerPart, TrainerPart

IMPORTS = ("torch._dynamo", "torch.distributed.fsdp")


class Embodied(TrainerPart):
    """PPO and its relatives."""

    factory = "rlinf_async.backends.fsdp.embodied:EmbodiedTrainer"
    slow_imports = (*IMPORTS, "rlinf_async.backends.fsdp.embodied")


class SoftActorCritic(OffPolicyTrainerPart):
    """Soft actor-critic."""

    factory = "rlinf_async.backends.fsdp.sac:SacTrainer"
    slow_imports = (*IMPORTS, "rlinf_async.backends.fsdp.sac")


class FromData(OffPolicyTrainerPart):
    """Learning from data alone."""

    factory = "rlinf_async.backends.fsdp.offline:OfflineTrainer"
    slow_imports = (*IMPORTS, "rlinf_async.backends.fsdp.offline")
