"""`WorldModelTrainer`: one rank that learns a world model from recorded episodes.

::

    windows of all ranks, drawn by (seed, step) --share of this rank--> predictions --> one step

Every rank has read all episodes and draws the same windows, of which it takes a share: neither the
number of ranks nor a resume changes what is learnt in a step. All ranks measure the same held-out
episodes, since each holds a part of the weights alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rlinf_async.backends.building import building
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.state import reshard, unwrapped
from rlinf_async.backends.policies.base import to_tensors
from rlinf_async.backends.world_model.config import (
    FIRST,
    METADATA,
    STARTS,
    WorldModelTrainerConfig,
)
from rlinf_async.backends.world_model.model import Dreamt, WorldModel
from rlinf_async.backends.world_model.recorded import Window, load_recorded
from rlinf_async.messages.spaces import STATE, ObservationArray, numbers_of

MEASURED: Final = 64
"""held-out episodes that are predicted at once"""


class WorldModelTrainer:
    """One rank. torch.distributed must be up when ``world_size`` is above 1; all methods are
    collective.

    Raises `DataError` for episodes that cannot be learnt from.
    """

    def __init__(self, config: WorldModelTrainerConfig, world_size: int, rank: int) -> None:
        self.config = config
        info = config.info
        self._learnt, self._held_out = load_recorded(config.folders, info, config.held_out)
        self.manager = FSDPModelManager(config.fsdp, world_size, rank, self._made)
        with building(config.seed):
            self.manager.setup_model_and_optimizer()
        self.version = 0
        """number of iterations that were trained"""
        self.steps = 0
        """number of optimizer steps"""

    def _made(self) -> WorldModel:
        model, learnt = WorldModel(self.config.info), self._learnt
        seen = learnt.observation
        numbers = numbers_of(seen)
        images = [one.name for one in self.config.info.observation.of_kind("image")]
        model.take_statistics(
            None if numbers is None else torch.from_numpy(np.ascontiguousarray(numbers)),
            torch.from_numpy(learnt.reward),
            {name: torch.from_numpy(np.ascontiguousarray(seen[name])) for name in images},
        )
        return model

    @property
    def _model(self) -> WorldModel:
        model = unwrapped(self.manager.model)
        assert isinstance(model, WorldModel)
        return model

    # ---- training

    def train(self, steps: int) -> Mapping[str, float]:
        """Take optimizer steps; count an iteration; return the means of losses and norms."""
        rows = [self._step() for _ in range(steps)]
        self.version += 1
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def _step(self) -> dict[str, float]:
        manager, size = self.manager, self.config.batch_size
        generator = np.random.default_rng((self.config.seed, self.steps))
        episode, start = self._learnt.draw(generator, size)
        horizon = self.config.info.sizes.horizon
        shown = np.array([0, generator.integers(1, horizon + 1)])
        mine = np.array_split(np.arange(size), manager.world_size)[manager.rank]
        window = self._learnt.windows(episode[mine], start[mine], horizon, shown)
        counts = self._counts(episode, start, horizon, shown)
        with (
            manager.autocast(),
            manager.before_micro_batch(manager.model, is_last_micro_batch=True),
        ):
            dreamt = self._predict(window, shown)
            losses = self._losses(dreamt, window, counts)
            loss = torch.stack([*losses.values()]).sum()
            # Gradients are averaged over the ranks: each has its share of the batch's mean.
            manager.backward(loss * manager.world_size)
        norm, rates = manager.optimizer_step()
        self.steps += 1
        total = torch.stack([loss, *losses.values()]).detach()
        collectives.all_reduce(manager, total)
        found = dict(zip(("loss", *losses), total.tolist(), strict=True))
        return {**found, "grad_norm": norm, "lr": rates[0]}

    def _counts(self, episode: Any, start: Any, horizon: int, shown: Any) -> tuple[int, int]:
        """Steps of the windows of all ranks that are there; and observations of those shown."""
        left = self._learnt.lengths[episode] - start
        steps = int(np.minimum(left, horizon).sum())
        return steps, max(1, int((shown[None, :] <= left[:, None]).sum()))

    def _predict(self, window: Window, shown: Any) -> Dreamt:
        device = self.manager.device
        first = to_tensors(window.first, device)
        action = torch.from_numpy(window.action).to(device)
        dreamt: Dreamt = self.manager.model(first, action, torch.from_numpy(shown).to(device))
        return dreamt

    def _losses(self, dreamt: Dreamt, window: Window, counts: tuple[int, int]) -> dict[str, Tensor]:
        """This rank's part of the mean losses, each in units of the variance of what it is of."""
        device, model = self.manager.device, self._model
        there = torch.from_numpy(window.there).to(device)
        steps, observations = counts
        reward = torch.from_numpy(window.reward).to(device)
        reward = (reward - model.reward_mean) * model.reward_scale
        ended = torch.from_numpy(window.terminated).to(device)
        wrong = F.binary_cross_entropy_with_logits(dreamt.ended.float(), ended, reduction="none")
        squared = (dreamt.reward.float() - reward).square()
        losses = {
            "reward_loss": torch.where(there, squared, 0.0).sum() / steps,
            "end_loss": torch.where(there, wrong, 0.0).sum() / steps,
        }
        seen = torch.from_numpy(window.seen).to(device)
        parts = _parts(window.shown, device)
        if dreamt.state is not None:
            wanted = (parts[STATE].view(dreamt.state.shape) - model.state_mean) * model.state_scale
            errors = (dreamt.state.float() - wanted).square().mean(-1)
            losses["state_loss"] = torch.where(seen, errors, 0.0).sum() / observations
        for name, drawn in dreamt.images.items():
            pixels = parts[name].view(drawn.shape).float() / 255.0
            errors = (drawn.float() - pixels).square().flatten(2).mean(-1)
            share = torch.where(seen, errors, 0.0).sum() / observations
            losses[f"{name}_loss"] = share / model.unexplained(name)
        return losses

    # ---- model and reality

    @torch.no_grad()
    def measure(self) -> Mapping[str, float]:
        """Predict held-out episodes from their first observation and their actions alone, as far as
        the model looks ahead; return how far that is from what happened.

        ``..._1`` after one step, ``..._K`` after the horizon's steps (or the last one of an episode
        that is shorter); ``still_...`` is the error of whoever says that nothing changes.
        """
        held_out, horizon = self._held_out, self.config.info.sizes.horizon
        if held_out is None:
            return {}
        rows: list[dict[str, Any]] = []
        for begin in range(0, len(held_out.lengths), MEASURED):
            episode = np.arange(begin, min(begin + MEASURED, len(held_out.lengths)))
            shown = np.arange(horizon + 1)
            window = held_out.windows(episode, np.zeros_like(episode), horizon, shown)
            dreamt = self._predict(window, shown)
            rows.append(self._compared(dreamt, window))
        reshard(self.manager.model)  # no backward pass follows
        each = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        found = {name: float(np.mean(values)) for name, values in each.items()}
        return {
            name: found[name] ** 0.5 if "_error_" in name and "reward" not in name else found[name]
            for name in found
        }

    def _compared(self, dreamt: Dreamt, window: Window) -> dict[str, Any]:
        """Measures of each window, ``[B]``; squares of errors of what is shown."""
        model, there = self._model, window.there
        rows, last = np.arange(len(there)), there.sum(1) - 1
        reward = model.rewards_of(dreamt.reward).cpu().numpy()
        wrong = np.abs(reward - window.reward)
        ended = (dreamt.ended.float() > 0).cpu().numpy() & there
        first = np.where(ended.any(1), ended.argmax(1), there.shape[1])
        really = window.terminated.astype(bool) & there
        happened = np.where(really.any(1), really.argmax(1), there.shape[1])
        counted = there & (np.arange(there.shape[1]) <= first[:, None])
        found = {
            "reward_error_1": wrong[:, 0],
            "reward_error_k": wrong[rows, last],
            "end_accuracy": np.float64(np.abs(first - happened) <= 1),
            "return_model": np.where(counted, reward, 0.0).sum(1),
            "return_real": np.where(there, window.reward, 0.0).sum(1),
        }
        drawn: dict[str, Any] = {}
        if dreamt.state is not None:
            drawn[STATE] = dreamt.state.float().cpu().numpy()
        drawn |= {
            name: one.float().clamp(0.0, 1.0).cpu().numpy() for name, one in dreamt.images.items()
        }
        for name, values in drawn.items():
            truth = self._in_units(name, window)
            for word, step in (("1", np.zeros_like(last)), ("k", last)):
                error = (values[rows, step + 1] - truth[rows, step + 1]) ** 2
                still = (truth[rows, 0] - truth[rows, step + 1]) ** 2
                found[f"{name}_error_{word}"] = error.reshape(len(rows), -1).mean(1)
                found[f"still_{name}_error_{word}"] = still.reshape(len(rows), -1).mean(1)
        return found

    def _in_units(self, name: str, window: Window) -> Any:
        seen = window.shown
        if name == STATE:
            model = self._model
            mean, scale = model.state_mean.cpu().numpy(), model.state_scale.cpu().numpy()
            return ((seen[STATE] if seen.dtype.names else seen) - mean) * scale
        return seen[name].astype(np.float32) / 255.0

    # ---- files

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing a checkpoint folder, and return."""
        return self.manager.begin_checkpoint(path, {"version": self.version, "steps": self.steps})

    def load_checkpoint(self, path: Path) -> None:
        """Continue where the checkpoint was written, under any world size."""
        extra = self.manager.load_checkpoint(path)[0]
        self.version, self.steps = extra["version"], extra["steps"]

    def export(self, file: Path) -> None:
        """Write the model with the observations in which episodes may begin, from rank 0."""
        from safetensors.torch import save_file

        info = self.config.info
        state = self.manager.get_model_state_dict()
        if self.manager.rank:
            return
        generator = np.random.default_rng(self.config.seed)
        starts, first = self._learnt.starts(generator, info.sizes.starts)
        names = starts.dtype.names
        shown = {name: starts[name] for name in names} if names else {STATE: starts}
        tensors = {f"{STARTS}{name}": torch.from_numpy(one.copy()) for name, one in shown.items()}
        tensors[STARTS + FIRST] = torch.from_numpy(first)
        tensors |= {name: one.detach().cpu().contiguous() for name, one in state.items()}
        said = msgspec.json.encode(info).decode()
        part = file.with_name(f".{file.name}")
        save_file(tensors, str(part), metadata={METADATA: said})
        os.replace(part, file)


def _parts(seen: ObservationArray, device: torch.device) -> Mapping[str, Tensor]:
    """Observations ``[B, N, ...]`` by part, ``[B * N, ...]`` each."""
    flat = seen.reshape(-1) if seen.dtype.names else seen.reshape(-1, seen.shape[-1])
    tensors = to_tensors(flat, device)
    return {STATE: tensors} if isinstance(tensors, Tensor) else tensors
