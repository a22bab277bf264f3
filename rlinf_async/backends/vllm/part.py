"""vLLM as an engine of a run: what it refuses, and what it takes of its devices. No vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.backends.language import check_family
from rlinf_async.backends.parts import EngineDevices, EnginePart, EngineRun
from rlinf_async.backends.vllm.config import GPU_MEMORY, LORA_RANKS, VllmEngineConfig
from rlinf_async.config.registry import ConfigError
from rlinf_async.config.registry import Path as Setting
from rlinf_async.parallel.splits import nearest_divisors

COARSER = frozenset({"kv_cache_dtype", "quantization"})
"""arguments in ``extra`` by which it computes in less than its ``dtype``"""


class Vllm(EnginePart):
    """The part that generates with vLLM. Its imports start threads, so that none of them is shared
    by forked workers."""

    Config = VllmEngineConfig
    library = "vllm"
    extra = "vllm"
    factory = "rlinf_async.backends.vllm.engine:VllmEngine"
    sees_images = True
    honours = frozenset({"min_p", "logit_bias", "repetition_penalty", "grammar"})

    def placed(
        self, settings: VllmEngineConfig, devices: EngineDevices, where: Setting
    ) -> VllmEngineConfig:
        """Give it the devices and the memory of its workers."""
        if not devices.accelerated:
            if devices.others and not _computes_on_cpus():
                raise ConfigError(
                    "rollout workers are to have no GPU, but the installed vLLM computes on GPUs "
                    "alone and would take those of other roles: give them devices, or use another "
                    "engine by rollout.backend",
                    path=("cluster", "placement", "rollout"),
                )
            return settings
        if settings.tensor_parallel not in (None, devices.number):
            raise ConfigError(
                f"tensor_parallel is {settings.tensor_parallel}, but each rollout worker has "
                f"{devices.number} devices: leave it out, or set devices_per_worker in "
                "cluster.placement.rollout",
                path=(*where, "tensor_parallel"),
            )
        memory, sleep = settings.gpu_memory, settings.sleep
        return msgspec.structs.replace(
            settings,
            tensor_parallel=devices.number,
            gpu_memory=GPU_MEMORY * devices.share if memory is None else memory,
            sleep=devices.lent if sleep is None else sleep,
        )

    def with_adapter(self, settings: VllmEngineConfig, rank: int) -> Any:
        """Return the settings with the weights of the folder, and room for an adapter."""
        if settings.sleep:
            raise ConfigError(
                "vLLM drops the weights under the adapter when others use its device in turns "
                "(sleep), and no update brings them again: set it to 'merged', or give each role "
                "its own devices",
                path=("actor", "lora", "publish"),
            )
        room = next((one for one in LORA_RANKS if one >= rank), None)
        if room is None:
            raise ConfigError(
                f"vLLM serves adapters of rank {LORA_RANKS[-1]} at most: lower it, or set "
                "actor.lora.publish to 'merged'",
                path=("actor", "lora", "rank"),
            )
        given = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        return msgspec.structs.replace(settings, weights="adapter", extra=given | settings.extra)

    def with_formats(self, settings: VllmEngineConfig) -> VllmEngineConfig:
        """Return the settings with which responses may have a format."""
        return msgspec.structs.replace(settings, formats=True)

    def keeps_memory(self, settings: VllmEngineConfig) -> str:
        """Return the sleep mode's setting, where it is off."""
        return "sleep" if settings.sleep is False else ""

    def precision(self, settings: VllmEngineConfig) -> str:
        """Return ``dtype``, or that something is computed in less."""
        return settings.dtype if COARSER.isdisjoint(settings.extra) else "quantized"

    def check(self, run: EngineRun) -> None:
        """Refuse sampling of which it cannot tell what it kept, models that it computes otherwise
        than the trainer, and attention heads that its devices do not divide."""
        settings: VllmEngineConfig = run.settings
        if why := settings.untold(run.sampling):
            name = settings.unbounded(run.sampling)
            raise ConfigError(why, path=("rollout", "sampling", name))
        if not run.model:
            return
        check_family(run.model, "vllm")
        heads = (run.model.get("text_config") or run.model).get("num_attention_heads")
        parallel = settings.tensor_parallel or 1
        if isinstance(heads, int) and heads % parallel:
            raise ConfigError(
                f"the model has {heads} attention heads, which {parallel} devices of each rollout "
                f"worker do not divide: use {nearest_divisors(parallel, heads)} "
                "(devices_per_worker in cluster.placement.rollout)",
                path=(*run.where, "tensor_parallel"),
            )

    def inspect(self, settings: VllmEngineConfig, folder: Path, device: str) -> None:
        """Refuse arguments that it does not know, and models without an attention on CPUs."""
        from rlinf_async.backends.transformers.folder import open_folder
        from rlinf_async.backends.vllm.library import check_llm

        opened = open_folder(settings.model or str(folder), context=settings.context)
        check_llm(settings, opened, device)


def _computes_on_cpus() -> bool:
    """Whether the installed vLLM is built for CPUs; True also where none is installed."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the build for CPUs may have a name of its own
