"""Building a float32 causal language model, with packed attention, from a Hugging Face folder or
configuration.

Nothing is ever downloaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf_async.backends.families import check_family
from rlinf_async.backends.language_training import attention
from rlinf_async.backends.language_training.config import LanguageModelConfig

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


def build_language_model(config: LanguageModelConfig) -> tuple[nn.Module, bool]:
    """Return the model, and whether its attention is `packed_attention`.

    Random weights come from torch's random state. Raises `ValueError`, naming the folder
    and what is missing in it, `UnsupportedModel`, and `ModuleNotFoundError` without transformers.
    """
    transformers = _transformers()
    attention.register()
    described = _described(transformers, config)
    check_family(described.to_dict())
    text = described.get_text_config()
    # No dropout: the ratio of two forward passes over the same weights must be 1.
    for name in vars(text):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(text, name), float):
            setattr(text, name, 0.0)
    packs = getattr(text, "attn_logit_softcapping", None) is None
    implementation = attention.NAME if packs else "eager"
    model = _instantiate(transformers, config, described, implementation)
    _check_head(model)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), packs


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which would overwrite those of a run."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training a language model needs the package 'transformers': "
            "pip install 'rlinf-async[llm]'"
        ) from error
    return transformers


def _described(transformers: Any, config: LanguageModelConfig) -> Any:
    if config.path is None:
        fields = {name: value for name, value in config.config.items() if name != "model_type"}
        try:
            return transformers.AutoConfig.for_model(config.config["model_type"], **fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model.config cannot be used: {error}") from error
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        what = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
        raise ValueError(
            f"model.path is {config.path!r}: {what}; give the folder of a Hugging Face model"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be used: {error}") from error


def _instantiate(
    transformers: Any, config: LanguageModelConfig, described: Any, implementation: str
) -> Any:
    automatic = transformers.AutoModelForCausalLM
    try:
        if config.path is None or config.random:
            return automatic.from_config(
                described, dtype=torch.float32, attn_implementation=implementation
            )
        folder = Path(config.path)
        if not any(found for pattern in WEIGHT_FILES for found in folder.glob(pattern)):
            raise ValueError(
                f"model.path is {config.path!r}: there are no weights in it (*.safetensors or "
                "*.bin); set model.random = true to begin with new ones"
            )
        model, report = automatic.from_pretrained(
            folder,
            config=described,
            dtype=torch.float32,
            attn_implementation=implementation,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except OSError as error:
        raise ValueError(f"the model in {config.path!r} cannot be loaded: {error}") from error
    differing = sorted(report["mismatched_keys"])
    if differing:
        name, there, wanted = differing[0]
        raise ValueError(
            f"the weights in {config.path!r} do not fit its config.json: {len(differing)} tensors "
            f"have another size; the first, {name}, is {list(there)} in the file and "
            f"{list(wanted)} by config.json"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"the weights in {config.path!r} lack {len(missing)} tensors of its config.json: "
            f"{', '.join(missing[:5])}{', ...' if missing[5:] else ''}"
        )
    return model


def _check_head(model: Any) -> None:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"a {type(model).__name__} ends in a {type(head).__name__}; only causal language "
            "models that end in one linear layer over the vocabulary can be trained"
        )
