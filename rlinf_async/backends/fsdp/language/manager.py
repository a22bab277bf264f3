"""`LanguageModelManager`: the sharded manager of a policy or critic over a language model."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from rlinf_async.backends.building import building
from rlinf_async.backends.fsdp.errors import OffloadedError
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.describing import describing_files
from rlinf_async.backends.fsdp.language.model import build_language_model
from rlinf_async.backends.fsdp.language.network import (
    PolicyNetwork,
    ValueNetwork,
    check_same_as_transformers,
)
from rlinf_async.backends.fsdp.manager import ShardedModelManager
from rlinf_async.backends.fsdp.writer import ModelFiles


class LanguageModelManager(ShardedModelManager):
    """Builds, shards, optimises, offloads, saves and loads one language model on one rank."""

    cfg: LanguageFSDPConfig

    def __init__(
        self, config: LanguageTrainerConfig, world_size: int, rank: int, *, critic: bool = False
    ) -> None:
        super().__init__(config.fsdp, world_size, rank)
        self._config = config
        self._critic = critic
        self._model_files: ModelFiles = {}

    def model_provider_func(self) -> nn.Module:
        """Return the network, on the CPU; random weights come from the trainer's seed.

        Raises `ValueError` for a folder that cannot be used and an architecture that this backend
        would train wrongly.
        """
        with building(self._config.seed):
            language, packs = build_language_model(self.cfg.model)
        self._model_files = describing_files(self.cfg.model, language)
        policy = PolicyNetwork(
            language, packs=packs, logit_chunk_bytes=self._config.logit_chunk_bytes
        )
        check_same_as_transformers(policy)
        network = ValueNetwork(language, packs=packs) if self._critic else policy
        # Sharding may give parameters other names and other objects: what is tied is seen here.
        own = {name for name, _ in network.named_parameters()}
        own |= {name for name, _ in network.named_buffers()}
        self.tied_names = set(network.state_dict()) - own
        return network

    def model_files(self) -> ModelFiles:
        """Return configuration and tokenizer, with which a checkpoint can be exported alone."""
        return self._model_files

    @property
    def language(self) -> nn.Module:
        """The model of transformers inside."""
        network = self.model
        if isinstance(network, FullyShardedDataParallel):
            network = network.module
        inner: nn.Module = network.language  # type: ignore[assignment]
        return inner

    def check_loaded(self, doing: str) -> None:
        """Raise `OffloadedError` while the weights are offloaded, `IdleRank` where none are."""
        self.check_active(doing)
        if self.param_offloaded:
            raise OffloadedError(f"{doing} while the model is offloaded: call onload() first")

    def reshard(self) -> None:
        """Leave no parameter whole after a forward pass without a backward one.

        FSDP keeps the outermost module's whole for the backward pass; weights that change before
        the next forward pass would then not be seen by it.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
            elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                module._handle.reshard(free_unsharded_flat_param=True)
