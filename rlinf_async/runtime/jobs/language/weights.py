"""Whether a checkpoint's config.json is that of its weights, before anybody loads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import safe_open

from rlinf_async.config import ConfigError

Shape = tuple[int, ...]


class _Found(NamedTuple):
    """A tensor of another size than the configuration makes it."""

    name: str
    there: Shape
    wanted: Shape
    file: str


def check_weights(folder: Path, where: tuple[str, ...]) -> None:
    """Refuse safetensors of other sizes than config.json says; only their headers are read.

    Tensors that transformers renames while it loads, quantised weights and other files are left
    to whoever loads them.

    Args:
        folder: of the checkpoint.
        where: the setting that names it.

    Raises:
        ConfigError: with the first tensor, and both of its shapes.
    """
    files = sorted(folder.glob("*.safetensors"))
    wanted = _wanted(folder) if files else {}
    found = [one for file in files for one in _differing(file, wanted)]
    if not found:
        return
    first = min(found)
    raise ConfigError(
        f"{folder}: {len(found)} tensors are not of the size that config.json makes them: "
        f"{first.name} is {list(first.there)} in {first.file} and {list(first.wanted)} by "
        "config.json: copy the config.json that belongs to the weights",
        path=where,
    )


def _differing(file: Path, wanted: dict[str, Shape]) -> list[_Found]:
    with safe_open(str(file), framework="numpy") as opened:
        names: list[str] = opened.keys()
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return [
        _Found(name, there, wanted[name], file.name)
        for name, there in shapes.items()
        # Some are transposed while they are loaded.
        if name in wanted and math.prod(there) != math.prod(wanted[name])
    ]


def _wanted(folder: Path) -> dict[str, Shape]:
    """The shapes of the model that config.json describes; none where transformers alone cannot
    build it, or stores its weights in another form."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    if "quantization_config" in described:
        return {}
    factory: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            model = factory.from_config(config)
    except (ValueError, TypeError, KeyError, OSError, ImportError):
        return {}  # the engine and the trainer say it, each in its own way
    return {name: tuple(one.shape) for name, one in model.state_dict().items()}
