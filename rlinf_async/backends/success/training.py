"""Learns a classifier of success, and measures it on episodes that it has not learnt from.

An observation is the one after a step. The last ones of an episode that has succeeded are
successes; all others are none. A batch has as many of either kind, however rare successes are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlinf_async.backends.success.classifier import (
    CLIP,
    ClassifierInfo,
    Figures,
    SuccessClassifier,
    as_pixels,
)
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import read_episodes, read_info
from rlinf_async.messages.embodied import Bools
from rlinf_async.messages.spaces import STATE, ObservationArray, ObservationSpec

HIDDEN = (64, 64)
SMALLEST = 8
"""pixels of the shorter side, at which an image is convolved no further"""
CHANNELS = 32


class Wanted(NamedTuple):
    """How a classifier is learnt."""

    last: int = 1
    """last steps of an episode that has succeeded, which are successes"""
    held_out: float = 0.25
    """share of the episodes of either kind that it is measured on, and does not learn from"""
    steps: int = 2000
    """optimizer steps"""
    batch: int = 128
    threshold: float = 0.5
    """probability from which the figures call a step a success"""
    seed: int = 0


class LabelledEpisode(NamedTuple):
    """What an episode of ``T`` steps has shown, and whether it has succeeded."""

    shown: ObservationArray
    """``[T, ...]``: after each step"""
    success: bool

    def solved(self, last: int) -> Bools:
        """Return which of the steps are successes, ``[T]``."""
        found = np.zeros(len(self.shown), np.bool_)
        found[-last:] = self.success
        return found


def read_labelled(folders: Sequence[Path]) -> tuple[str, ObservationSpec, list[LabelledEpisode]]:
    """Return environment, observations and episodes of folders of demonstrations.

    Raises:
        DataError: one of them cannot be read, does not say which episodes have succeeded, or shows
            something else than the first; or there are not two episodes of either kind.
    """
    found: list[LabelledEpisode] = []
    first = read_info(folders[0])
    for folder in folders:
        info = read_info(folder)
        if info.observation != first.observation:
            raise DataError(
                f"{str(folder)!r} shows {info.observation}, but {str(folders[0])!r} shows "
                f"{first.observation}: a classifier is of one environment"
            )
        for number, episode in enumerate(read_episodes(folder)):
            if episode.success is None or episode.outcome is None:
                raise DataError(
                    f"{str(folder)!r} does not say whether its episode {number} has succeeded, and "
                    "what it showed last: record it with `rlinf-async demonstrations "
                    "--keep-failures`, in an environment that says so"
                )
            last = episode.outcome.last_observation
            shown: ObservationArray = np.concatenate([episode.observation[1:], last])
            found.append(LabelledEpisode(shown, episode.success))
    solved = sum(one.success for one in found)
    if min(solved, len(found) - solved) < 2:
        raise DataError(
            f"{solved} of {len(found)} episodes have succeeded: a classifier has to see both, at "
            "least two of either kind, of which it is measured on some"
            + ("; record failures with --keep-failures" if solved else "")
        )
    if not (first.observation.state_size or first.observation.of_kind("image")):
        raise DataError(f"{str(folders[0])!r} shows no numbers and no images")
    return first.env, first.observation, found


class _Network(nn.Module):
    """What `SuccessClassifier` computes, in torch."""

    def __init__(self, spec: ObservationSpec, mean: Any, scale: Any) -> None:
        super().__init__()
        self.spec = spec
        self.mean: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("mean", torch.as_tensor(mean))
        self.register_buffer("scale", torch.as_tensor(scale))
        images = spec.of_kind("image")
        self.convolutions = max((_halvings(one.shape) for one in images), default=0)
        self.images = nn.ModuleList()
        size = spec.state_size
        for image in images:
            layers, (height, width) = nn.ModuleList(), image.shape[:2]
            channels = image.shape[2] if len(image.shape) == 3 else 1
            for _ in range(self.convolutions):
                layers.append(nn.Conv2d(channels, CHANNELS, 3, stride=2, padding=1))
                channels, height, width = CHANNELS, -(-height // 2), -(-width // 2)
            self.images.append(layers)
            size += channels * height * width
        sizes = (size, *HIDDEN, 1)
        self.layers = nn.ModuleList(nn.Linear(into, out) for into, out in itertools.pairwise(sizes))

    def forward(self, observation: ObservationArray) -> torch.Tensor:
        """Logits ``[N]``."""
        seen: list[torch.Tensor] = []
        if self.spec.state_size:
            numbers = observation if self.spec.flat else observation[STATE]
            normal = (torch.as_tensor(np.ascontiguousarray(numbers)) - self.mean) / self.scale
            seen.append(normal.clamp(-CLIP, CLIP))
        for image, layers in zip(self.spec.of_kind("image"), self.images, strict=True):
            assert isinstance(layers, nn.ModuleList)
            pixels = torch.as_tensor(as_pixels(observation[image.name])).permute(0, 3, 1, 2)
            for layer in layers:
                pixels = torch.relu(layer(pixels))
            seen.append(pixels.flatten(1))
        made = torch.cat(seen, -1)
        for layer in self.layers[:-1]:
            made = torch.relu(layer(made))
        logits: torch.Tensor = self.layers[-1](made)[:, 0]
        return logits

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors of a `SuccessClassifier`."""
        return {name: one.detach().numpy().copy() for name, one in self.state_dict().items()}


def _halvings(shape: Sequence[int]) -> int:
    sides, count = min(shape[:2]), 0
    while sides > SMALLEST:
        sides, count = -(-sides // 2), count + 1
    return max(count, 1)


def train_classifier(folders: Sequence[Path], wanted: Wanted) -> SuccessClassifier:
    """Learn from most of the episodes, and measure on the others.

    Raises: as `read_labelled`.
    """
    env, spec, episodes = read_labelled(folders)
    rng = np.random.default_rng(wanted.seed)
    learnt, held = _split(episodes, wanted, rng)
    shown: ObservationArray = np.concatenate([one.shown for one in learnt])
    solved = np.concatenate([one.solved(wanted.last) for one in learnt])
    numbers = _numbers(shown, spec)
    deviation = numbers.std(0)
    scale = np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32)
    torch.manual_seed(wanted.seed)
    network = _Network(spec, numbers.mean(0).astype(np.float32), scale)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=1e-5)
    yes, no = np.flatnonzero(solved), np.flatnonzero(~solved)
    half = wanted.batch // 2
    target = torch.cat([torch.ones(half), torch.zeros(half)])
    for _ in range(wanted.steps):
        chosen = np.concatenate([rng.choice(yes, half), rng.choice(no, half)])
        loss = nn.functional.binary_cross_entropy_with_logits(network(shown[chosen]), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def with_figures(figures: Figures) -> SuccessClassifier:
        info = ClassifierInfo(
            env=env,
            observation=spec,
            layers=len(network.layers),
            convolutions=network.convolutions,
            figures=figures,
        )
        return SuccessClassifier(info, network.tensors())

    made = with_figures(Figures())  # what is measured is what acts
    return with_figures(_measured(held, [made.probability(one.shown) for one in held], wanted))


def _numbers(shown: ObservationArray, spec: ObservationSpec) -> NDArray[Any]:
    if not spec.state_size:
        return np.zeros((1, 0), np.float32)
    found: NDArray[Any] = shown if spec.flat else shown[STATE]
    return found


def _split(
    episodes: Sequence[LabelledEpisode], wanted: Wanted, rng: np.random.Generator
) -> tuple[list[LabelledEpisode], list[LabelledEpisode]]:
    """Episodes to learn from, and to measure on: of either kind the same share."""
    learnt: list[LabelledEpisode] = []
    held: list[LabelledEpisode] = []
    for success in (True, False):
        same = [one for one in episodes if one.success is success]
        order = rng.permutation(len(same))
        count = min(max(round(wanted.held_out * len(same)), 1), len(same) - 1)
        held += [same[place] for place in order[:count]]
        learnt += [same[place] for place in order[count:]]
    return learnt, held


def _measured(
    episodes: Sequence[LabelledEpisode], said: Sequence[NDArray[Any]], wanted: Wanted
) -> Figures:
    """Compare what a classifier has said of episodes with what they were."""
    called = [one >= wanted.threshold for one in said]
    solved = [one.solved(wanted.last) for one in episodes]
    pairs = list(zip(episodes, called, strict=True))
    yes, truth = np.concatenate(called), np.concatenate(solved)
    return Figures(
        threshold=wanted.threshold,
        episodes=len(episodes),
        succeeded=sum(one.success for one in episodes),
        steps=len(truth),
        positives=int(truth.sum()),
        accuracy=float((yes == truth).mean()),
        false_positives=int((yes & ~truth).sum()),
        false_negatives=int((~yes & truth).sum()),
        episode_accuracy=sum(bool(c[-1]) is e.success for e, c in pairs) / len(pairs),
        episode_false_positives=sum(bool(c.any()) for e, c in pairs if not e.success),
        early=sum(bool(c[: -wanted.last].any()) for e, c in pairs if e.success),
    )
