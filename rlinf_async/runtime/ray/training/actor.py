"""`TrainRayActor`: one rank of a training group, as a plain actor of Ray whose methods block.

::

    method of Ray (blocks)  -->  event loop of this process  -->  GroupActor or GroupCritic
                                                                  (our FSDPActor, FSDPCritic)

    rank 0 is made       listens at a free port; its address and port go to the other ranks
    meet (all ranks)     what the others are called, to ask Ray for those that are lost
    init (all ranks)     they meet at that port
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from rlinf_async.backends.base import made_by
from rlinf_async.backends.language import PARTS, WEIGHTS
from rlinf_async.channels import Latest
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.output import interface_of
from rlinf_async.runtime.ray.session import of_ray, own_address
from rlinf_async.runtime.ray.training.args import RolloutData, TrainArgs, fetched
from rlinf_async.runtime.ray.training.engine import FromChannel, FromTensors
from rlinf_async.runtime.ray.training.pairs import (
    ActorSide,
    ActorStep,
    CriticSide,
    CriticStep,
    PairTicket,
    from_peer,
)
from rlinf_async.runtime.ray.training.ranks import GroupRanks, LoopThread, PeerFailed, PeerRank
from rlinf_async.runtime.ray.training.worker import GroupActor, GroupCritic, GroupRank
from rlinf_async.workers.base import WorkerContext, WorkerInfo, listen_for_ranks, make


class TrainRayActor(ABC):
    """One rank of a training group.

    Args:
        world_size: number of ranks.
        rank: number of this rank, from 0.
        master_addr: address of rank 0; None on rank 0 itself.
        master_port: port of rank 0; None on rank 0, which listens at a free one.
    """

    train_parallel_config: dict[str, int]
    """``dp_size``: between how many ranks a rollout is divided; set by `init`"""

    def __init__(
        self,
        world_size: int,
        rank: int,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        self.world_size, self.rank = world_size, rank
        self.rollout_manager: Any = None
        self.peers: Sequence[PeerRank] = ()
        if master_addr is None or master_port is None:
            # Nobody else can come in between, before the others are told of the port.
            found = urlsplit(listen_for_ranks(own_address()))
            master_addr, master_port = str(found.hostname), int(found.port or 0)
        self.master_addr, self.master_port = master_addr, master_port
        os.environ.update(
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
            WORLD_SIZE=str(world_size),
            RANK=str(rank),
            LOCAL_RANK=str(self.local_device() or 0),
        )
        interface = interface_of(own_address())
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface:
                os.environ.setdefault(variable, interface)

    def place(self) -> tuple[str, int]:
        """Return where this rank is: Ray's identifier of the node, and its process."""
        return str(of_ray().get_runtime_context().get_node_id()), os.getpid()

    def meet(self, peers: Sequence[PeerRank]) -> None:
        """Take the ranks of the group, in order."""
        self.peers = peers

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return where the ranks meet."""
        return self.master_addr, self.master_port

    @property
    def rendezvous(self) -> str:
        """Address at which the ranks meet, as torch's ``init_method``."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"

    def local_device(self) -> int | None:
        """Return the number of this rank's accelerator among those that its process sees; None
        without one.

        With NOSET_VISIBLE_DEVICES the process sees all of its host, else its own alone.
        """
        given = [str(one) for one in of_ray().get_runtime_context().get_accelerator_ids()["GPU"]]
        if not given:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return int(given[0])
        return [one.strip() for one in visible.split(",")].index(given[0])

    @abstractmethod
    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Build what this rank trains; return the next rollout."""

    @abstractmethod
    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Free the device's memory of ``"weights"``, ``"optimizer"``, or both (None)."""

    @abstractmethod
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take them back."""

    @abstractmethod
    def train(self, rollout_id: int, rollout_data_ref: Any) -> Any:
        """Train on one rollout."""

    @abstractmethod
    def save_model(self, step_id: int) -> Any:
        """Write the checkpoint after a rollout."""

    @abstractmethod
    def update_weights(self) -> Any:
        """Give the engines the present weights."""

    @abstractmethod
    def connect_actor_critic(self, critic: Any) -> None:
        """Pair this rank of an actor with the critic of the same rank."""

    @abstractmethod
    def _get_parallel_config(self) -> dict[str, int]:
        """Return how a rollout is divided between the ranks."""

    @abstractmethod
    def clear_memory(self) -> None:
        """Give memory that is not in use back to the device."""

    def set_rollout_manager(self, manager: Any) -> None:
        """Take the actor of Ray that has the engines; rank 0 tells it how rollouts are divided."""
        self.rollout_manager = manager
        if self.rank == 0:
            told = manager.set_train_parallel_config.remote(self._get_parallel_config())
            of_ray().get(told)


PRELOADED: Final = "torch_memory_saver_hook_mode_preload.abi3.so"
ENABLED: Final = "TMS_INIT_ENABLE"


def saver_environment() -> dict[str, str]:
    """Return the environment of a process whose device memory the saver is to hold; empty where
    the package is not installed. Its library has to be loaded before torch."""
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None or found.origin is None:
        return {}
    library = Path(found.origin).parents[1] / PRELOADED
    if not library.is_file():
        return {}
    return {"LD_PRELOAD": str(library), ENABLED: "1", f"{ENABLED}_CPU_BACKUP": "1"}


def memory_saver() -> Any | None:
    """Return the saver of this process, None where it was started without one."""
    if os.environ.get(ENABLED) != "1":
        return None
    found: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
    return found


def clear() -> None:
    """Collect garbage, and give what torch keeps back to the device."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()  # nothing happens without CUDA


class LanguageTrainRayActor(TrainRayActor):
    """One rank of a training group; see `TrainRayActor` for the arguments.

    Ranks that hold parts of one model take the same share of a rollout; one of them feeds the rest.
    """

    train_backend: ClassVar[str]
    """``train_backend`` of the arguments that it takes"""
    args: TrainArgs = made_by("init()")
    """arguments of the rank's role"""
    role: str = ""
    hf_config: Any = None
    """the Hugging Face configuration of the model"""
    tokenizer: Any = None
    """tokenizer of ``hf_checkpoint``; None where it has none"""
    _worker: GroupRank | None = None
    _ranks: GroupRanks | None = None
    """ranks of the group, where there are several"""
    _side: ActorSide | CriticSide | None = None
    """this rank's side of its actor and critic pair"""
    _step: int = 0
    """the last one of the pair"""
    _without_model: bool = False

    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Build the model, and load the checkpoint to go on from. Collective.

        Args:
            args: `TrainArgs`, or a namespace with some of its names.
            role: ``"actor"`` or ``"critic"``.
            with_ref: keep the reference weights.

        Returns:
            The next rollout: the last loaded + 1; 0 without one, and with ``debug_rollout_only``.

        Raises:
            ValueError: ``args`` make no sense, or the ranks would begin at different rollouts.
        """
        if self._worker is not None:
            raise RuntimeError(f"init() of {self._worker.name} was called before: once is enough")
        given = TrainArgs.of(args)
        if given.train_backend != self.train_backend:
            raise ValueError(
                f"{type(self).__name__} trains with {self.train_backend!r}, but train_backend is "
                f"{given.train_backend!r}: RayTrainGroup chooses the class by its own args"
            )
        self.args, self.role = given.for_role(role), role
        self.train_parallel_config = self._get_parallel_config()
        self._without_model = self.args.debug_rollout_only
        if self._without_model:
            return 0
        self._loop = LoopThread(f"{role}[{self.rank}]")
        worker = self._make_worker(with_ref)
        if self.world_size > 1:
            self._loop.run(worker.join_collective())
            self._ranks = GroupRanks(self._loop, self.peers, self.rank)
        with self._together("begin"):
            self._loop.run(worker.setup())
            self._worker = worker
            self.hf_config, self.tokenizer = self._loop.run(worker.compute(worker.read_model_files))
        self._published = Latest(WeightUpdate, name="weights")
        self._updater = (
            FromTensors(self._published)
            if self.args.colocate
            else FromChannel(self._published, self._loop)
        )
        if self.args.offload_train:
            self.sleep()
        return worker.start_rollout_id

    def _make_worker(self, with_ref: bool) -> GroupRank:
        local = self.local_device()
        device = "cpu" if local is None else f"cuda:{local}"
        info = WorkerInfo(
            group=self.role,
            rank=self.rank,
            world_size=self.world_size,
            collective="gloo" if local is None else "nccl",
            rendezvous=self.rendezvous,
        )
        context = WorkerContext(info, ThreadPoolExecutor(1, thread_name_prefix="compute"))
        if self.role == "critic":
            return make(GroupCritic, context, (self.args, device), {})
        return make(GroupActor, context, (self.args, device), {"with_ref": with_ref})

    def _get_parallel_config(self) -> dict[str, int]:
        return {"dp_size": self.args.data_ranks(self.world_size)}

    # -- training -----------------------------------------------------------------------------

    def train(self, rollout_id: int, rollout_data_ref: Any) -> LanguageTrainReport | None:
        """Train on one rollout; a rank that sleeps is woken up before. Collective.

        Args:
            rollout_id: number of the rollout.
            rollout_data_ref: columns or samples (`RolloutData`), a reference to them, or a list of
                references to the share of each rank.

        Returns:
            The report; None with ``debug_rollout_only``.

        Raises:
            RolloutDataError: the data cannot be trained on.
        """
        return self.train_step(None, rollout_id, rollout_data_ref)

    def train_step(
        self, step: int | None, rollout_id: int, rollout_data_ref: Any
    ) -> LanguageTrainReport | None:
        """Train as `train` does, in one step of a pair of an actor and a critic (`PairSteps`);
        ``step`` None: in the one after the last.

        Raises:
            PeerFailed: the rank that this one is paired with failed, or is lost.
        """
        if self._without_model:
            return None
        worker = self._built("train")
        failed: PeerFailed | None = None
        paired: ActorStep | CriticStep | None = None
        try:
            paired = self._begin_step(worker, step, rollout_id)
        except PeerFailed as error:
            failed = error
        try:
            with self._together(f"train rollout {rollout_id}"):
                if worker.asleep:
                    self.wake_up()
                groups = self._share(worker, rollout_id, rollout_data_ref, failed)
                training = worker.train_rollout(groups, rollout_id=rollout_id, paired=paired)
                return self._loop.run(training)
        except BaseException as error:
            if paired is not None:
                self._loop.run(paired.fail(error))
            raise

    def _share(
        self, worker: GroupRank, rollout_id: int, given: Any, failed: Exception | None
    ) -> list[SampleGroup]:
        """Return this rank's share of a rollout, if all ranks have theirs.

        Args:
            failed: what this rank failed with before.
        """
        groups: list[SampleGroup] = []
        try:
            at = worker.data_rank
            data, own = fetched(given, at.rank, at.size)
            groups = RolloutData.of(data).groups(
                self.args,
                rollout_id=rollout_id,
                version=worker.trained_version,
                rank=0 if own else at.rank,
                ranks=1 if own else at.size,
            )
            worker.check_size(groups)
        except Exception as error:
            failed = failed or error
        self._loop.run(worker.compute(worker.vote, failed))
        return groups

    # -- the device's memory ------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] | None = None) -> None:
        """Free the device's memory of ``"weights"``, ``"optimizer"``, or both (None)."""
        worker, parts = self._built("sleep"), _parts(tags)
        saver = memory_saver()
        if saver is None or parts != PARTS:
            self._loop.run(worker.sleep(parts))
        elif not worker.paused:
            self._loop.run(worker.compute(saver.pause))
            worker.paused = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take them back to the device."""
        worker = self._built("wake_up")
        if worker.paused:
            saver: Any = memory_saver()
            self._loop.run(worker.compute(saver.resume))
            worker.paused = False
        self._loop.run(worker.wake_up(_parts(tags)))

    @contextmanager
    def _with_weights(self, worker: GroupRank) -> Iterator[None]:
        """Have the weights on the device for the block."""
        asleep = worker.asleep
        self.wake_up(sorted(asleep & {WEIGHTS}))
        try:
            yield
        finally:
            if asleep:
                self.sleep(sorted(asleep))

    def clear_memory(self) -> None:
        """Collect garbage, and give what is not in use back to the device."""
        if self._worker is not None:
            self._loop.run(self._built("clear_memory").compute(clear))

    # -- weights ------------------------------------------------------------------------------

    def update_weights(self) -> int | None:
        """Give the engines of the rollout manager the present weights; return their version.

        None where there are no engines: ``debug_train_only``, ``debug_rollout_only``. Collective.
        """
        if self.role == "critic":
            raise RuntimeError("update_weights() of a critic: engines take the weights of an actor")
        if self._without_model:
            return None
        worker = self._built("update_weights")
        if self.args.debug_train_only:
            return None
        assert isinstance(worker, GroupActor)
        if self.rollout_manager is None:
            raise RuntimeError(
                "update_weights() needs a rollout manager: call set_rollout_manager() before, or "
                "set debug_train_only = True to train without engines"
            )
        with self._together("update_weights"):
            with self._with_weights(worker):
                version = self._loop.run(worker.sync_model_to_rollout(self._published.sender))
            if self.rank == 0:
                ray = of_ray()
                engines = ray.get(self.rollout_manager.get_rollout_engines.remote())
                self._updater.deliver(engines, version)
            self._loop.run(worker.shift_weights())
        return version

    def switch_weights(self, tag: str) -> None:
        """Put tagged weights into the model: ``actor``, ``ref``, ``old_actor``, ``rollout_actor``.

        Training, checkpoints and updates of the engines switch back to ``actor`` first.
        """
        worker = self._built("switch_weights")
        if not isinstance(worker, GroupActor):
            raise RuntimeError("switch_weights() of a critic: it keeps no other weights")
        self._loop.run(worker.switch(tag))

    # -- checkpoints --------------------------------------------------------------------------

    def save_model(self, step_id: int) -> str | None:
        """Write the checkpoint after a rollout, and ``save_hf``; return its folder. Collective."""
        if self._without_model:
            return None
        worker = self._built("save_model")
        with self._together(f"save step {step_id}"), self._with_weights(worker):
            folder = self._loop.run(worker.save(step_id))
            if isinstance(worker, GroupActor) and self.args.save_hf is not None:
                path = self.args.save_hf.format(rollout_id=step_id)
                self._loop.run(worker.save_pretrained(path))
        return folder

    # -- actor and critic ---------------------------------------------------------------------

    def connect_actor_critic(self, critic: Any) -> None:
        """Pair this rank of an actor with the critic of the same rank, whose handle this is.

        Raises `ValueError`: the critic would begin at another rollout, or has other ranks.
        """
        worker = self._built("connect_actor_critic")
        side = ActorSide(worker.args, worker.data_rank, worker.name, f"critic[{worker.rank}]")
        ticket = self._loop.run(side.open())
        try:
            of_ray().get(critic.link_actor.remote(ticket, worker.start_rollout_id))
        except BaseException:
            self._loop.run(side.close())
            raise
        self._pair_by(side)

    def link_actor(self, ticket: PairTicket, start_rollout_id: int) -> None:
        """Open a critic's side of a pair.

        Raises `ValueError`: the actor begins at another rollout, or has other ranks.
        """
        worker = self._built("link_actor")
        if not isinstance(worker, GroupCritic):
            raise ValueError(
                f"{worker.name} is no rank of a critic: connect() is a method of the actor's group"
            )
        theirs, mine = ticket.data_rank, worker.data_rank
        if theirs != mine:
            raise ValueError(
                f"{worker.name} trains share {mine.rank} of {mine.size} of a rollout, but the "
                f"actor of the same rank share {theirs.rank} of {theirs.size}: give both groups "
                "the same backend, tensor_model_parallel_size and pipeline_model_parallel_size"
            )
        if start_rollout_id != worker.start_rollout_id:
            raise ValueError(
                f"the actor begins at rollout {start_rollout_id}, but the critic at "
                f"{worker.start_rollout_id}: load and critic_load must be of the same rollout"
            )
        self._pair_by(self._loop.run(CriticSide.open(ticket, worker.args, worker.name)))

    def _pair_by(self, side: ActorSide | CriticSide) -> None:
        """Take a side; that of a pair before is closed."""
        former, self._side, self._step = self._side, side, 0
        if former is not None:
            self._loop.run(former.close())

    def _begin_step(
        self, worker: GroupRank, step: int | None, rollout_id: int
    ) -> ActorStep | CriticStep | None:
        """Begin a step of the pair, None: the next; return None where this rank trains alone.

        Raises `PeerFailed`: the other side is lost, or further already.
        """
        self._step = self._step + 1 if step is None else step
        if self._side is None or rollout_id < self.args.num_critic_only_steps:
            return None
        begun: Awaitable[ActorStep | CriticStep] = self._side.begin(self._step)
        doing = f"{worker.name} cannot train rollout {rollout_id}"
        return self._loop.run(from_peer(self._side.peer, doing, begun))

    def _built(self, doing: str) -> GroupRank:
        if self._worker is None:
            raise RuntimeError(f"{doing}() before init(), or with debug_rollout_only")
        if self._ranks is not None:
            self._ranks.check(doing)
        return self._worker

    def _together(self, doing: str) -> AbstractContextManager[None]:
        """Make a call that all ranks make: see `GroupRanks.together`."""
        return nullcontext() if self._ranks is None else self._ranks.together(doing)


def _parts(tags: Sequence[str] | None) -> frozenset[str]:
    parts = PARTS if tags is None else frozenset(tags)
    unknown = sorted(parts - PARTS)
    if unknown:
        raise ValueError(f"tags has {unknown[0]!r}; it may hold {', '.join(sorted(PARTS))}")
    return parts


class MegatronTrainRayActor(LanguageTrainRayActor):
    """``tensor_model_parallel_size`` x ``pipeline_model_parallel_size`` ranks hold one model, and
    take the same share of each rollout."""

    train_backend = "megatron"


class FSDPTrainRayActor(LanguageTrainRayActor):
    """Every rank has a shard of the model, and a share of each rollout."""

    train_backend = "fsdp"
