"""Every public method of `MegatronModelManager` in every state, and on the wrong kind of model: it
does its work, or says what is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rlinf_async.backends.base import IdleRank, OffloadedError
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.megatron.rescaling import BUCKET, LIMIT, config, step
from tests.backends.megatron.walks import trainer_of

pytest.importorskip("megatron.core")

WORKS: Final = None
Outcome = type[Exception] | None
IDS = torch.arange(8).view(2, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)


def forward(manager: Any, model: Any = None, **options: Any) -> Any:
    batch = {"input_ids": IDS, "attention_mask": MASK, "position_ids": IDS % 4}
    asked = batch | {"sequence_parallel": False} | options
    return manager.custom_forward(model or manager.chunks[0], **asked)


CALLS: dict[str, tuple[Callable[[Any], object], Outcome, Outcome]] = {
    "active_part": (lambda m: m.active_part(), WORKS, IdleRank),
    "check_onloaded": (lambda m: m.check_onloaded("it"), OffloadedError, WORKS),
    "custom_forward": (forward, OffloadedError, IdleRank),
    "from_last_stage": (lambda m: m.from_last_stage(1, int), WORKS, IdleRank),
    "gather_parameters": (lambda m: m.gather_parameters(), WORKS, WORKS),
    "language_model": (lambda m: m.language_model(), WORKS, WORKS),
    "live_weights": (lambda m: m.live_weights(), WORKS, WORKS),
    "load_megatron_copy_params": (
        lambda m: m.load_megatron_copy_params([m.optimizer]),
        WORKS,
        IdleRank,
    ),
    "load_optimizer": (lambda m: m.load_optimizer(), WORKS, WORKS),
    "load_weights": (lambda m: m.load_weights(), WORKS, WORKS),
    "make_data_iterator_list": (lambda m: m.make_data_iterator_list(iter(())), WORKS, WORKS),
    "model_provider_func": (lambda m: m.model_provider_func(True, True), WORKS, IdleRank),
    "offload_megatron_copy_params": (
        lambda m: m.offload_megatron_copy_params([m.optimizer]),
        WORKS,
        IdleRank,
    ),
    "offload_optimizer": (lambda m: m.offload_optimizer(), WORKS, WORKS),
    "offload_weights": (lambda m: m.offload_weights(), WORKS, WORKS),
    "optimizer_step": (lambda m: m.optimizer_step(1.0), OffloadedError, IdleRank),
    "settle_checkpoint": (lambda m: m.settle_checkpoint(), WORKS, WORKS),
    "sum_over_data": (lambda m: m.sum_over_data(torch.zeros(1)), WORKS, IdleRank),
    "wait_for_all": (lambda m: m.wait_for_all(), WORKS, WORKS),
    "whole_weights": (lambda m: m.whole_weights(torch.float32), WORKS, WORKS),
    "zero_grad": (lambda m: m.zero_grad(), WORKS, IdleRank),
}
"""by name: a call, and what it raises while offloaded, and on an idle rank"""
OF_A_CHANGE: Final = {"awake", "build", "setup_model_and_optimizer", "take"}
"""of the manager itself and of a change of strategy: not for callers"""


def outcomes(rank: int, world_size: int, folder: Path) -> None:
    """What each method does while rank 0 is offloaded, and rank 1 idle."""
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(config("tied", sequence_parallel=False), world_size, rank)
    step(trainer, 0)
    trainer.rescale(Strategy(), timeout=LIMIT, bucket_bytes=BUCKET)
    manager, found = trainer.manager, {}
    for name, (call, *_) in CALLS.items():
        if rank == 0:
            manager.offload_weights()
            manager.offload_optimizer()
        try:
            call(manager)
        except Exception as error:
            found[name] = type(error).__name__
    save_result(folder, rank, found)


def test_a_method_works_or_says_what_is_missing(tmp_path: Path) -> None:
    found = in_processes(outcomes, 2, tmp_path)
    for column, result in enumerate(found):
        expected = {name: row[1 + column] for name, row in CALLS.items()}
        assert result == {name: one.__name__ for name, one in expected.items() if one is not None}


def test_every_public_method_is_in_the_table() -> None:
    from rlinf_async.backends.megatron.manager import MegatronModelManager

    found = inspect.getmembers(MegatronModelManager, inspect.isfunction)
    public = {name for name, _ in found if not name.startswith("_")}
    assert public == CALLS.keys() | OF_A_CHANGE


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def wrong_kinds(rank: int, world_size: int, folder: Path) -> None:
    """What is said to each wrong use of `custom_forward`."""
    fields = {"tp": 1, "sequence_parallel": False}
    actor = trainer_of("tied, distributed optimizer", world_size, rank, **fields).manager
    critic = trainer_of("critic, distributed optimizer", world_size, rank, **fields).manager
    assert forward(actor).shape == (2, 4, 61)
    assert forward(critic, value_model=True).shape == (2, 4)
    found = {
        "values of an actor": said(lambda: forward(actor, value_model=True)),
        "logits of a critic": said(lambda: forward(critic)),
        "a critic's model": said(lambda: forward(actor, critic.models[0])),
        "another model": said(lambda: forward(actor, torch.nn.Linear(1, 1))),
        "logits processor": said(lambda: forward(critic, value_model=True, logits_processor=dict)),
        "temperature": said(lambda: forward(critic, value_model=True, temperature=2.0)),
        "temperature 0": said(lambda: forward(actor, temperature=0.0)),
        "shapes": said(lambda: forward(actor, attention_mask=MASK[:, :3])),
    }
    save_result(folder, rank, found)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    [found] = in_processes(wrong_kinds, 1, tmp_path)
    for name, text in {
        "values of an actor": "value_model is True, but the model was built as a policy",
        "logits of a critic": "value_model is False, but the model was built as a critic",
        "a critic's model": "value_model is False, but the model was built as a critic",
        "another model": "takes a model chunk of a MegatronModelManager, not a Linear",
        "logits processor": "a critic has no logits",
        "temperature": "temperature is 2.0, but values have none",
        "temperature 0": "temperature is 0.0; it must be more than 0",
        "shapes": "one shape [B, S]; they are [2, 4], [2, 3], [2, 4]",
    }.items():
        assert text in found[name], name
