"""What of a configuration can be held against this host and against what is registered here."""

from __future__ import annotations

import re
from typing import Protocol

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.config import ConfigError, MissingDevice
from rlinf_async.observe.errors import MetricsError
from rlinf_async.observe.metrics import find_sink
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.placement import host_devices

FSDP = ("actor", "fsdp")


class _Table(Protocol):
    """A registry, as far as it is asked here."""

    kind: str

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> list[str]: ...


def check_device(config: EmbodiedConfig) -> None:
    """Raise where the actors' device cannot be, or is not on this host.

    Raises:
        ConfigError: it is not a device's name.
        MissingDevice: there is none of it.
    """
    wanted, actors = config.actor.fsdp.device, config.cluster.actors
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ConfigError(
            f"{wanted!r} is no device: write 'cpu', 'cuda' or 'cuda:1'", path=(*FSDP, "device")
        )
    if wanted == "cpu":
        return
    if ":" in wanted and actors > 1:
        raise ConfigError(
            f"{actors} actors cannot share {wanted!r}: write 'cuda', and each takes one of its own",
            path=(*FSDP, "device"),
        )
    there = [device for device in host_devices() if device.kind == "cuda"]
    if not there:
        raise MissingDevice(
            f"actor.fsdp.device: {wanted!r} is asked for, but this host has no accelerator: "
            "use 'cpu'"
        )
    if ":" in wanted and wanted not in map(str, there):
        raise MissingDevice(
            f"actor.fsdp.device: {wanted!r} is asked for, but this host has "
            f"{', '.join(map(str, there))}"
        )
    if actors > len(there):
        raise MissingDevice(
            f"cluster.actors: {actors} actors need an accelerator each, but this host has "
            f"{', '.join(map(str, there))}"
        )


def check_sinks(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` for a metrics sink that is not installed."""
    for name in config.training.metrics:
        try:
            find_sink(name)
        except MetricsError as error:
            raise ConfigError(str(error), path=("training", "metrics")) from error


def check_names(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` for a policy, an advantage or a loss that nobody has registered.

    The tables import torch, so they are asked only for names that are not built in.
    """
    actor = config.actor
    if actor.fsdp.pretrained is not None:
        raise ConfigError(
            "the embodied_ppo job trains a registered policy, not a language model: leave it out",
            path=(*FSDP, "pretrained"),
        )
    known = EmbodiedTrainerConfig()
    policy, advantage, loss = actor.fsdp.policy.name, actor.advantage.name, actor.ppo.loss.name
    if policy not in ("mlp_gaussian", "mlp_categorical"):
        from rlinf_async.backends.policies.base import policies

        _refuse_unknown(policies, policy, (*FSDP, "policy", "name"))
    if advantage != known.advantage.name:
        from rlinf_async.algorithms.advantages import advantage_functions

        _refuse_unknown(advantage_functions, advantage, ("actor", "advantage", "name"))
    if loss != known.ppo.loss.name:
        from rlinf_async.algorithms.losses import loss_functions

        _refuse_unknown(loss_functions, loss, ("actor", "ppo", "loss", "name"))


def _refuse_unknown(table: _Table, name: str, path: tuple[str, ...]) -> None:
    from rlinf_async.algorithms.registry import UnknownName

    if name not in table:
        raise ConfigError(str(UnknownName(table.kind, name, table.names())), path=path)
