"""`MegatronModelManager`: one rank's part of a language model, and the steps that change it.

::

    Hugging Face weights --held--> this rank's slices --stage--> gradients --optimizer--> slices
                                                                   ^
                          data ranks: summed       tensor ranks: parts       stages: own layers
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.base import IdleRank, OptimizerConfig, lr_factor
from rlinf_async.backends.building import building
from rlinf_async.backends.language import WEIGHTS
from rlinf_async.backends.language_training.model import build_language_model, describing_files
from rlinf_async.backends.megatron.config import (
    MegatronConfig,
    architecture_of,
    check_offered,
    layout_of,
    strategy_of,
)
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.feed import Feed, GroupMessages, Readers
from rlinf_async.backends.megatron.forward import (
    LogitsProcessor,
    PaddedBatch,
    custom_forward,
    read_statistics,
    read_values,
)
from rlinf_async.backends.megatron.grid import Grid, GridGroups, GridPlace, make_grid
from rlinf_async.backends.megatron.memory import Offloading, StageMemory
from rlinf_async.backends.megatron.model import (
    Options,
    buffers_in,
    build_chunk,
    build_stage,
)
from rlinf_async.backends.megatron.schedule import Schedule, Work, make_data_iterator_list
from rlinf_async.backends.megatron.weights import (
    HeldParameter,
    first_weights,
    held_weights,
    load_weights,
    on_first_rank,
)
from rlinf_async.parallel import DataRank, GlobalTensor


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which gradients and optimizer state are spread over data ranks."""

    distributed: bool = True
    """each data rank has a part of the optimizer state (ZeRO 1), instead of a copy of it"""
    overlap: bool = False
    """reduce gradients while the backward pass goes on, gather parameters while the forward pass
    does"""

    def bucket_elements(self, dp: int) -> int | None:
        """Return the elements from which a bucket of gradients is full; None: there is one."""
        return max(40_000_000, 1_000_000 * dp) if self.overlap else None

    def places(self, dp: int) -> tuple[int | None, int]:
        """Return what the places of parameters in Megatron's buffers depend on, besides them: the
        size of buckets, and what each is padded to a multiple of."""
        return self.bucket_elements(dp), math.lcm(dp, 128) if self.distributed else 1


def with_gradients(
    chunks: Sequence[nn.Module],
    grid: Grid,
    sharding: Sharding,
    reused: Iterable[Tensor] = (),
) -> list[Any]:
    """Wrap each chunk of a stage in Megatron's data parallelism, which holds its gradients in
    float32.

    Args:
        chunks: chunks of a stage.
        grid: process groups of the ranks.
        sharding: whether parameters have buffers, too.
        reused: buffers to hold them in.
    """
    distributed = of_megatron("distributed")
    config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=sharding.overlap,
        overlap_param_gather=sharding.overlap and sharding.distributed,
        use_distributed_optimizer=sharding.distributed,
        average_in_collective=False,
        bucket_size=sharding.bucket_elements(grid.strategy.dp),
    )
    with buffers_in(reused):
        wrapped = [
            distributed.DistributedDataParallel(
                chunk.config, config, chunk, pg_collection=grid.groups, disable_bucketing=number > 0
            )
            for number, chunk in enumerate(chunks)
        ]
    finalize = partial(_finalize, distributed.finalize_model_grads)
    for chunk in chunks:
        of_chunk: Any = chunk.config
        of_chunk.finalize_model_grads_func = finalize
        if sharding.overlap:  # reduced in the backward pass of the last micro-batch
            no_sync = [one.no_sync for one in wrapped]
            of_chunk.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _finalize(finalize: Any, model: Any, tokens: Any, **groups: Any) -> None:
    """Reduce the gradients, without dividing them by a number of tokens."""
    finalize(model, None, **groups)


def make_optimizer(
    wrapped: Sequence[Any], grid: Grid, config: OptimizerConfig, sharding: Sharding
) -> Any:
    """Return Megatron's optimizer (AdamW) for wrapped chunks."""
    optimizer = of_megatron("optimizer")
    params: Any = next(wrapped[0].parameters())
    settings = optimizer.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.max_grad_norm or 0.0,
        bf16=params.dtype == torch.bfloat16,
        params_dtype=params.dtype,
        use_distributed_optimizer=sharding.distributed,
        overlap_param_gather=sharding.overlap and sharding.distributed,
    )
    with _not_compared():
        return optimizer.get_megatron_optimizer(
            settings, list(wrapped), use_gloo_process_groups=False, pg_collection=grid.groups
        )


@contextmanager
def _not_compared() -> Iterator[None]:
    """Make an optimizer that is not compared with those of all other processes.

    Megatron gathers their kinds of parameters, for checkpoints of its own, which are not used here:
    idle ranks would have to take part, and a rank that is lost would block the others.
    """
    collectives: Any = dist
    gather = collectives.all_gather_object

    def own_alone(every: list[Any], own: Any, *_: Any) -> None:
        every[:] = [own] * len(every)

    collectives.all_gather_object = own_alone
    try:
        yield
    finally:
        collectives.all_gather_object = gather


log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RankModel(NamedTuple):
    """All that an active rank trains with."""

    chunks: list[nn.Module]
    held: list[HeldParameter]
    models: list[Any]
    """the chunks in Megatron's data parallelism"""
    optimizer: Any
    memory: StageMemory
    training: Schedule
    inference: Schedule


class MegatronModelManager(Offloading):
    """Builds, optimises and gathers one model on one rank. torch.distributed is up.

    Args:
        cfg: how the model is cut and optimised.
        world_size: number of launched ranks, all of which train at first.
        rank: number of this rank.
        seed: seed of random weights.
        values: a critic, with a value head in place of the output layer.

    Raises:
        StrategyError: the ranks do not make up the strategy, or it does not divide the model.
        ModelMismatch: an architecture that Megatron's layers would compute wrongly.
        MegatronUnavailable: megatron-core is not installed, or in another version.
    """

    def __init__(
        self, cfg: MegatronConfig, world_size: int, rank: int, seed: int, *, values: bool = False
    ) -> None:
        self.cfg = cfg
        self.rank, self.launched = rank, world_size
        self.strategy = strategy_of(cfg, world_size)
        super().__init__(torch.device(cfg.device))
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "device is 'cpu', but megatron-core computes on any GPU that its process sees: set "
                "CUDA_VISIBLE_DEVICES='' for this process, or device to 'cuda'"
            )
        if not dist.is_initialized():
            collectives: Any = dist
            backend = "gloo" if self.device.type == "cpu" else "nccl"
            collectives.init_process_group(
                backend, store=collectives.HashStore(), rank=0, world_size=1
            )
        self.steps = 0
        """optimizer steps taken"""
        self.skipped_steps = 0
        """optimizer steps skipped because the gradient norm was not finite"""
        self.kept: dict[str, dict[str, Tensor]] = {}
        """other weights (the reference policy's), by tag: this rank's part, on the CPU"""
        with building(seed):
            whole, _ = build_language_model(cfg.model)
        self.model_files = describing_files(cfg.model, whole)
        config: Any = whole.config
        self.architecture = msgspec.structs.replace(
            architecture_of(config.to_dict()), values=values
        )
        check_offered(self.architecture, self.strategy, cp=cfg.cp, ep=cfg.ep)
        layout_of(self.architecture, self.strategy)  # refuses what does not divide, first of all
        self.groups = GridGroups()
        self.options = Options(
            dtype=DTYPES[cfg.precision],
            sequence_parallel=cfg.sequence_parallel,
            recompute=cfg.model.activation_checkpointing,
        )
        self._language_class, self._language_config = type(whole), config
        self.sharding = Sharding(distributed=cfg.distributed_optimizer, overlap=cfg.overlap)
        self.pending = False
        """gradients were added up since the last step"""
        self.setup_model_and_optimizer(first_weights(whole))

    def setup_model_and_optimizer(self, tensor: Callable[[str], Tensor]) -> None:
        """Build this rank's stage, fill it, and make its optimizer. Collective.

        ``tensor`` returns a whole tensor of the checkpoint by its name.
        """
        grid = make_grid(self.strategy, self.groups)
        self.take(grid, self.build(grid, partial(load_weights, tensor=tensor)))

    def build(
        self, grid: Grid, fill: Callable[[list[HeldParameter]], None], reused: Iterable[Tensor] = ()
    ) -> RankModel:
        """Build this rank's part of the model for a strategy; ``fill`` gives it its weights.

        ``reused``: buffers of parameters and gradients that go on being used. Nothing is changed,
        and no other rank is waited for.
        """
        chunks = [
            chunk.to(self.device) for chunk in build_stage(self.architecture, grid, self.options)
        ]
        held = held_weights(chunks, self.architecture, grid)
        fill(held)
        models = with_gradients(chunks, grid, self.sharding, reused)
        optimizer = make_optimizer(models, grid, self.cfg.optimizer, self.sharding)
        vocabulary = self.architecture.decoder.vocabulary
        read = read_values if self.architecture.values else read_statistics(vocabulary, grid)
        return RankModel(
            chunks,
            held,
            models,
            optimizer,
            StageMemory(models, optimizer),
            training=Schedule(models, chunks, grid, read),
            inference=Schedule(chunks, chunks, grid, read),
        )

    def take(self, grid: Grid, part: RankModel | None) -> None:
        """Train with this part of the model, under this strategy; None: this rank is idle."""
        self.grid, self.strategy = grid, grid.strategy
        self.readers = Readers(GroupMessages(grid.readers))
        self.feed = Feed(GroupMessages(grid.feed), self.readers)
        self.part = part

    @property
    def world_size(self) -> int:
        """Number of active ranks: 0 .. world_size - 1."""
        return self.strategy.world_size

    @property
    def active(self) -> bool:
        """Whether this rank holds a part of the model, and trains."""
        return self.part is not None

    def active_part(self) -> RankModel:
        """Return this rank's part of the model; raises `IdleRank`."""
        if self.part is None:
            raise IdleRank(
                f"rank {self.rank} is idle: {self.world_size} of {self.launched} ranks are active "
                f"({self.strategy.sizes})"
            )
        return self.part

    @property
    def place(self) -> GridPlace:
        """Place of this rank in the grid; raises `IdleRank`."""
        self.active_part()
        place = self.grid.place
        assert place is not None
        return place

    @property
    def held(self) -> list[HeldParameter]:
        """The parameters of this rank; none on an idle one."""
        return self.part.held if self.part is not None else []

    @property
    def chunks(self) -> list[nn.Module]:
        """The model chunks of this rank's stage; raises `IdleRank`."""
        return self.active_part().chunks

    @property
    def models(self) -> list[Any]:
        """The chunks in Megatron's data parallelism; raises `IdleRank`."""
        return self.active_part().models

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer; raises `IdleRank`."""
        return self.active_part().optimizer

    @property
    def memory(self) -> StageMemory:
        """The memory of this rank's stage; raises `IdleRank`."""
        return self.active_part().memory

    @property
    def training(self) -> Schedule:
        """Computes with gradients; raises `IdleRank`."""
        return self.active_part().training

    @property
    def inference(self) -> Schedule:
        """Computes without gradients; raises `IdleRank`."""
        return self.active_part().inference

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The active ranks."""
        found: dist.ProcessGroup | None = self.grid.groups.intra_dist_opt
        return found

    def wait_for_all(self) -> None:
        """Wait for the other active ranks. Collective among those; an idle one does not wait."""
        if self.active and self.world_size > 1:
            dist.barrier(group=self.group)

    @property
    def tensors(self) -> tuple[GlobalTensor, ...]:
        """The tensors of a checkpoint of this model."""
        return layout_of(self.architecture, self.strategy).tensors

    @property
    def data_rank(self) -> DataRank:
        """Share of the samples that this rank trains on; an idle one reads none."""
        place = self.grid.place
        if place is None:
            return DataRank(0, self.strategy.dp, is_io=False)
        return DataRank(place.dp, self.strategy.dp, self.grid.is_io)

    # ---- what Megatron's schedules are given

    def model_provider_func(self, pre_process: bool, post_process: bool) -> nn.Module:
        """Build the first model chunk of a stage, with weights that are to be replaced.

        Args:
            pre_process: whether the chunk has the embedding.
            post_process: whether the chunk has the output layer, or the value head of a critic.

        Raises `IdleRank`.
        """
        self.active_part()
        return build_chunk(
            self.architecture,
            self.grid,
            self.options,
            number=0,
            pre_process=pre_process,
            post_process=post_process,
        ).to(self.device)

    def make_data_iterator_list(
        self, data_iterator: Iterator[Work], padding: bool = False, vpp_size: int = 1
    ) -> list[Iterator[Work]]:
        """Return an iterator for each model chunk of a stage; see `schedule`.

        ``padding``: rows of tokens become as long as tensor ranks can divide.
        """
        return make_data_iterator_list(data_iterator, padding, vpp_size, self.strategy.tp)

    def custom_forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        sequence_parallel: bool,
        value_model: bool = False,
        pack_seqs: bool = True,
        logits_processor: LogitsProcessor | None = None,
        logits_processor_args: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        max_batch_seqlen: int = 4096,
    ) -> Tensor | dict[str, Tensor]:
        """Compute a padded batch with one model chunk; see `custom_forward.custom_forward`.

        Raises `IdleRank`, and `OffloadedError` while the weights are offloaded.
        """
        self.active_part()
        self.check_onloaded("custom_forward()", {WEIGHTS})
        batch = PaddedBatch(input_ids, attention_mask.bool(), position_ids)
        return custom_forward(
            model,
            self.grid,
            batch,
            sequence_parallel=sequence_parallel,
            value_model=value_model,
            pack_seqs=pack_seqs,
            logits_processor=logits_processor,
            logits_processor_args=logits_processor_args or {},
            temperature=temperature,
            max_batch_seqlen=max_batch_seqlen,
        )

    # ---- one optimizer step

    def zero_grad(self) -> None:
        """Zero all gradients."""
        self.pending = False
        for one in self.models:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self, gradient_factor: float) -> tuple[float, float]:
        """Scale, clip and step; return the gradient norm before clipping and the learning rate.
        Collective.

        A norm that is not finite skips the step. Raises `IdleRank`, and `OffloadedError` while
        offloaded.
        """
        self.active_part()
        self.check_onloaded("optimizer_step()")
        for one in self.models:
            one.scale_gradients(gradient_factor)
        lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            self.optimizer.step()
            self.steps += 1
        else:
            self.skipped_steps += 1
            log.warning(
                "gradient norm is %s after %d steps: this optimizer step is skipped (%d so far)",
                norm, self.steps, self.skipped_steps,
            )  # fmt: skip
        self.zero_grad()
        return norm, lr

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.cfg.optimizer.lr * lr_factor(self.steps, self.cfg.scheduler)

    # ---- among ranks

    def sum_over_data(self, row: Tensor) -> None:
        """Add up over the ranks that train on other samples with the same part of the model; raises
        `IdleRank`."""
        self.active_part()
        if self.strategy.dp > 1:
            dist.all_reduce(row, group=self.grid.data)

    def from_last_stage(self, value: Any, kind: Any) -> Any:
        """Return the value, of this type, of the last stage's rank. Collective among the ranks of
        one model."""
        strategy, place = self.strategy, self.place
        source = strategy.tp * (place.dp + strategy.dp * (strategy.pp - 1))
        return self.feed.broadcast(value, kind, source)

    def gather_parameters(self) -> None:
        """Have the last step's parameters of all data ranks, where they are gathered as the next
        forward pass needs them; those that are offloaded were gathered before. Collective among
        the data ranks."""
        if self.cfg.overlap and self.cfg.distributed_optimizer and not self.weights_offloaded:
            for one in self.models:
                one.start_param_sync(force_sync=True)

    def live_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights in the model, by name: the memory itself.
        Collective among the data ranks."""
        self.gather_parameters()
        return {one.name: one.parameter.detach() for one in self.held}

    def settle_checkpoint(self) -> None:
        """Return at once: a checkpoint is copied before it is written."""

    def whole_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint on rank 0, ``{}`` elsewhere, also
        while offloaded. Collective; one slice travels at a time."""
        if not self.active:
            return {}
        with self.awake({WEIGHTS}):
            self.gather_parameters()
            layout = layout_of(self.architecture, self.strategy)
            return on_first_rank(self.held, layout, self.strategy, dtype)

    def language_model(self) -> nn.Module:
        """Return the model of transformers, without memory, to be written with weights."""
        make: Any = self._language_class
        with torch.device("meta"):
            model: nn.Module = make(self._language_config)
        return model
