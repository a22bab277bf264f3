"""The files beside the weights of a model folder: configuration, generation config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.language_training.hugging_face import without_progress_bars
from rlinf_async.data.tokenizer import FILES as TOKENIZER_FILES

CONFIG = "config.json"
GENERATION = "generation_config.json"
OPTIONAL_FILES = (
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
)
"""files that some models have"""


def describing_files(config: LanguageModelConfig, language: nn.Module) -> dict[str, bytes | Path]:
    """Return the files of a model's folder, or what describes the model itself, by file name."""
    found: dict[str, bytes | Path] = {}
    if config.path is not None:
        folder = Path(config.path).absolute()
        names = (*TOKENIZER_FILES, *OPTIONAL_FILES)
        found = {name: folder / name for name in names if (folder / name).is_file()}
        # Engines find a model's class by ``architectures``, which not every config.json has.
        described: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    else:
        described = json.loads(_of(language, "config").to_json_string(use_diff=False))
    if not described.get("architectures"):
        described["architectures"] = [type(language).__name__]
    found[CONFIG] = json.dumps(described, indent=2).encode()
    if GENERATION not in found and _of(language, "generation_config") is not None:
        found[GENERATION] = _of(language, "generation_config").to_json_string().encode()
    return found


def write_model_folder(
    language: nn.Module,
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes | Path],
    folder: Path,
) -> None:
    """Write config and weights as Hugging Face does, and the files that it does not write."""
    with without_progress_bars():
        cast(Any, language).save_pretrained(folder, state_dict=state, save_original_format=False)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG, path)  # made for the owner alone
    add_missing_files(files, folder)


def add_missing_files(files: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write the files that are not in the folder yet."""
    for name, content in files.items():
        if (folder / name).exists():
            continue
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _of(language: nn.Module, name: str) -> Any:
    return getattr(language, name, None)
