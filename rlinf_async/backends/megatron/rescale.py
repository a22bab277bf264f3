"""Any tensor, pipeline and data parallelism to any other: what Megatron does in the transaction
of `backends.rescale`.

::

    connect   groups of the new strategy, of ranks that have none yet    (`groups`)
    build     the new part of the model, beside the old one; what is the same on this rank is shared
    move      weights, float32 weights, moments, reference weights --> their places in the new part
    verify    moments and step counters are the optimizer's
    commit    the new part is the manager's; the old one is taken to pieces

Where data ranks gather parameters only as the next forward pass needs them (``overlap``), weights
come from the optimizer's own, which are never behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.megatron.config import Architecture, layout_of
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.grid import Grid, Key, make_grid
from rlinf_async.backends.megatron.manager import MegatronModelManager, RankModel
from rlinf_async.backends.megatron.model import buffers_of
from rlinf_async.backends.megatron.shards import (
    MAIN,
    check_ranges,
    holds,
    same_slices,
    set_moments,
    state_layout,
    state_of,
    stepped_weights,
    take_apart,
    unchanged,
)
from rlinf_async.backends.megatron.weights import MOMENTS, HeldParameter, zero_padding
from rlinf_async.backends.rescale.rescale import Change, TransferGroup, rescale_together, trim_heap
from rlinf_async.backends.rescale.transaction import RescaleError
from rlinf_async.backends.reshard import BufferState, ExchangeReport, allocate, reshard
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES
from rlinf_async.parallel import Layout, Plan, Replicated, Strategy, StrategyError, plan
from rlinf_async.parallel.splits import nearest

CPU = torch.device("cpu")
STATE = torch.float32
"""dtype of moments and of the weights that the optimizer steps"""


def check_strategy(strategy: Strategy, architecture: Architecture, launched: int) -> None:
    """Raise `StrategyError`, with the nearest sizes that fit, unless ``launched`` ranks could train
    the model under a strategy. Nothing is started."""
    faults = [
        f"{field}={size}: only tp, pp and dp can change while Megatron trains, so {field} must be 1"
        for field in ("cp", "ep", "virtual_stages")
        if (size := getattr(strategy, field)) != 1
    ]
    if strategy.sharding != Replicated():
        faults.append(
            f"sharding={strategy.sharding}: Megatron's data ranks have whole parameters; "
            "`distributed_optimizer` says how they share the optimizer's state"
        )
    if strategy.stage_layers is not None:
        faults.append("stage_layers: Megatron's stages have the same number of layers each")
    if not faults:
        try:
            layout_of(architecture, strategy)
        except StrategyError as error:
            faults += error.faults
    if strategy.world_size > launched:
        part = strategy.tp * strategy.pp
        fitting = nearest(strategy.dp, range(1, launched // part + 1))
        more = f"; nearest dp: {fitting}" if fitting else ""
        faults.append(f"{strategy.sizes}: only {launched} ranks were launched{more}")
    if faults:
        raise StrategyError(faults)


def rescale(
    manager: MegatronModelManager,
    strategy: Strategy,
    *,
    timeout: float = 120.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    extra: bytes = b"",
    objection: str = "",
    settle: Callable[[], None] = lambda: None,
) -> RescaleReport:
    """Train under another strategy from now on, on the first ``strategy.world_size`` ranks.

    Weights, moments, step counters and with them the learning rate, and kept weights go on as they
    are; random numbers stay each rank's own. Called by all launched ranks, between two optimizer
    steps. Ranks that the strategy does not use hold no memory of the model. ``settle`` waits for
    what still reads the old tensors.

    Raises `StrategyError` for what `check_strategy` refuses, and what `Rescale.run` does.
    """
    return rescale_together(
        lambda: check_strategy(strategy, manager.architecture, manager.launched),
        lambda: MegatronChange(manager, strategy, settle),
        manager.strategy,
        strategy,
        manager.launched,
        timeout=timeout,
        bucket_bytes=bucket_bytes,
        extra=extra,
        objection=objection,
    )


class MegatronProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of an active rank besides its tensors, equal on all of them; new ranks take that of
    rank 0."""

    steps: int
    skipped_steps: int
    stepped: bool
    """whether there are moments"""
    kept: list[str]
    """names of the kept weights"""


class MegatronProposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that one rank tells the others."""

    groups: list[Key]
    """groups that the rank has"""
    progress: MegatronProgress | None
    """state beside the tensors; None from an idle rank"""


class MegatronChange(Change):
    """A change to another strategy, on one rank."""

    def __init__(
        self, manager: MegatronModelManager, new: Strategy, settle: Callable[[], None]
    ) -> None:
        self._manager, self._settle = manager, settle
        self._old, self._new = manager.strategy, new
        self._told: list[MegatronProposal] = []
        self._grid: Grid | None = None
        self._random_states: dict[str, Tensor] | None = None
        """random states of Megatron's layers, before the new part was built"""
        self._part: RankModel | None = None
        self._moves: list[tuple[Plan, list[BufferState]]] = []
        self._moments: dict[str, dict[str, Tensor]] = {}
        self._kept: dict[str, dict[str, Tensor]] = {}

    @property
    def transfer(self) -> TransferGroup:
        """See `Change`."""
        return self._manager.groups.transfer

    @property
    def active(self) -> bool:
        """See `Change`."""
        return self._manager.active

    def propose(self) -> bytes:
        """Return what this rank has; raises `OffloadedError`."""
        manager = self._manager
        if self._old.virtual_stages > 1:
            raise StrategyError(
                [f"virtual_stages={self._old.virtual_stages}: interleaved stages cannot change"]
            )
        manager.check_onloaded("rescale()")
        progress = None
        if manager.part is not None:
            progress = MegatronProgress(
                manager.steps, manager.skipped_steps, _has_moments(manager), list(manager.kept)
            )
        return msgspec.msgpack.encode(MegatronProposal(manager.groups.known, progress))

    def connect(self, proposals: Sequence[bytes], limit: timedelta) -> None:
        """Make the groups of the new strategy that not all ranks have."""
        self._told = [msgspec.msgpack.decode(one, type=MegatronProposal) for one in proposals]
        known = set(self._told[0].groups).intersection(*(one.groups for one in self._told))
        self._grid = make_grid(self._new, self._manager.groups, known, limit)

    def drain(self) -> None:
        """Wait for a checkpoint that still copies; raises where gradients would be lost."""
        if self._manager.active and self._manager.pending:
            raise RescaleError(
                "rescale() between a backward pass and its optimizer step would lose gradients"
            )
        self._settle()

    def build(self) -> None:
        """Build the new part of the model, and plan how it is filled."""
        manager, grid = self._manager, self._grid
        assert grid is not None
        if holds(manager.rank, self._new):
            self._random_states = _tracker().get_states()
            reused = buffers_of(manager.models) if self._keeps_buffers else ()
            self._part = manager.build(grid, self._fill, reused)
            check_ranges(
                manager.architecture,
                self._part.held,
                self._part.optimizer,
                self._new,
                manager.sharding,
                manager.rank,
            )
        self._plan_weights()
        self._plan_state()

    def move(self, bucket_bytes: int, limit: timedelta) -> ExchangeReport:
        """Fill the new part."""
        return reshard(
            *self._moves,
            group=self.transfer.group,
            device=self._manager.device,
            bucket_bytes=bucket_bytes,
            timeout=limit,
        )

    def verify(self) -> None:
        """Give the optimizer its moments and step counters."""
        part, progress = self._part, self._progress
        if part is not None and progress.stepped:
            set_moments(part.held, part.optimizer, self._moments, progress.steps)

    def commit(self) -> None:
        """Make the new part the manager's, and free the old one."""
        manager, old, grid = self._manager, self._manager.part, self._grid
        assert grid is not None
        manager.take(grid, self._part)
        manager.kept = self._kept
        manager.steps = self._progress.steps
        manager.skipped_steps = self._progress.skipped_steps
        self._moves, self._moments, self._part = [], {}, None
        if old is not None:
            take_apart(old, manager.part)
        trim_heap()

    def roll_back(self) -> None:
        """Drop the new part, and give Megatron's layers their random states back."""
        part, self._part = self._part, None
        self._moves, self._moments, self._kept = [], {}, {}
        if self._random_states is not None and self._manager.active:
            _tracker().set_states(self._random_states)
        if part is not None:
            take_apart(part, self._manager.part)

    # ---- planning

    @property
    def _progress(self) -> MegatronProgress:
        progress = self._told[0].progress
        assert progress is not None  # rank 0 is always active
        return progress

    def _fill(self, held: list[HeldParameter]) -> None:
        """Share what this rank has already; leave the rest to the move, but for padding."""
        manager = self._manager
        shared = set[str]()
        if manager.active and (self._keeps_buffers or not manager.sharding.distributed):
            old, new = (layout_of(manager.architecture, one) for one in (self._old, self._new))
            shared = unchanged(old, new, manager.rank)
        own = {one.name: one.parameter for one in manager.held}
        for one in held:
            if one.name in shared:
                one.parameter.data = own[one.name].data
            elif manager.sharding.distributed:
                # Megatron copies it into its buffer: nothing is read from memory this way.
                zero = one.parameter.new_zeros(1).detach()
                one.parameter.data = zero.expand(one.parameter.shape)
            else:
                like = one.parameter
                like.data = torch.empty(like.shape, dtype=like.dtype, device=manager.device)
        if not manager.sharding.distributed:
            zero_padding([one for one in held if one.name not in shared])

    @property
    def _keeps_buffers(self) -> bool:
        """Whether only other ranks come or go: this one's parameters stay where they are, and so
        do its gradients, which are 0.

        Not where data ranks gather parameters as the next forward pass needs them: the old ones are
        behind then, and a change that fails must leave them so.
        """
        manager = self._manager
        sharding = manager.sharding
        if not manager.active or (sharding.distributed and sharding.overlap):
            return False
        old, new = (layout_of(manager.architecture, one) for one in (self._old, self._new))
        places = {sharding.places(one.dp) for one in (self._old, self._new)}
        return len(places) == 1 and same_slices(old, new, manager.rank)

    def _plan_weights(self) -> None:
        """Weights and kept weights: whole parameters of each rank's slice."""
        manager, part = self._manager, self._part
        old, new = (layout_of(manager.architecture, one) for one in (self._old, self._new))
        moved = plan(old, new)
        target = state_of(part.held, part.optimizer).weights if part is not None else {}
        dtype = manager.options.dtype
        if manager.sharding.distributed and manager.sharding.overlap:
            source = state_layout(manager.architecture, self._old, manager.sharding)
            stepped = stepped_weights(manager.held, manager.optimizer) if manager.active else {}
            self._moves.append((plan(source, new), [BufferState(stepped, target, dtype)]))
        else:
            held = {one.name: one.parameter.detach().view(-1) for one in manager.held}
            self._moves.append((moved, [BufferState(held, target, dtype)]))
        states = []
        for name in self._progress.kept:
            have = manager.kept.get(name, {})
            room = self._room(old, new, have, dtype, CPU)
            states.append(BufferState(have, room, dtype))
            if part is not None:
                self._kept[name] = {
                    one.name: room[one.name].view(one.parameter.shape) for one in part.held
                }
        if states:
            self._moves.append((moved, states))

    def _plan_state(self) -> None:
        """Float32 weights, where they are not the model's own, and moments."""
        manager, part = self._manager, self._part
        old, new = (
            state_layout(manager.architecture, one, manager.sharding)
            for one in (self._old, self._new)
        )
        have: Mapping[str, Mapping[str, Tensor]] = {}
        if manager.part is not None:
            have = state_of(manager.held, manager.optimizer).state
        states = []
        if manager.options.dtype != STATE:
            target = stepped_weights(part.held, part.optimizer) if part is not None else {}
            states.append(BufferState(have.get(MAIN, {}), target, STATE))
        for kind in MOMENTS if self._progress.stepped else ():
            before = have.get(kind, {})
            self._moments[kind] = self._room(old, new, before, STATE, manager.device)
            states.append(BufferState(before, self._moments[kind], STATE))
        if states:
            self._moves.append((plan(old, new), states))

    def _room(
        self,
        old: Layout,
        new: Layout,
        have: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Return this rank's tensors of the new layout, flat, to be filled; those that it has
        already where they stay the same."""
        rank = self._manager.rank
        same = unchanged(old, new, rank) & have.keys()
        made = allocate(new, rank, device=device, dtype=dtype, without=same)
        return {name: one.view(-1) for name, one in (made | {n: have[n] for n in same}).items()}


def _has_moments(manager: MegatronModelManager) -> bool:
    return MOMENTS[0] in state_of(manager.held, manager.optimizer).state


def _tracker() -> Any:
    """Megatron's random states of layers, which are the process's."""
    return of_megatron("tensor_parallel").get_cuda_rng_tracker()
