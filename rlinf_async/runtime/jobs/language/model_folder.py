"""The model as a folder, which is what engines and actors read.

A checkpoint's folder is used as it is. A model that starts from a configuration gets a folder
without weights inside the run's own: the actor draws them, and publishes them before anything is
generated.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.data.arithmetic import save_arithmetic_tokenizer
from rlinf_async.data.tokenizer import FILES as TOKENIZER_FILES
from rlinf_async.observe.files import atomic_write
from rlinf_async.runtime.jobs.language.sections import ModelConfig

T = TypeVar("T")

ARITHMETIC = "arithmetic"
BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt")
"""files that belong to some tokenizers"""


class _Index(msgspec.Struct):
    """What is read of ``model.safetensors.index.json``: tensor -> file."""

    weight_map: dict[str, str]


def checkpoint_folder(model: ModelConfig) -> Path | None:
    """The folder of a checkpoint, looked at; None for a model that starts from a configuration.

    Raises:
        ConfigError: it is not there, lacks config, weights or tokenizer, or one is damaged.
    """
    if not model.path:
        return None
    path = Path(model.path).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"the folder {model.path!r} is not there: give a Hugging Face checkpoint on this "
            "disk (nothing is downloaded)",
            path=("model", "path"),
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} has no config.json: it is not a Hugging Face checkpoint",
            path=("model", "path"),
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ConfigError(
            f"{path} has no weights (*.safetensors): copy them into it, or give model.config "
            "instead to start from random ones",
            path=("model", "path"),
        )
    if not model.tokenizer and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy "
            "tokenizer.json and tokenizer_config.json into it, or name a folder that has them "
            "by model.tokenizer",
            path=("model", "path"),
        )
    _check_whole(path)
    return path


def _check_whole(folder: Path) -> None:
    """Refuse a config that is no JSON, and weights of which a part is missing (a cut download)."""
    _read_json(folder / "config.json", dict[str, Any])
    for path in folder.glob("*.safetensors.index.json"):
        shards = set(_read_json(path, _Index).weight_map.values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"{folder} lacks {missing[0]}{more}, which {path.name} names: copy it into it",
                path=("model", "path"),
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="numpy"):
                pass
        except SafetensorError as error:
            raise ConfigError(
                f"{file} is damaged ({error}): copy it anew", path=("model", "path")
            ) from error


def _read_json(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}", path=("model", "path")) from error


def make_model_folder(model: ModelConfig, into: Path) -> Path:
    """The folder that engines read: config and tokenizer, weights where the checkpoint has some.

    Raises:
        ConfigError: the architecture is unknown or its settings do not fit, or a folder lacks
            something.
        MissingExtra: transformers is not installed.
    """
    source = checkpoint_folder(model)
    if source is not None and not model.tokenizer:
        return source
    into.mkdir(parents=True, exist_ok=True)
    if model.tokenizer == ARITHMETIC:
        save_arithmetic_tokenizer(into)
    else:
        folder = Path(model.tokenizer).expanduser()
        if not copy_tokenizer(folder, into):
            raise ConfigError(
                f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there",
                path=("model", "tokenizer"),
            )
    if source is not None:
        for path in source.iterdir():
            if path.is_file() and not (into / path.name).exists():
                (into / path.name).symlink_to(path.resolve())
        return into
    atomic_write(into / "config.json", msgspec.json.format(_config_json(model, into)) + b"\n")
    return into


def copy_tokenizer(folder: Path, into: Path) -> bool:
    """Copy the tokenizer's files; whether there were any."""
    found = [folder / name for name in (*TOKENIZER_FILES, *BESIDE) if (folder / name).is_file()]
    for path in found:
        shutil.copy2(path, into / path.name)
    return any(path.name in TOKENIZER_FILES for path in found)


def _config_json(model: ModelConfig, folder: Path) -> bytes:
    """The whole configuration: what was given, the architecture's defaults, the tokenizer's ids."""
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ModuleNotFoundError as error:
        missing = error.name or "transformers"
        raise MissingExtra(missing, extra="llm", needed_for="a language model") from error
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    given = dict(model.config)
    kind = given.pop("model_type")
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    if given.get("vocab_size", len(tokenizer)) < len(tokenizer):
        raise ConfigError(
            f"vocab_size is {given['vocab_size']}, but the tokenizer has {len(tokenizer)} tokens: "
            "leave it out",
            path=("model", "config", "vocab_size"),
        )
    _check_kind(kind)
    try:
        made = AutoConfig.for_model(kind, **(ids | given))
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error), path=("model", "config")) from error
    architecture = _architecture(made)
    if architecture is not None:  # vLLM finds the model's class by it
        made.architectures = [architecture]
    text: bytes = made.to_json_string(use_diff=False).encode()
    return text


def _check_kind(kind: str) -> None:
    """transformers itself would answer with all of its hundreds of names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if kind in KNOWN:
        return
    near = difflib.get_close_matches(kind, list(KNOWN), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"transformers has no causal language model of model_type {kind!r}{hint}",
        path=("model", "config", "model_type"),
    )


def _architecture(config: Any) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name
