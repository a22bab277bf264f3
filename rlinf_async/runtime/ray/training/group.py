"""`RayTrainGroup`: the actors of Ray that train one model, on a placement group."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final

from rlinf_async.runtime.ray.hosts import live_hosts
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.training.actor import TrainRayActor
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.critics import PairSteps
from rlinf_async.runtime.ray.training.memory import saver_environment
from rlinf_async.runtime.ray.training.placement import placed
from rlinf_async.runtime.ray.training.ranks import Peer
from rlinf_async.runtime.ray.training.room import (
    Asked,
    actor_name,
    check_room,
    wait_for_ranks,
    wait_until_placed,
)
from rlinf_async.runtime.ray.training.settings import (
    batches,
    check_megatron,
    trainer_config,
)

NOSET_VISIBLE_DEVICES: Final = tuple(
    f"RAY_EXPERIMENTAL_NOSET_{name}"
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "ONEAPI_DEVICE_SELECTOR",
    )
)
"""variables that keep Ray from hiding the accelerators of other ranks, which those of one host need
to reach each other's memory"""

OTHERS_SECONDS: Final = 5.0
"""time that the other ranks have to fail after the first"""


class Refs(list[Any]):
    """References to the results of a call, by rank: for ``ray.get``, or to ``await``."""

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._results().__await__()

    async def _results(self) -> list[Any]:
        """Return the results; the first error is raised at once, though other ranks still wait."""
        return await asyncio.gather(*self)


class RayTrainGroup:
    """The actors of Ray that train one model. Its methods wait until they are done, but for those
    called ``async_``.

    Args:
        args: `TrainArgs`, or a namespace with some of its names.
        num_nodes: number of hosts.
        num_gpus_per_node: ranks on each.
        pg: placement group, its bundle indices by host and device, and perhaps the number of the
            accelerator in each: `create_placement_group`. It may have more bundles than ranks.
            None: the group reserves one of its own, which `shutdown` removes.
        num_gpus_per_actor: share of its bundle's device that a rank takes (below 1: others may
            use the device too).
        role: ``"actor"`` or ``"critic"``.

    Raises:
        ValueError: ``args`` make no sense, or there are too few bundles.
        BuildError: others hold the bundles, or what a group of its own needs: what was asked, and
            who holds what.
    """

    def __init__(
        self,
        args: Any,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: tuple[Any, Sequence[int], Sequence[Any]] | tuple[Any, Sequence[int]] | None = None,
        num_gpus_per_actor: float = 1,
        role: str = "actor",
    ) -> None:
        self.args, self.role = args, role
        self.world_size = num_nodes * num_gpus_per_node
        if self.world_size < 1:
            raise ValueError(
                f"{num_nodes} nodes x {num_gpus_per_node} ranks are {self.world_size} ranks; a "
                "group has one at least"
            )
        typed = TrainArgs.of(args).for_role(role)
        # What is wrong with numbers is said before anything is started.
        trainer_config(typed, critic=role == "critic", reference=False, device="cpu")
        batches(typed).of_rank(typed.data_ranks(self.world_size))
        if typed.train_backend == "megatron":
            check_megatron(typed)
        if not 0.0 < num_gpus_per_actor <= 1.0:
            raise ValueError(
                f"num_gpus_per_actor is {num_gpus_per_actor}; a rank has one device or a share"
            )
        self._pair_steps: PairSteps | None = None
        self.actors: list[Any] = []
        """handles, by rank"""
        self._placed = placed(pg, self.world_size)
        try:
            self._start(typed, self._placed.group, self._placed.bundles, num_gpus_per_actor)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, args: TrainArgs, group: Any, bundles: Sequence[int], num_gpus: float) -> None:
        """Start the actors: rank 0 first, at whose address the others meet."""
        gpu = [group.bundle_specs[one].get("GPU", 0) > 0 for one in bundles[: self.world_size]]
        asked = [
            Asked(
                f"{self.role}[{rank}]",
                bundles[rank],
                {"CPU": num_gpus, "GPU": num_gpus} if gpu[rank] else {"CPU": num_gpus},
            )
            for rank in range(self.world_size)
        ]
        wait_until_placed(group)
        check_room(f"RayTrainGroup of role {self.role!r}", group, asked)
        cls = of_ray().remote(actor_class_of(args))
        in_bundle = of_ray("util.scheduling_strategies").PlacementGroupSchedulingStrategy
        master: tuple[Any, Any] = (None, None)
        names = [actor_name(one.rank, group, one.bundle) for one in asked]
        for rank, one in enumerate(asked):
            actor = cls.options(
                name=names[rank],
                num_cpus=one.resources["CPU"],
                num_gpus=one.resources.get("GPU", 0),
                scheduling_strategy=in_bundle(
                    placement_group=group, placement_group_bundle_index=one.bundle
                ),
                runtime_env={"env_vars": environment(args, self.role, gpu=gpu[rank])},
            ).remote(self.world_size, rank, *master)
            self.actors.append(actor)
            if rank == 0:
                answer = actor.get_master_addr_and_port.remote()
                wait_for_ranks([answer], asked[:1], group)
                master = of_ray().get(answer)
        standing = self._call("get_master_addr_and_port")
        wait_for_ranks(standing, asked, group)
        self._introduce(asked, names)

    def _introduce(self, asked: Sequence[Asked], names: Sequence[str]) -> None:
        """Tell the ranks of one another."""
        ray = of_ray()
        hosts = {host.id: host.name for host in live_hosts(ray.nodes())}
        places = [
            f"process {pid} on {hosts.get(node, node)}"
            for node, pid in ray.get(self._call("place"))
        ]
        told = zip(asked, names, places, strict=True)
        ray.get(self._call("meet", [Peer(one.rank, name, place) for one, name, place in told]))

    # -- calls that return at once ------------------------------------------------------------

    def async_init(self, args: Any = None, role: str | None = None, with_ref: bool = False) -> Refs:
        """Build the model on all ranks; each result is the next rollout.

        It is the same on all ranks: `init` raises `ValueError` on each where it is not.
        """
        if args is not None:
            self.args = args
        return self._call("init", self.args, role or self.role, with_ref)

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> Refs:
        """Train on one rollout; each result is a `LanguageTrainReport`.

        Of an actor and a critic that are connected both groups have to be called: each waits for
        what the other computes. A failure of one, or the loss of its process, is a `PeerFailed`
        of the other; both may then be called again, also for the same rollout.
        """
        if self._pair_steps is None:
            return self._call("train", rollout_id, rollout_data_ref)
        step = self._pair_steps.join(self.role, rollout_id)
        return self._call("train_step", step, rollout_id, rollout_data_ref)

    # -- calls that wait ----------------------------------------------------------------------

    def save_model(self, step_id: int) -> None:
        """Write the checkpoint after a rollout."""
        self._wait("save_model", step_id)

    def update_weights(self) -> None:
        """Give the engines of the rollout manager the present weights."""
        self._wait("update_weights")

    def onload(self, tags: Iterable[str] | None = None) -> None:
        """Take what sleeps back to the devices."""
        self._wait("wake_up", _listed(tags))

    def offload(self, tags: Iterable[str] | None = None) -> None:
        """Free the devices' memory of ``"weights"``, ``"optimizer"``, or both (None)."""
        self._wait("sleep", _listed(tags))

    def clear_memory(self) -> None:
        """Give memory that is not in use back to the devices."""
        self._wait("clear_memory")

    def connect(self, critic_group: RayTrainGroup) -> None:
        """Pair each rank of this actor with the critic's of the same rank; in the place of a critic
        with which it was paired before.

        Raises `ValueError`: there are not as many critics, or they begin at another rollout. Where
        one rank fails, the others are paired all the same: call it again.
        """
        if critic_group.world_size != self.world_size:
            raise ValueError(
                f"{self.world_size} ranks of the actor cannot be paired with "
                f"{critic_group.world_size} of the critic: make both groups of the same size"
            )
        pairs = zip(self.actors, critic_group.actors, strict=True)
        self._finish([actor.connect_actor_critic.remote(critic) for actor, critic in pairs])
        self._pair_steps = critic_group._pair_steps = PairSteps()

    def set_rollout_manager(self, manager: Any) -> None:
        """Tell the ranks which actor of Ray has the engines."""
        self._wait("set_rollout_manager", manager)

    def shutdown(self) -> None:
        """End the actors; a placement group that was given stays, one of its own goes."""
        for actor in self.actors:
            of_ray().kill(actor)
        self.actors.clear()
        if self._placed.own:
            of_ray("util.placement_group").remove_placement_group(self._placed.group)
            self._placed = self._placed._replace(own=False)

    def _call(self, method: str, *given: Any) -> Refs:
        if not self.actors:
            raise RuntimeError(f"{method}() of a group that was shut down: start another one")
        return Refs(getattr(actor, method).remote(*given) for actor in self.actors)

    def _wait(self, method: str, *given: Any) -> None:
        """Call a method of all ranks, and wait until it is done, as `_finish` does."""
        self._finish(self._call(method, *given))

    def _finish(self, refs: Sequence[Any]) -> None:
        """Wait until all ranks have answered.

        Raises the error of the first rank that has one, with those of the others in its notes: one
        of them may be the cause.
        """
        try:
            of_ray().get(refs)
        except Exception:
            errors = _errors(refs)
            first, *others = errors
            for rank in others:
                errors[first].add_note(f"{self.role}[{rank}]: {_said(errors[rank])}")
            raise errors[first] from None


def actor_class_of(args: TrainArgs) -> type[TrainRayActor]:
    """Return the class of the actors of Ray."""
    from rlinf_async.runtime.ray.training.fsdp_actor import FSDPTrainRayActor
    from rlinf_async.runtime.ray.training.megatron_actor import MegatronTrainRayActor

    return MegatronTrainRayActor if args.train_backend == "megatron" else FSDPTrainRayActor


def environment(args: TrainArgs, role: str, *, gpu: bool) -> dict[str, str]:
    """Return the environment variables of a rank's process; those of ``train_env_vars`` win."""
    found = dict.fromkeys(NOSET_VISIBLE_DEVICES, "1")
    found["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "0")
    if args.offload_train and gpu:
        found |= saver_environment()
    if args.use_routing_replay and role == "actor":  # a critic's experts see other tokens' values
        found["ENABLE_ROUTING_REPLAY"] = "1"
    return found | args.train_env_vars


def _errors(refs: Sequence[Any]) -> dict[int, Exception]:
    """The errors of a call that has failed, by rank; of ranks that answer soon."""
    ray, found = of_ray(), dict[int, Exception]()
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=OTHERS_SECONDS)
    for rank, ref in enumerate(refs):
        if ref in done:
            try:
                ray.get(ref)
            except Exception as error:
                found[rank] = error
    return found


def _said(error: Exception) -> str:
    """An error in a line; Ray's has the traceback of the rank in its text."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"


def _listed(tags: Iterable[str] | None) -> list[str] | None:
    return None if tags is None else list(tags)
