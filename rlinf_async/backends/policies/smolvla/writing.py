"""A trained SmolVLA as a folder of LeRobot: the one that it was loaded from, with its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_async.backends.policies.smolvla.folder import CONFIG, WEIGHTS
from rlinf_async.backends.policies.smolvla.model import lerobot_name

ADAPTED = ".base_layer"
"""in names of an adapted layer's own parameters"""


def write_folder(
    model: nn.Module, source: Path, folder: Path, *, steps: int, executed: int
) -> None:
    """Copy the folder ``source`` and put the weights of ``model`` in; adapters are merged.

    ``steps`` and ``executed`` are what LeRobot calls ``num_steps`` and ``n_action_steps``.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    config: dict[str, Any] = json.loads((source / CONFIG).read_bytes())
    config |= {"num_steps": steps, "n_action_steps": executed}
    (folder / CONFIG).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    # What is not in the model, such as the head of the language model, stays as it was.
    tensors = load_file(source / WEIGHTS)
    tensors |= {lerobot_name(name): one for name, one in merged(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model, as they are without adapters that do the same."""
    added: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        change: Any = getattr(module, "get_delta_weight", None)
        if change is not None:
            added[f"{name}{ADAPTED}.weight"] = change("default").detach()
    return {
        name.replace(ADAPTED, ""): (one.detach() + added.get(name, 0)).cpu().contiguous()
        for name, one in model.state_dict().items()
        if ".lora_" not in name
    }
