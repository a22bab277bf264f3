"""States of small clusters, and a model of a run that carries decisions out."""

from __future__ import annotations

from typing import Any

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ActorState,
    ClusterState,
    InstanceState,
    Rates,
    RequestState,
    ScalingDecision,
    actor_after,
    check,
    holdings_after,
    instance_name,
)

RATES = Rates(
    decode_seconds=0.01,
    sequence_seconds=0.0001,
    train_seconds=1e-5,
    mini_batch_seconds=1.0,
    rescale_seconds=2.0,
    move_seconds=2.0,
)


def cluster(
    rollout: int = 6, actor: int = 2, *, guests: bool = True, **changes: Any
) -> ClusterState:
    """``rollout`` instances on their own devices, ``actor`` ranks at home; the actor has a rank on
    every device, and ``guests`` instances on its own."""
    devices = rollout + actor
    instances = [
        InstanceState(number=n, home=(actor + n,), devices=(actor + n,), slots=16, sizes=(1, 2))
        for n in range(rollout)
    ]
    if guests:
        instances += [
            InstanceState(number=rollout + n, home=(n,), devices=(), slots=16, sizes=(1, 2))
            for n in range(actor)
        ]
    sizes = [dp for dp in range(1, devices + 1) if 64 % dp == 0]
    state = ClusterState(
        time=0.0,
        iteration=0,
        phase="begin",
        samples=128,
        finished=0,
        tokens=1000.0,
        hosts={n: n // 4 for n in range(devices)},
        instances=tuple(instances),
        actor=ActorState(
            devices=tuple(range(devices)),
            strategy=Strategy(dp=actor),
            home=Strategy(dp=actor),
            strategies=tuple(Strategy(dp=dp) for dp in sizes),
            mini_batches=4,
            ready=True,
        ),
        rates=RATES,
    )
    return msgspec.structs.replace(state, **changes)


def with_load(state: ClusterState, unfinished: int, **changes: Any) -> ClusterState:
    """In the middle of a step, with so many requests spread over the serving instances."""
    serving = [one.number for one in state.serving]
    each = {
        number: unfinished // len(serving) + (at < unfinished % len(serving))
        for at, number in enumerate(serving)
    }
    instances = tuple(
        msgspec.structs.replace(
            one,
            running=each.get(one.number, 0),
            expected=500.0 * each.get(one.number, 0),
            requests=tuple(
                RequestState(name=f"{one.number}/{n}", made=100, expected=500.0)
                for n in range(each.get(one.number, 0))
            ),
        )
        for one in state.instances
    )
    values = {"phase": "step", "finished": state.samples - unfinished, **changes}
    return msgspec.structs.replace(state, instances=instances, **values)


def carried_out(decision: ScalingDecision, state: ClusterState) -> ClusterState:
    """The state after a decision, its requests spread over those that serve. Raises
    `InvalidDecision`."""
    check(decision, state)
    holdings = holdings_after(decision, state)
    changed = msgspec.structs.replace(
        state,
        actor=actor_after(decision, state.actor),
        instances=tuple(
            msgspec.structs.replace(one, devices=holdings[instance_name(one.number)])
            for one in state.instances
        ),
    )
    loads = sum(one.load for one in state.instances)
    return with_load(changed, loads, phase=state.phase, finished=state.finished)
