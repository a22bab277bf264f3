"""Every public method of `FSDPModelManager` in every state: it does its work, or says what is
missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rlinf_async.backends.base import FirstWeights, IdleRank, NotSetUp, OffloadedError
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.workers.actor import EmbodiedFSDPActor, FSDPActor, MegatronActor
from rlinf_async.workers.inference import InferenceWorker
from tests.backends.fsdp_helpers import POLICY, set_up, train_steps

CONFIG = FSDPConfig(policy=POLICY)
WORKS: Final = None
Outcome = type[Exception] | None


def loss() -> torch.Tensor:
    return torch.ones(1, requires_grad=True).sum()


CALLS: dict[str, tuple[Callable[[Any, Path], object], Outcome, Outcome, Outcome]] = {
    "model_provider_func": (lambda m, _: m.model_provider_func(), WORKS, WORKS, WORKS),
    "build_grad_scaler": (lambda m, _: m.build_grad_scaler(False), WORKS, WORKS, WORKS),
    "build_optimizer": (lambda m, _: m.build_optimizer(m.model), NotSetUp, WORKS, WORKS),
    "build_lr_scheduler": (lambda m, _: m.build_lr_scheduler(m.optimizer), NotSetUp, WORKS, WORKS),
    "restart_optimizer": (lambda m, _: m.restart_optimizer(), NotSetUp, WORKS, WORKS),
    "take": (lambda m, _: m.take(m.model, m.optimizer, m.lr_scheduler), NotSetUp, WORKS, WORKS),
    "check_active": (lambda m, _: m.check_active("it"), NotSetUp, WORKS, IdleRank),
    "check_loaded": (lambda m, _: m.check_loaded("it"), NotSetUp, OffloadedError, IdleRank),
    "autocast": (lambda m, _: m.autocast(), WORKS, WORKS, WORKS),
    "before_micro_batch": (
        lambda m, _: m.before_micro_batch(m.model, is_last_micro_batch=True),
        NotSetUp,
        WORKS,
        WORKS,
    ),
    "backward": (lambda m, _: m.backward(loss()), NotSetUp, OffloadedError, IdleRank),
    "zero_grad": (lambda m, _: m.zero_grad(), NotSetUp, WORKS, WORKS),
    "optimizer_step": (lambda m, _: m.optimizer_step(), NotSetUp, OffloadedError, IdleRank),
    "resume_at": (lambda m, _: m.resume_at(m.counters), NotSetUp, WORKS, WORKS),
    "get_model_state_dict": (lambda m, _: m.get_model_state_dict(), NotSetUp, WORKS, WORKS),
    "live_weights": (lambda m, _: m.live_weights(), NotSetUp, WORKS, WORKS),
    "offload_param_and_grad": (lambda m, _: m.offload_param_and_grad(), NotSetUp, WORKS, WORKS),
    "load_param_and_grad": (lambda m, _: m.load_param_and_grad(), WORKS, WORKS, WORKS),
    "offload_optimizer": (lambda m, _: m.offload_optimizer(), NotSetUp, WORKS, WORKS),
    "load_optimizer": (lambda m, _: m.load_optimizer(), WORKS, WORKS, WORKS),
    "save_checkpoint": (lambda m, to: m.save_checkpoint(to / "new"), NotSetUp, WORKS, WORKS),
    "begin_checkpoint": (
        lambda m, to: m.begin_checkpoint(to / "new").result(60),
        NotSetUp,
        WORKS,
        WORKS,
    ),
    "settle_checkpoint": (lambda m, _: m.settle_checkpoint(), WORKS, WORKS, WORKS),
    "load_checkpoint": (
        lambda m, to: m.load_checkpoint(to / "nowhere"),
        NotSetUp,
        CheckpointError,
        IdleRank,
    ),
    "take_weights": (
        lambda m, to: m.take_weights(FirstWeights(folder=str(to / "nowhere"), tensors={})),
        NotSetUp,
        CheckpointError,
        IdleRank,
    ),
    "setup_model_and_optimizer": (lambda m, _: m.setup_model_and_optimizer(), WORKS, WORKS, WORKS),
}
"""by name: a call, and what it raises before setup, while offloaded, and on an idle rank"""


def before_setup() -> FSDPModelManager:
    return FSDPModelManager(CONFIG, 1, 0)


def offloaded() -> FSDPModelManager:
    manager = set_up(CONFIG)
    train_steps(manager, range(1))
    manager.offload_param_and_grad()
    manager.offload_optimizer()
    return manager


def idle() -> FSDPModelManager:
    manager = set_up(CONFIG)
    manager.rank = 1
    return manager


STATES = (before_setup, offloaded, idle)


def test_every_public_method_is_in_the_table() -> None:
    found = inspect.getmembers(FSDPModelManager, inspect.isfunction)
    assert {name for name, _ in found if not name.startswith("_")} == CALLS.keys()


@pytest.mark.parametrize("state", range(len(STATES)), ids=[one.__name__ for one in STATES])
@pytest.mark.parametrize("name", CALLS)
def test_a_method_works_or_says_what_is_missing(name: str, state: int, tmp_path: Path) -> None:
    call, *outcomes = CALLS[name]
    manager, expected = STATES[state](), outcomes[state]
    if expected is None:
        call(manager, tmp_path)
        return
    with pytest.raises(expected) as caught:
        call(manager, tmp_path)
    if expected is NotSetUp:
        assert "call setup_model_and_optimizer() first" in str(caught.value)


@pytest.mark.parametrize("kind", [FSDPActor, MegatronActor, EmbodiedFSDPActor, InferenceWorker])
def test_a_worker_without_a_trainer_says_so(kind: type) -> None:
    worker: Any = object.__new__(kind)
    with pytest.raises(NotSetUp, match=rf"{kind.__name__} has no trainer yet: call setup\(\)"):
        _ = worker._trainer
