"""A trained policy as a folder of LeRobot: the one that it was loaded from, with its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_async.backends.policies.expert_flow.folder import CONFIG, WEIGHTS
from rlinf_async.backends.policies.expert_flow.model import ExpertFlow

ADAPTED = ".base_layer"
"""in names of an adapted layer's own parameters"""


def write_folder(
    model: ExpertFlow, source: Path, folder: Path, changes: Mapping[str, object]
) -> None:
    """Copy the folder ``source`` with ``changes`` of its ``config.json``, and put the weights of
    ``model`` in; adapters are merged."""
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    config: dict[str, Any] = json.loads((source / CONFIG).read_bytes())
    config |= changes
    (folder / CONFIG).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    # What is not in the model, such as the head of the language model, stays as it was.
    tensors = load_file(source / WEIGHTS)
    for name, one in merged(model).items():
        names = model.lerobot_names(name)
        for theirs in [known for known in names if known in tensors] or names[:1]:
            # One tensor twice cannot be written.
            tensors[theirs] = one.clone()
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
