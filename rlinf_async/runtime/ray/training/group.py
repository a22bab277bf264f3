"""`RayTrainGroup`: the actors of Ray that train one model, on a placement group.

::

    create_placement_group   bundles of Ray, ordered by host and device
    check_room               whether they have room for the ranks
    RayTrainGroup            starts the ranks there, and calls them

Ray itself lets an actor for which its bundle has no room wait, for ever and without a word.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from rlinf_async.runtime.ray.reservation import amount, ask_accelerators, there
from rlinf_async.runtime.ray.session import live_hosts, natural, of_ray
from rlinf_async.runtime.ray.training.actor import (
    FSDPTrainRayActor,
    MegatronTrainRayActor,
    saver_environment,
)
from rlinf_async.runtime.ray.training.args import TrainArgs, batches, check_megatron, trainer_config
from rlinf_async.runtime.ray.training.pairs import PairSteps
from rlinf_async.runtime.ray.training.ranks import PeerRank
from rlinf_async.workers.base import BuildError

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""seconds between two looks whether bundles are free"""


class OrderedPlacementGroup(NamedTuple):
    """A placement group, and its bundles by host and device. Any such triple will do."""

    group: Any
    bundle_indices: list[int]
    """the k-th rank is in bundle ``bundle_indices[k]``"""
    gpu_ids: list[str]
    """number of the accelerator of the k-th rank on its host; empty for one without"""


class Placed(NamedTuple):
    """Places of the ranks of a training group."""

    group: Any
    bundles: list[int]
    """bundle of each rank; there may be more"""
    own: bool
    """whether the training group made it, and removes it"""


def placed(pg: Any, ranks: int) -> Placed:
    """Return where ``ranks`` ranks go.

    Args:
        pg: a placement group, its bundle indices by rank, and perhaps more, such as the number of
            the accelerator in each; None: one of their own is reserved.

    Raises:
        ValueError: ``pg`` is none of these, or its bundles are too few.
        BuildError: bundles were not free in time.
    """
    if pg is None:
        made = create_placement_group(ranks)
        return Placed(made.group, made.bundle_indices, own=True)
    given: tuple[Any, ...] = tuple(pg) if isinstance(pg, Sequence) else (pg,)
    if (
        len(given) not in (2, 3)
        or not hasattr(given[0], "bundle_specs")
        or not hasattr(given[1], "__iter__")
    ):
        kinds = ", ".join(type(one).__name__ for one in given)
        raise ValueError(
            f"pg is ({kinds}); it has to be (placement group of Ray, bundle indices), with or "
            "without the numbers of the accelerators, as create_placement_group() makes it, or None"
        )
    group, bundles = given[0], list(given[1])
    there = len(group.bundle_specs)
    for rank, bundle in enumerate(bundles[:ranks]):
        # -1 is any of them for Ray: it has no device of its own.
        if not isinstance(bundle, Integral) or not 0 <= int(bundle) < there:
            raise ValueError(
                f"bundle {bundle} of rank {rank} is none of the placement group, which has 0 to "
                f"{there - 1}"
            )
    if ranks > len(bundles):
        raise ValueError(f"{ranks} ranks need {ranks} bundles, but pg names {len(bundles)}")
    return Placed(group, [int(one) for one in bundles], own=False)


def create_placement_group(
    num_gpus: int, *, wait: float = 10.0, kind: str | None = None
) -> OrderedPlacementGroup:
    """Reserve bundles of one device each; ``ray.init`` was called already.

    Ray gives no order to bundles: host and device of each are looked up, and sorted.

    Args:
        num_gpus: number of bundles.
        wait: seconds to wait for them.
        kind: ``"GPU"`` or ``"CPU"``; accelerators where the cluster has any.

    Raises:
        BuildError: they were not free in time: what was asked, and what there is; ``num_gpus`` or
            ``wait`` is no such number.
    """
    if type(num_gpus) is not int or num_gpus < 1:
        raise BuildError(f"num_gpus must be a whole number from 1, got {num_gpus!r}")
    if not wait >= 0.0:
        raise BuildError(f"wait must be seconds from 0, got {wait!r}")
    groups = of_ray("util.placement_group")
    if kind is None:
        kind = "GPU" if of_ray().cluster_resources().get("GPU", 0) > 0 else "CPU"
    bundle = {"CPU": 1.0} if kind == "CPU" else {"GPU": 1.0, "CPU": 1.0}
    group = groups.placement_group([bundle] * num_gpus, strategy="PACK")
    try:
        _wait_until_free(group, num_gpus, kind, wait)
        return _ordered(group, num_gpus, kind)
    except BaseException:  # an interrupt, too: nobody else knows of it
        groups.remove_placement_group(group)
        raise


def _wait_until_free(group: Any, num_gpus: int, kind: str, wait: float) -> None:
    waited = 0.0
    while not group.wait(LOOK_SECONDS):
        waited += LOOK_SECONDS
        if waited >= wait:
            hosts = live_hosts(of_ray().nodes())
            raise BuildError(
                f"a placement group of {num_gpus} bundles of 1 {kind} was not free within "
                f"{wait:g} s: {there(hosts)}; 'ray status' shows what is in use. Ask for fewer, "
                "end what holds the rest, or wait longer (wait=...)"
            )
        log.warning("waiting up to %g s for %d bundles of 1 %s", wait, num_gpus, kind)


def _ordered(group: Any, num_gpus: int, kind: str) -> OrderedPlacementGroup:
    """Sort the bundles by host and accelerator."""
    numbers: list[str] = [""] * num_gpus
    if kind == "GPU":
        numbers = of_ray().get(ask_accelerators(group, range(num_gpus)))
    place = {host.id: at for at, host in enumerate(live_hosts(of_ray().nodes()))}
    nodes = of_ray("util.placement_group").placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(num_gpus), key=lambda at: (place[nodes[at]], natural(numbers[at]), at))
    return OrderedPlacementGroup(group, order, [numbers[at] for at in order])


ROOM_SECONDS: Final = 8.0
"""time that what has just ended has to give its bundles back"""
ROOM_LOOK_SECONDS: Final = 0.25
"""seconds between two looks whether there is room"""
TELL_SECONDS: Final = 30.0
"""interval between reports of a wait that has no limit"""
LEAST: Final = 1e-4
"""the smallest share of a resource that Ray knows"""


class Asked(msgspec.Struct, frozen=True):
    """Resources that a rank asks of its bundle."""

    rank: str
    bundle: int
    resources: Mapping[str, float]


def wait_until_placed(group: Any) -> None:
    """Wait until the placement group is reserved: it may be asked of autoscaling."""
    since = told = time.monotonic()
    while not group.wait(ROOM_LOOK_SECONDS):
        now = time.monotonic()
        if now >= told + TELL_SECONDS:
            told = now
            wanted, hosts = amount(group.bundle_specs), live_hosts(of_ray().nodes())
            log.warning(
                "waiting for %.0f s for a placement group of %s: %s",
                now - since, wanted, there(hosts),
            )  # fmt: skip


def check_room(whose: str, group: Any, asked: Sequence[Asked]) -> None:
    """Raise `BuildError` where a bundle has no room: what was asked, what there is, and who holds
    the rest.

    Args:
        whose: name of the training group.
    """
    for one in asked:
        has = group.bundle_specs[one.bundle]
        inside = [other for other in asked if other.bundle == one.bundle]
        if any(
            sum(other.resources[name] for other in inside) > has.get(name, 0.0) + LEAST
            for name in one.resources
        ):
            ranks, each = " and ".join(other.rank for other in inside), amount([one.resources])
            asks = f"asks for {each}" if len(inside) == 1 else f"ask for {each} each"
            raise BuildError(
                f"{whose}: {ranks} {asks}, but bundle {one.bundle} of the placement group is of "
                f"{amount([has])}: make it of larger bundles (create_placement_group), or ask for "
                "less (num_gpus_per_actor)"
            )
    end = time.monotonic() + ROOM_SECONDS
    while full := [one for one in asked if not _has_room(group, one)]:
        if time.monotonic() >= end:
            raise BuildError(f"{whose}: {_explain(group, full)}")
        time.sleep(ROOM_LOOK_SECONDS)


def wait_for_ranks(refs: Sequence[Any], asked: Sequence[Asked], group: Any) -> None:
    """Wait until these ranks answer. Raises Ray's error where one cannot be started."""
    ray, waiting = of_ray(), list(refs)
    since = time.monotonic()
    while True:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=TELL_SECONDS)
        ray.get(done)
        if not waiting:
            return
        if not done:
            late = [one for one, ref in zip(asked, refs, strict=True) if ref in waiting]
            log.warning(
                "waiting for %.0f s for Ray to start %s: %s",
                time.monotonic() - since,
                ", ".join(one.rank for one in late),
                _explain(group, [one for one in late if not _has_room(group, one)])
                or "their bundles have room ('ray list actors' shows what they wait for)",
            )


def _has_room(group: Any, asked: Asked) -> bool:
    free = _free(group, asked)
    return all(free[name] + LEAST >= number for name, number in asked.resources.items())


def _free(group: Any, asked: Asked) -> dict[str, float]:
    """What the bundle has left of what is asked."""
    here, found = f"_group_{asked.bundle}_{group.id.hex()}", of_ray().available_resources()
    return {name: found.get(name + here, 0.0) for name in asked.resources}


def _explain(group: Any, full: Sequence[Asked]) -> str:
    if not full:
        return ""
    names = [str(one["name"]) for one in of_ray("util").list_named_actors(all_namespaces=True)]
    each = []
    for one in full:
        has = {name: group.bundle_specs[one.bundle][name] for name in one.resources}
        held = Counter(has)
        held.subtract(_free(group, one))
        here = [name.partition(" ")[0] for name in names if _holds(group, one.bundle) in name]
        each.append(
            f"{one.rank} asks for {amount([one.resources])} of bundle {one.bundle} of the "
            f"placement group, which has {amount([has])}, of which "
            f"{', '.join(sorted(here)) or 'another actor or task'} holds {amount([held])}"
        )
    return (
        f"{'; '.join(each)}. To share a bundle, give each group a part of it "
        "(num_gpus_per_actor=0.4, of both); else make a placement group with more bundles and give "
        "each group its own (pg[0], pg[1][n:], pg[2][n:]), or end what holds them (shutdown())"
    )


def _holds(group: Any, bundle: int) -> str:
    return f"in bundle {bundle} of {group.id.hex()}"


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

ACTORS: Final = {"fsdp": FSDPTrainRayActor, "megatron": MegatronTrainRayActor}
"""classes of the ranks, by ``train_backend``"""
OTHERS_SECONDS: Final = 5.0
"""time that the other ranks have to fail after the first"""


class Refs(list[Any]):
    """References to the results of a call, by rank: for ``ray.get``, or to ``await``."""

    def __await__(self) -> Generator[Any, None, list[Any]]:
        # The first error is raised at once, though other ranks still wait.
        return asyncio.gather(*self).__await__()


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
        cls = of_ray().remote(ACTORS[args.train_backend])
        in_bundle = of_ray("util.scheduling_strategies").PlacementGroupSchedulingStrategy
        master: tuple[Any, Any] = (None, None)
        # By these names others see who holds a bundle.
        names = [f"{one.rank} {_holds(group, one.bundle)} {uuid4().hex[:8]}" for one in asked]
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
        ray.get(self._call("meet", [PeerRank(one.rank, name, place) for one, name, place in told]))

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
