"""`SuccessClassifier`: the probability that an observation shows the task solved. No torch.

::

    classifier.json   what it is of, and what was measured
    weights.npz       its tensors

Numbers are normalised; an image goes through convolutions of 3 x 3, each of which halves it; both
together through layers of ReLU. Texts are not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import FOLDER
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.spaces import STATE, ObservationArray, ObservationSpec

INFO: Final = "classifier.json"
WEIGHTS: Final = "weights.npz"
CLIP: Final = 10.0
"""bound of normalised numbers"""
AT_ONCE: Final = 256
"""observations of one pass: a whole data set of images would not fit"""

Tensors = Mapping[str, NDArray[Any]]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a classifier is right and wrong about, in episodes that it has not learnt from.

    Zeros: nothing was measured.
    """

    threshold: float = 0.0
    """probability from which an observation is a success"""
    episodes: int = 0
    succeeded: int = 0
    """episodes that have succeeded, as recorded"""
    steps: int = 0
    positives: int = 0
    """steps that are successes, as recorded: the last ones of episodes that have succeeded"""
    accuracy: float = 0.0
    """share of steps that are called what they are"""
    false_positives: int = 0
    """other steps that are called successes"""
    false_negatives: int = 0
    """successes that are called none"""
    episode_accuracy: float = 0.0
    """share of episodes whose last step is called what the episode was"""
    episode_false_positives: int = 0
    """failed episodes in which any step is called a success"""
    early: int = 0
    """episodes that have succeeded, in which a step before the last ones is called a success"""

    @property
    def false_positive_rate(self) -> float:
        """Share of the steps that are no successes, and are called so."""
        return self.false_positives / max(self.steps - self.positives, 1)


class ClassifierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a classifier is of."""

    env: str
    """name of the environment of the episodes"""
    observation: ObservationSpec
    layers: int
    """layers behind numbers and images"""
    convolutions: int
    """of each image"""
    figures: Figures


class SuccessClassifier:
    """Says how probable it is that observations show the task solved."""

    def __init__(self, info: ClassifierInfo, tensors: Tensors) -> None:
        self.info = info
        self._tensors = tensors

    @classmethod
    def load(cls, folder: Path | str) -> SuccessClassifier:
        """Read a folder that `save` has written. Raises `ConfigError` where there is none."""
        place = Path(folder)
        try:
            info = msgspec.json.decode((place / INFO).read_bytes(), type=ClassifierInfo)
            with np.load(place / WEIGHTS, allow_pickle=False) as arrays:
                found = cls(info, dict(arrays))
            found.probability(info.observation.empty(1))
        except (OSError, ValueError, KeyError, EOFError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{str(folder)!r} holds no classifier of success: {error}; "
                "`rlinf-async classifier` writes one"
            ) from error
        return found

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / WEIGHTS, **self._tensors)  # type: ignore[arg-type]
        (folder / INFO).write_bytes(msgspec.json.format(msgspec.json.encode(self.info), indent=2))

    def probability(self, observation: ObservationArray) -> Floats:
        """Return the probability ``[N]`` of success of observations ``[N, D]``."""
        parts = [
            self._logits(observation[at : at + AT_ONCE])
            for at in range(0, len(observation), AT_ONCE)
        ]
        with np.errstate(over="ignore"):
            found = 1.0 / (1.0 + np.exp(-np.concatenate(parts)))
        return found.astype(np.float32)

    def _logits(self, observation: ObservationArray) -> Floats:
        found, spec, info = self._tensors, self.info.observation, self.info
        seen: list[Floats] = []
        if spec.state_size:
            numbers = observation if spec.flat else observation[STATE]
            normal = (numbers - found["mean"]) / found["scale"]
            seen.append(np.clip(normal, -CLIP, CLIP).astype(np.float32))
        for number, image in enumerate(spec.of_kind("image")):
            pixels = as_pixels(observation[image.name])
            for layer in range(info.convolutions):
                name = f"images.{number}.{layer}"
                pixels = _convolved(pixels, found[f"{name}.weight"], found[f"{name}.bias"])
            # As torch has it: channels before rows.
            seen.append(pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1))
        made = np.concatenate(seen, axis=-1)
        for layer in range(info.layers):
            made = made @ found[f"layers.{layer}.weight"].T + found[f"layers.{layer}.bias"]
            if layer < info.layers - 1:
                made = np.maximum(made, 0.0)
        logits: Floats = made[:, 0].astype(np.float32)
        return logits


def as_pixels(images: NDArray[np.uint8]) -> Floats:
    """Images ``[N, H, W, C]`` from -0.5 to 0.5, of such or of ``[N, H, W]``."""
    pixels = images[..., None] if images.ndim == 3 else images
    return pixels.astype(np.float32) / np.float32(255.0) - np.float32(0.5)


def _convolved(pixels: Floats, weight: Floats, bias: Floats) -> Floats:
    """A convolution of 3 x 3 with stride 2, and ReLU."""
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows: Any = np.lib.stride_tricks.sliding_window_view  # numpy's stub knows one axis alone
    seen: Floats = windows(padded, (3, 3), axis=(1, 2))[:, ::2, ::2]
    count, height, width = seen.shape[:3]
    rows = seen.reshape(count * height * width, -1)  # channels, then rows and columns
    made: Floats = np.maximum(rows @ weight.reshape(len(weight), -1).T + bias, np.float32(0.0))
    return made.reshape(count, height, width, -1)


def classifier_for(
    folder: str, threshold: float, shown: ObservationSpec
) -> Callable[[Any], tuple[Floats, NDArray[np.bool_]]]:
    """Return the reward function of a classifier: 1 for each success, 0 for any other step.

    Raises:
        ConfigError: there is none, or it is of other observations than an environment has shown.
    """
    path = ("reward", "classifier")
    try:
        there = Path(folder).exists()
        place = folder if there else Path(os.environ.get(FOLDER, ""), folder)
        classifier = SuccessClassifier.load(place)
    except ConfigError as error:
        raise ConfigError(error.problem, path=path) from error
    known = classifier.info
    if known.observation != shown:
        raise ConfigError(
            f"{folder!r} is of what {known.env} shows, {known.observation}; this environment shows "
            f"{shown}",
            path=path,
        )

    def function(steps: Any) -> tuple[Floats, NDArray[np.bool_]]:
        success = classifier.probability(steps.next_observation) >= threshold
        return success.astype(np.float32), success

    return function
