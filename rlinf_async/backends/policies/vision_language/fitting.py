"""Whether an environment fits the policy, and the folder of its model; asked without torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from rlinf_async.backends.policies.config import PolicyConfig

MODEL_TYPES: Final = ("smolvlm", "idefics3")
"""types of models that the policy can be built on, as in their ``config.json``"""
WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
"""files of weights"""


def misfit(config: PolicyConfig) -> str:
    """Return why the policy cannot have these observations and actions, or this model; empty if it
    can."""
    if importlib.util.find_spec("transformers") is None:
        return "it needs the package 'transformers': pip install 'rlinf-async[llm]'"
    return _misfit_of_spaces(config) or _misfit_of_chunks(config) or _misfit_of_model(config)


def _misfit_of_spaces(config: PolicyConfig) -> str:
    images = config.sees.of_kind("image")
    if not images:
        return f"it needs at least one image; the environment shows {config.sees}"
    for image in images:
        if image.shape[0] != image.shape[1] or image.shape[2:] not in ((1,), (3,)):
            return (
                f"image {image.name!r} has shape {list(image.shape)}; images must be square, "
                "[size, size, 3] or [size, size, 1]: let the environment crop or resize them"
            )
    if not config.acts.continuous:
        return "its actions are vectors of numbers (Box); the environment's are not"
    return ""


def _misfit_of_chunks(config: PolicyConfig) -> str:
    executed, predicted = max(config.action_chunk, 1), config.vision_language.chunk
    if predicted and predicted % executed:
        return (
            f"it predicts chunks of vision_language.chunk = {predicted} actions, of which "
            f"env.action_chunk = {executed} are executed: take a multiple of {executed}"
        )
    return ""


def _misfit_of_model(config: PolicyConfig) -> str:
    own = config.vision_language
    if own.lora.rank and importlib.util.find_spec("peft") is None:
        return "vision_language.lora needs the package 'peft': pip install 'rlinf-async[lora]'"
    if own.folder:
        return folder_misfit(own.folder)
    sizes = {image.shape[0] for image in config.sees.of_kind("image")}
    tile = own.patch_size * own.scale_factor
    for size in sizes:
        if size % tile:
            return (
                f"images of {size} x {size} pixels cannot be cut into parts of patch_size x "
                f"scale_factor = {own.patch_size} x {own.scale_factor} pixels: choose sizes whose "
                f"product divides {size}"
            )
    if len(sizes) > 1:
        return f"its images must be of one size; the environment shows {config.sees}"
    return ""


def folder_misfit(folder: str) -> str:
    """Return why the folder holds no model that the policy can be built on; empty if it does."""
    path = Path(folder) / "config.json"
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return f"vision_language.folder is {folder!r}: its config.json cannot be read: {error}"
    found = config.get("model_type") if isinstance(config, dict) else None
    if found in MODEL_TYPES:
        if any(True for pattern in WEIGHTS for _ in path.parent.glob(pattern)):
            return ""
        return f"vision_language.folder is {folder!r}: it has no weights ({', '.join(WEIGHTS)})"
    return (
        f"vision_language.folder is {folder!r}: it holds a model of type {found!r}, which is no "
        "vision-language model that the policy can be built on; these are: "
        f"{', '.join(MODEL_TYPES)}"
    )
