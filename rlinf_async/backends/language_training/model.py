"""A float32 causal language model with packed attention, of a Hugging Face folder or configuration;
and the files beside its weights: configuration, generation config, tokenizer.

Nothing is ever downloaded.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlinf_async.backends.building import one_at_a_time
from rlinf_async.backends.language import check_family, model_factory
from rlinf_async.backends.language_training.config import SHARD_BYTES, LanguageModelConfig
from rlinf_async.backends.transformers.tensors import attention_of
from rlinf_async.data.images import PROCESSOR_FILES
from rlinf_async.data.prompts import FILES as TOKENIZER_FILES

NAME = "rlinf_async_packed"


def register() -> None:
    """Register ``attn_implementation=NAME`` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    sample_lengths: list[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ``[1, T, heads, D]`` from query ``[1, heads, T, D]``, key and value with fewer heads.

    A token attends to earlier tokens of its own sample only: one call of PyTorch's fused attention
    for each sample, so no mask is built, and no work is done for pairs of different samples.

    ``sample_lengths`` sum to ``T``; without them the row is one sample. Raises
    `NotImplementedError` for parts of some models' attention that are not implemented here.
    """
    _check_plain(others)
    lengths = sample_lengths or [query.shape[2]]
    parts = []
    samples = (torch.split(one, lengths, 2) for one in (query, key, value))
    for q, k, v in zip(*samples, strict=True):
        mask = _window(q.shape[2], sliding_window, q.device)
        parts.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return whole.transpose(1, 2), None


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    # transformers counts the token itself.
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - window)


def _check_plain(others: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"this model's attention uses {name!r}, which packed attention does not implement"
            )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return None: samples are separated by their lengths, not by a mask."""


WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


def build_language_model(config: LanguageModelConfig) -> tuple[nn.Module, bool]:
    """Return the model, and whether its attention is `packed_attention`.

    Random weights come from torch's random state. Raises `ValueError`, naming the folder
    and what is missing in it, `UnsupportedModel`, and `ModuleNotFoundError` without transformers.
    """
    transformers = _transformers()
    register()
    described = _described(transformers, config)
    check_family(described.to_dict())
    text = described.get_text_config()
    # No dropout: the ratio of two forward passes over the same weights must be 1.
    for part in (text, getattr(described, "vision_config", None)):
        for name in vars(part) if part is not None else ():
            if name.endswith(("dropout", "pdrop")) and isinstance(getattr(part, name), float):
                setattr(part, name, 0.0)
    packs = getattr(text, "attn_logit_softcapping", None) is None
    implementation = attention_of(described, NAME if packs else "eager")
    model = _instantiate(config, described, implementation)
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
    config: LanguageModelConfig, described: Any, implementation: str | dict[str, str]
) -> Any:
    automatic = model_factory(described.model_type)
    try:
        if config.path is None or config.random:
            with one_at_a_time:
                return automatic.from_config(
                    described, dtype=torch.float32, attn_implementation=implementation
                )
        folder = Path(config.path)
        if not any(found for pattern in WEIGHT_FILES for found in folder.glob(pattern)):
            raise ValueError(
                f"model.path is {config.path!r}: there are no weights in it (*.safetensors or "
                "*.bin); set model.random = true to begin with new ones"
            )
        with one_at_a_time, without_progress_bars():
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


CONFIG = "config.json"
GENERATION = "generation_config.json"
OPTIONAL_FILES = (
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    *PROCESSOR_FILES,
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
        described = json.loads(_attribute(language, "config").to_json_string(use_diff=False))
    if not described.get("architectures"):
        described["architectures"] = [type(language).__name__]
    found[CONFIG] = json.dumps(described, indent=2).encode()
    if GENERATION not in found and _attribute(language, "generation_config") is not None:
        found[GENERATION] = _attribute(language, "generation_config").to_json_string().encode()
    return found


def write_model_folder(
    language: nn.Module,
    state: Mapping[str, Tensor],
    files: Mapping[str, bytes | Path],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config and weights as Hugging Face does, and the files that it does not write."""
    dtype = next(iter(state.values())).dtype  # writing takes them out
    with without_progress_bars():
        cast(Any, language).save_pretrained(
            folder, state_dict=state, save_original_format=False, max_shard_size=shard_bytes
        )
    _say_dtype(folder / CONFIG, dtype)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG, path)  # made for the owner alone
    add_missing_files(files, folder)


def _say_dtype(config: Path, dtype: torch.dtype) -> None:
    """Name the dtype of the weights that were written: the library names that of the model."""
    described = json.loads(config.read_text(encoding="utf-8"))
    described["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def add_missing_files(files: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write the files that are not in the folder yet."""
    for name, content in files.items():
        if (folder / name).exists():
            continue
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _attribute(language: nn.Module, name: str) -> Any:
    return getattr(language, name, None)
