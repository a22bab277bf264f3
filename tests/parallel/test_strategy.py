"""Strategies that do not fit are refused with everything that is wrong, and with what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_async.parallel import (
    FSDP2,
    ColumnParallel,
    GlobalTensor,
    GroupedHeads,
    Heads,
    Model,
    ModelMismatch,
    NotHeld,
    Parameter,
    RowParallel,
    Split,
    Strategy,
    StrategyError,
    Vocabulary,
    check_batch,
    even_layers,
    layout,
    plan,
    valid_dp_sizes,
)
from tests.parallel.models import Sizes, model


def one(split: Split, *shapes: tuple[int, ...]) -> Model:
    tensors = tuple(GlobalTensor(f"w{i}", shape) for i, shape in enumerate(shapes))
    return Model((Parameter(name="w", tensors=tensors, split=split),))


@pytest.mark.parametrize(
    ("made", "strategy", "text"),
    [
        (
            one(Heads(8), (64, 4)),
            Strategy(tp=3),
            "tp=3 does not divide 8 heads; nearest that does: 2 or 4 (w)",
        ),
        (
            one(Heads(6), (48, 4)),
            Strategy(tp=4),
            "tp=4 does not divide 6 heads; nearest that does: 3 or 6 (w)",
        ),
        (
            one(Heads(4), (64, 4)),
            Strategy(tp=8),
            "tp=8 does not divide 4 heads; nearest that does: 4 (w)",
        ),
        (
            one(Heads(2, shared=True), (16, 4)),
            Strategy(tp=3),
            "tp=3 cannot share 2 key-value heads; nearest that can: 2 or 4 (w)",
        ),
        (
            one(GroupedHeads(8, 2), (64, 4), (16, 4), (16, 4)),
            Strategy(tp=4),
            "tp=4 does not divide 2 key-value heads; nearest that does: 2 (w)",
        ),
        (
            one(ColumnParallel(), (10, 4)),
            Strategy(tp=4),
            "tp=4 does not divide 10 rows; nearest that does: 2 or 5 (w)",
        ),
        (
            one(RowParallel(), (4, 9)),
            Strategy(tp=2),
            "tp=2 does not divide 9 columns; nearest that does: 1 or 3 (w)",
        ),
        (
            one(Vocabulary(64), (100, 4)),
            Strategy(tp=3),
            "tp=3 does not divide 128 padded vocabulary rows; nearest that does: 2 or 4 (w)",
        ),
        (
            model(Sizes()),
            Strategy(pp=3),
            "pp=3 does not divide 4 layers; nearest: 2 or 4; or stage_layers=[1, 2, 1]",
        ),
        (
            model(Sizes()),
            Strategy(pp=2, stage_layers=(3, 2)),
            "stage_layers=[3, 2] is 5 layers on 2 chunks, not 4 on 2",
        ),
        (
            model(Sizes(experts=4)),
            Strategy(dp=3, ep=3),
            "ep=3 does not divide 4 experts; nearest that does: 2 or 4",
        ),
        (
            model(Sizes(experts=2)),
            Strategy(dp=6, ep=2, sharding=FSDP2(replicas=2)),
            "sharding.replicas=2 does not divide 3 ranks that share an expert; nearest",
        ),
    ],
)
def test_what_does_not_divide_is_named_with_the_nearest_that_does(
    made: Model, strategy: Strategy, text: str
) -> None:
    with pytest.raises(StrategyError) as caught:
        layout(made, strategy)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "tp", "text"),
    [
        (
            {"heads": (Heads(4), (64, 4)), "rows": (ColumnParallel(), (102, 4))},
            4,
            "fits all of it: 2",
        ),
        (
            {"heads": (Heads(4), (64, 4)), "rows": (ColumnParallel(), (100, 4))},
            3,
            "fits all of it: 2 or 4",
        ),
        (
            {"heads": (Heads(6), (48, 4)), "rows": (ColumnParallel(), (36, 4))},
            4,
            "does: 3 or 6 (heads)",
        ),
    ],
)
def test_what_fits_everything_is_named_where_what_fits_one_tensor_does_not(
    tensors: dict[str, tuple[Split, tuple[int, ...]]], tp: int, text: str
) -> None:
    made = Model(
        tuple(
            Parameter(name=name, tensors=(GlobalTensor(name, shape),), split=split)
            for name, (split, shape) in tensors.items()
        )
    )
    with pytest.raises(StrategyError) as caught:
        layout(made, Strategy(tp=tp))
    assert str(caught.value).endswith(text)


def test_every_misfit_is_named_once_however_many_layers_have_it() -> None:
    with pytest.raises(StrategyError) as caught:
        layout(model(Sizes()), Strategy(tp=5, pp=3))
    faults = caught.value.faults
    assert len(faults) == len(set(faults)) > 3
    assert any("pp=3" in fault for fault in faults)
    assert sum("4 heads" in fault for fault in faults) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dp": 0}, "dp=0 must be at least 1"),
        ({"dp": 6, "ep": 4}, "nearest ep: 3 or 6"),
        ({"dp": 6, "sharding": FSDP2(replicas=4)}, "replicas=4 does not divide dp x cp = 6"),
    ],
)
def test_sizes_that_cannot_be_are_refused_when_made(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        Strategy(**fields)


def test_a_batch_that_does_not_divide_is_named_with_the_nearest_dp_sizes() -> None:
    with pytest.raises(StrategyError, match=r"dp=5 x group_size=4 .* 64 samples; .* 4 or 8"):
        check_batch(64, 5, group_size=4)
    check_batch(64, 4, group_size=4)
    assert valid_dp_sizes(64, group_size=4, at_most=12) == [1, 2, 4, 8]
    assert valid_dp_sizes(24, group_size=2, at_most=6) == [1, 2, 3, 4, 6]
    with pytest.raises(StrategyError, match="the groups are not whole"):
        check_batch(10, 2, group_size=4)


@pytest.mark.parametrize(
    ("layers", "chunks", "counts"),
    [(8, 4, (2, 2, 2, 2)), (5, 4, (1, 2, 1, 1)), (6, 4, (1, 2, 2, 1)), (7, 3, (2, 3, 2))],
)
def test_uneven_layers_leave_the_first_and_last_stage_the_fewest(
    layers: int, chunks: int, counts: tuple[int, ...]
) -> None:
    assert even_layers(layers, chunks) == counts


def test_interleaved_chunks_go_round_the_stages() -> None:
    assert Strategy(pp=2, virtual_stages=2).stage_of_layers(8) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert Strategy(pp=3, stage_layers=(1, 3, 0)).stage_of_layers(4) == [0, 1, 1, 1]


def test_ranks_stand_as_megatron_orders_them() -> None:
    strategy = Strategy(tp=2, cp=2, dp=2, pp=2, ep=2, expert_tp=1)
    assert list(strategy.dense_ranks(0, 1)) == [1, 3, 5, 7]
    assert list(strategy.dense_ranks(1, 0)) == [8, 10, 12, 14]
    assert list(strategy.expert_ranks(0, 0, 1)) == [1, 3, 5, 7]
    assert strategy.expert_data_ranks == 4


def test_the_number_of_ranks_must_be_that_of_the_strategy() -> None:
    with pytest.raises(StrategyError, match="takes 4 ranks, 3 were given"):
        layout(Model.of({"w": (4,)}), Strategy(dp=4), [0, 1, 2])
    with pytest.raises(StrategyError, match="given twice"):
        layout(Model.of({"w": (4,)}), Strategy(dp=2), [1, 1])


def test_layouts_of_other_models_are_refused_with_the_nearest_names() -> None:
    old = layout(Model.of({"model.norm.weight": (4,), "b": (3,)}), Strategy())
    with pytest.raises(
        ModelMismatch, match=r"'norm.weight' is not in the old .*'model.norm.weight'"
    ):
        plan(old, layout(Model.of({"norm.weight": (4,)}), Strategy()))
    with pytest.raises(ModelMismatch, match=r"'b' is float32 \[3\] in the old .* float32 \[4\]"):
        plan(old, layout(Model.of({"b": (4,)}), Strategy()))


def test_elements_that_no_rank_holds_are_named() -> None:
    made = Model.of({"w": (8, 2)})
    whole = layout(made, Strategy(dp=2, sharding=FSDP2()))
    half = layout(made, Strategy(dp=2, sharding=FSDP2()))
    kept = half.piece_rank == 0
    lost = type(half)(
        half.tensors,
        half.ranks,
        half.buffers,
        half.piece_buffer[kept],
        half.piece_offset[kept],
        half.boxes.take(kept.nonzero()[0]),
    )
    with pytest.raises(NotHeld, match=r"'w' \[8, 2\] for rank 1, of whose 8 elements 0 are there"):
        plan(lost, whole)


def test_a_live_model_with_other_tensors_is_refused_with_every_difference() -> None:
    made = Model.of({"embed.weight": (4, 2), "norm.weight": (2,)})
    made.check_shapes({"embed.weight": (4, 2), "norm.weight": (2,)})
    with pytest.raises(ModelMismatch) as caught:
        made.check_shapes({"embed.wieght": (4, 2), "norm.weight": (3,)})
    assert "unknown 'embed.wieght'; nearest: 'embed.weight'" in str(caught.value)
    assert "missing 'embed.weight'" in str(caught.value)
    assert "'norm.weight' is [3], expected [2]" in str(caught.value)
