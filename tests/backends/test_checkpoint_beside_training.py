"""Training goes on while a checkpoint is written: one of the moment at which it was asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_async.backends.checkpoint import folders
from rlinf_async.backends.checkpoint import writing as snapshot
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from tests.backends.fsdp_helpers import POLICY, set_up, train_steps

CONFIG = FSDPConfig(policy=POLICY)


class Gate:
    """Holds every call of a function until it is opened."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self._open.wait(60)
        return self._wrapped(*args, **kwargs)

    def open(self) -> None:
        self._open.set()


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[Gate]:
    gate = Gate(getattr(owner, name))
    monkeypatch.setattr(owner, name, gate)
    try:
        yield gate
    finally:
        gate.open()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[FSDPModelManager]:
    """Trained for three steps; every tensor is copied beside the training, however small."""
    monkeypatch.setattr(snapshot, "SMALL_BYTES", -1)
    made = set_up(CONFIG)
    train_steps(made, range(3))
    yield made
    made.checkpoints.wait()


def test_steps_are_taken_while_the_disk_is_written(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = set_up(CONFIG)
    expected = train_steps(whole, range(8))
    with held(monkeypatch, os, "fsync") as disk:
        flight = manager.begin_checkpoint(tmp_path / "checkpoint")
        after = train_steps(manager, range(3, 6))
        assert disk.reached.wait(60)
        assert not flight.done()
        assert not (tmp_path / "checkpoint").exists()
    assert flight.result(60) == tmp_path / "checkpoint"
    assert after == expected[3:6]
    resumed = set_up(CONFIG)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.steps == 3
    assert train_steps(resumed, range(3, 8)) == expected[3:]


def test_an_optimizer_step_waits_for_the_copy_and_for_no_more(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: one.clone() for name, one in manager.get_model_state_dict().items()}
    copy = snapshot.Snapshot._copy
    reached, opened = threading.Event(), threading.Event()

    def copying(one: snapshot.Snapshot) -> None:
        reached.set()
        assert opened.wait(60)
        copy(one)

    monkeypatch.setattr(snapshot.Snapshot, "_copy", copying)
    flight = manager.begin_checkpoint(tmp_path / "checkpoint")
    assert reached.wait(60)
    stepping = threading.Thread(target=train_steps, args=(manager, range(3, 4)))
    stepping.start()
    assert manager.steps == 3
    opened.set()
    stepping.join(60)
    assert manager.steps == 4
    flight.result(60)
    resumed = set_up(CONFIG)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.steps == 3
    for name, one in resumed.get_model_state_dict().items():
        assert torch.equal(one, before[name]), name


def test_a_parameter_that_is_changed_under_the_copy_fails_the_checkpoint_and_is_named(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = snapshot.Snapshot._copy

    def changing(one: snapshot.Snapshot) -> None:
        with torch.no_grad():
            next(manager.model.parameters()).add_(1.0)
        copy(one)

    monkeypatch.setattr(snapshot.Snapshot, "_copy", changing)
    flight = manager.begin_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"'model\..*' .*changed while the checkpoint"):
        flight.result(60)
    with pytest.raises(CheckpointError):
        manager.checkpoints.wait()
    assert not (tmp_path / "checkpoint").exists()


def test_the_next_checkpoint_waits_for_the_one_in_flight(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second: list[Future[Path]] = []
    with held(monkeypatch, os, "rename") as disk:
        first = manager.begin_checkpoint(tmp_path / "first")
        assert disk.reached.wait(60)
        asking = threading.Thread(
            target=lambda: second.append(manager.begin_checkpoint(tmp_path / "second"))
        )
        asking.start()
        assert not first.done()
        assert not folders.staging_folder(tmp_path / "second").exists()
    asking.join(60)
    assert first.done()
    assert second[0].result(60) == tmp_path / "second"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["first", "second"]


def test_the_next_checkpoint_raises_the_error_of_the_one_before(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        flight = manager.begin_checkpoint(tmp_path / "first")
        assert isinstance(flight.exception(60), OSError)
    with pytest.raises(OSError, match=r"No space left on device.*rank_0_of_1\.safetensors"):
        manager.begin_checkpoint(tmp_path / "second")
    manager.save_checkpoint(tmp_path / "second")
    assert (tmp_path / "second" / "metadata.json").is_file()


def test_where_no_thread_can_be_started_training_goes_on_and_the_next_checkpoint_is_written(
    manager: FSDPModelManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            manager.begin_checkpoint(tmp_path / "first")
    train_steps(manager, range(3, 4))
    manager.save_checkpoint(tmp_path / "second")
    assert (tmp_path / "second" / "metadata.json").is_file()


def test_the_memory_of_a_checkpoint_is_used_for_the_next(
    manager: FSDPModelManager, tmp_path: Path
) -> None:
    places = []
    for name in ("first", "second"):
        manager.begin_checkpoint(tmp_path / name).result(60)
        places.append(manager.checkpoints._memory._bytes.data_ptr())
    assert places[0] == places[1]


def test_a_process_ends_only_when_its_checkpoint_is_written(tmp_path: Path) -> None:
    # The thread is no daemon: leaving without waiting for the future loses nothing.
    manager = set_up(CONFIG)
    flight = manager.begin_checkpoint(tmp_path / "checkpoint")
    writing = [one for one in threading.enumerate() if one.name == "checkpoint writer"]
    assert all(not one.daemon for one in writing)
    flight.result(60)
    assert os.listdir(tmp_path) == ["checkpoint"]
