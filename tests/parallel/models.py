"""Random models and strategies, and what the tests ask of a plan."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rlinf_async.parallel import (
    FSDP1,
    FSDP2,
    ColumnParallel,
    DistributedOptimizer,
    GlobalTensor,
    GroupedHeads,
    Heads,
    Joined,
    Layout,
    Model,
    Parameter,
    Plan,
    Replicated,
    RowParallel,
    Sharding,
    Split,
    Stacked,
    Strategy,
    StrategyError,
    Vocabulary,
    check,
)
from tests.parallel.arrays import Array

LAYERS = 4


def tensor(name: str, *shape: int, dtype: str = "float32") -> GlobalTensor:
    return GlobalTensor(name, shape, dtype)


class Sizes(NamedTuple):
    """What a random model is made of."""

    size: int = 8
    vocabulary: int = 13
    odd: tuple[int, ...] = (3, 5)
    kv_heads: int = 2
    grouped: bool = False
    """fused heads lie group by group"""
    tied: bool = False
    experts: int = 0


sizes = st.builds(
    Sizes,
    size=st.sampled_from([4, 8]),
    vocabulary=st.integers(5, 40),
    odd=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    kv_heads=st.sampled_from([1, 2, 4]),
    grouped=st.booleans(),
    tied=st.booleans(),
    experts=st.sampled_from([0, 2, 4]),
)


def examples(count: int) -> settings:
    """Settings of a property; ``EXAMPLES=20`` in the environment tries 20 times as many."""
    return settings(
        max_examples=count * int(os.environ.get("EXAMPLES", "1")),
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )


@st.composite
def models(draw: st.DrawFn, fused: bool | None = None) -> Model:
    """A model of 4 layers that tp = 1, 2, 4 and ep = 1, 2 divide; tiny and odd tensors too."""
    return model(draw(sizes), draw(st.booleans()) if fused is None else fused)


def model(one: Sizes, fused: bool = False) -> Model:
    size, vocabulary, odd, kv_heads, grouped, tied, experts = one
    embedding = tensor("embedding", vocabulary, size)
    head = embedding if tied else tensor("head", vocabulary, size)
    padded = Vocabulary(4, per_rank=not fused)
    held = [Parameter(name="embedding", tensors=(embedding,), split=padded, stage="first")]
    for layer in range(LAYERS):
        held += attention(layer, size, kv_heads, fused, grouped)
        held += mlp(layer, size, experts, fused)
        norm = tensor(f"{layer}.norm", size)
        held.append(Parameter(name=f"{layer}.norm", tensors=(norm,), layer=layer))
    if odd:
        held.append(Parameter(name="odd", tensors=(tensor("odd", *odd),), stage="every"))
    held.append(Parameter(name="count", tensors=(tensor("count"),), stage="last", sharded=False))
    held.append(
        Parameter(
            name="head",
            tensors=(head,),
            split=padded,
            stage="last",
            tied_to="embedding" if tied else None,
        )
    )
    return Model(tuple(held), LAYERS)


def attention(layer: int, size: int, kv_heads: int, fused: bool, grouped: bool) -> list[Parameter]:
    shapes = {"q": 4 * size // 2, "k": kv_heads * size // 2, "v": kv_heads * size // 2}
    parts = [tensor(f"{layer}.{name}", rows, size) for name, rows in shapes.items()]
    splits = (Heads(4), *(Heads(kv_heads, shared=True),) * 2)
    out = Parameter(
        name=f"{layer}.o",
        tensors=(tensor(f"{layer}.o", size, 4 * size // 2),),
        split=RowParallel(),
        layer=layer,
    )
    if fused:
        joined: Split = GroupedHeads(4, kv_heads) if grouped else Joined(splits)
        return [
            Parameter(name=f"{layer}.qkv", tensors=tuple(parts), split=joined, layer=layer),
            out,
        ]
    each = zip(parts, splits, strict=True)
    return [
        *(Parameter(name=p.name, tensors=(p,), split=split, layer=layer) for p, split in each),
        out,
    ]


def mlp(layer: int, size: int, experts: int, fused: bool) -> list[Parameter]:
    if not experts:
        return feed_forward(f"{layer}.mlp", layer, size, fused, None)
    if not fused:
        return [
            one
            for expert in range(experts)
            for one in feed_forward(f"{layer}.{expert}", layer, size, False, (expert, experts))
        ]
    every = [feed_forward(f"{layer}.{e}", layer, size, True, (e, experts)) for e in range(experts)]
    return [
        Parameter(
            name=f"{layer}.experts.{kind}",
            tensors=tuple(t for one in every for t in one[place].tensors),
            split=Stacked(every[0][place].split, experts),
            layer=layer,
        )
        for place, kind in enumerate(("up", "down"))
    ]


def feed_forward(
    name: str, layer: int, size: int, fused: bool, expert: tuple[int, int] | None
) -> list[Parameter]:
    gate, up = tensor(f"{name}.gate", 12, size), tensor(f"{name}.up", 12, size)
    down = Parameter(
        name=f"{name}.down",
        tensors=(tensor(f"{name}.down", size, 12),),
        split=RowParallel(),
        layer=layer,
        expert=expert,
    )
    if fused:
        split = Joined((ColumnParallel(), ColumnParallel()))
        both = (gate, up)
        return [
            Parameter(
                name=f"{name}.gate_up", tensors=both, split=split, layer=layer, expert=expert
            ),
            down,
        ]
    column = ColumnParallel()
    return [
        *(
            Parameter(name=one.name, tensors=(one,), split=column, layer=layer, expert=expert)
            for one in (gate, up)
        ),
        down,
    ]


shardings: st.SearchStrategy[Sharding] = st.one_of(
    st.just(Replicated()),
    st.builds(FSDP2, replicas=st.sampled_from([1, 1, 2])),
    st.builds(
        FSDP1,
        units=st.sampled_from([("",), ("0", "1", "2", "3", "")]),
        use_orig_params=st.booleans(),
        replicas=st.sampled_from([1, 2]),
    ),
    st.builds(
        DistributedOptimizer,
        bucket_elements=st.sampled_from([None, 100, 700]),
        replicas=st.sampled_from([1, 2]),
    ),
)


@st.composite
def strategies(draw: st.DrawFn, most: int = 12) -> Strategy:
    """A strategy of at most `most` ranks."""
    tp = draw(st.sampled_from([1, 1, 2, 4]))
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    dp = draw(st.integers(1, max(1, min(7, most // (tp * pp)))))
    cp = draw(st.sampled_from([1, 1, 2])) if tp * pp * dp * 2 <= most else 1
    layers = None
    if pp == 3:
        layers = draw(st.sampled_from([(1, 2, 1), (0, 4, 0), (2, 1, 1)]))
    virtual = 2 if pp == 2 and draw(st.booleans()) else 1
    try:
        return Strategy(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=draw(st.sampled_from([1, 2])),
            expert_tp=draw(st.sampled_from([None, 1])),
            sharding=draw(shardings),
            stage_layers=layers,
            virtual_stages=virtual,
        )
    except StrategyError:
        return Strategy(dp=dp, tp=tp, pp=pp, cp=cp, stage_layers=layers, virtual_stages=virtual)


def fitting(one: Model, strategy: Strategy) -> bool:
    return not check(one, strategy)


def values(one: Model) -> dict[str, Array]:
    """Whole tensors in which every element of the model has another value, none of them 0."""
    count = itertools.count(1)
    return {
        name: np.array([next(count) for _ in range(each.elements)]).reshape(each.shape)
        for name, each in one.tensors().items()
    }


def least_possible_maximum(plan: Plan) -> float:
    """The least that the busiest sender can have to send, elements being divisible at will.

    Hall's condition over every set of ranks S: what only ranks of S hold must be sent by them.
    """
    demand = demands(plan)
    ranks = sorted(plan.old.ranks)
    bound = 0.0
    for count in range(1, len(ranks) + 1):
        for chosen in itertools.combinations(ranks, count):
            inside = sum(need for holders, need in demand.items() if holders <= set(chosen))
            bound = max(bound, inside / count)
    return bound


def demands(plan: Plan) -> dict[frozenset[int], int]:
    """Bytes that ranks need and do not have, by who has them; worked out element by element."""
    holders = holding(plan.old)
    found: dict[frozenset[int], int] = {}
    for each in plan.new.tensors:
        for rank, buffer in ((r, b) for r in plan.new.ranks for b in plan.new.of_rank(r)):
            for piece in buffer.pieces:
                if piece.tensor != each.name:
                    continue
                for element in elements(piece.start, piece.size):
                    who = holders[each.name, element]
                    if rank not in who:
                        found[who] = found.get(who, 0) + each.item_bytes
    return found


def holding(layout: Layout) -> dict[tuple[str, tuple[int, ...]], frozenset[int]]:
    """Which ranks hold each element of each tensor."""
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank in layout.ranks:
        for buffer in layout.of_rank(rank):
            for piece in buffer.pieces:
                for element in elements(piece.start, piece.size):
                    found.setdefault((piece.tensor, element), set()).add(rank)
    return {key: frozenset(ranks) for key, ranks in found.items()}


def elements(start: tuple[int, ...], size: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of a box."""
    return list(itertools.product(*(range(a, a + n) for a, n in zip(start, size, strict=True))))
