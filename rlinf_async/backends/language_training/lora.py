"""Low-rank adapters of a language model (LoRA, Hu et al. 2021), as peft has them.

::

    y = x W^T + s (x A^T) B^T        A [rank, in], B [out, rank], s = alpha / rank

    q_proj.weight            W, frozen, under the name that it has without an adapter
    q_proj.lora_A.weight     A, drawn as peft draws it
    q_proj.lora_B.weight     B, 0 at first: a new adapter changes nothing

So whatever goes by the names of a model's weights (published weights, shards, checkpoints) finds
them where they were, and ``W + s B A`` is what a model without an adapter has in their place.

On the disk an adapter is peft's: a folder ``adapter`` beside the merged weights, not among them,
because transformers loads a folder with an ``adapter_config.json`` as that of an adapter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from rlinf_async.backends.base import LoraConfig
from rlinf_async.backends.building import building
from rlinf_async.backends.language_training.config import AdapterConfig
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel.splits import nearest_names
from rlinf_async.weights.pack import check_fit, unpack, verify

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_FOLDER: Final = "adapter"
"""folder of an adapter, in that of the merged model"""
PEFT_PREFIX: Final = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
WEIGHT: Final = ".weight"


class AdaptedLinear(nn.Linear):
    """A linear layer with a low-rank update; it takes over weight and bias of ``base``."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = config.alpha / config.rank
        like: dict[str, Any] = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False, **like)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out]`` of ``[..., in]``."""
        update: Tensor = self.lora_B(self.lora_A(input))
        return linear(input, self.weight, self.bias) + update * self.scale


class LowRank(NamedTuple):
    """The update of one weight."""

    a: Tensor
    """``[rank, in]``"""
    b: Tensor
    """``[out, rank]``"""
    scale: float

    def whole(self) -> Tensor:
        """Return what is added to the weight, ``[out, in]``."""
        return (self.b @ self.a) * self.scale


def add_adapters(language: nn.Module, config: AdapterConfig) -> None:
    """Give a model of transformers an adapter, in place, and freeze all else. Draws random numbers.

    Raises `ValueError` as `targeted` does.
    """
    found = targeted(language, config.targets)
    language.requires_grad_(False)
    for name, base in found.items():
        replace_layer(language, name, AdaptedLinear(base, config))


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the one of this name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def targeted(language: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers that are adapted, by name: every one whose name is one of the targets, or
    ends in one; without targets every linear layer but the head.

    Raises `ValueError` for a target that no layer has, and one that cannot be adapted.
    """
    modules = dict(language.named_modules())
    head = cast(Any, language).get_output_embeddings()
    linear = {name: one for name, one in modules.items() if type(one) is nn.Linear}
    if not targets:
        return {name: one for name, one in linear.items() if one is not head}
    found: dict[str, nn.Linear] = {}
    for target in targets:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        known = sorted({name.rpartition(".")[2] for name, one in linear.items() if one is not head})
        if not named:
            near = nearest_names(target, known)
            raise ValueError(
                f"no layer of the model is called {target!r}{near}; its linear layers are "
                f"{', '.join(known)}"
            )
        for name in named:
            if modules[name] is head:
                raise ValueError(
                    f"{target!r} is the head over the vocabulary, which is not adapted: leave it "
                    "out"
                )
            if name not in linear:
                raise ValueError(
                    f"{target!r} is a {type(modules[name]).__name__}, but only linear layers can "
                    f"be adapted: {', '.join(known) or 'this model has none'}"
                )
            found[name] = linear[name]
    return found


def adapted(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the layers that have an adapter, by name."""
    for name, one in model.named_modules():
        if isinstance(one, AdaptedLinear):
            yield name, one


def low_rank(tensors: Mapping[str, Tensor], scale: float) -> dict[str, LowRank]:
    """Return the updates that are among these tensors, by the names of the weights."""
    return {
        name.removesuffix(A) + WEIGHT: LowRank(one, tensors[name.removesuffix(A) + B], scale)
        for name, one in tensors.items()
        if name.endswith(A)
    }


def factors_of(updates: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Return the tensors of which `low_rank` makes these updates."""
    found: dict[str, Tensor] = {}
    for name, one in updates.items():
        stem = name.removesuffix(WEIGHT)
        found |= {stem + A: one.a, stem + B: one.b}
    return found


def folded(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Return an adapter's tensors with the scale in ``B``: what travels needs nothing beside it."""
    scale = config.alpha / config.rank
    return {name: one * scale if name.endswith(B) else one for name, one in tensors.items()}


def take_adapter(arrived: Mapping[str, Tensor], model: nn.Module, what: str) -> None:
    """Make these tensors, which are `folded`, the adapter of a model; the first ones give it one.

    ``what`` has arrived, in words. Raises `WeightsMismatch` before anything was changed.
    """
    ranks = {
        name.removesuffix(A): one.shape[0] for name, one in arrived.items() if name.endswith(A)
    }
    layers: dict[str, nn.Linear] = dict(adapted(model))
    new = not layers
    if new:
        modules = model.named_modules()
        layers = {name: one for name, one in modules if name in ranks and type(one) is nn.Linear}
    kind = next(iter(arrived.values())).dtype
    sizes = {
        name + end: size
        for name, one in layers.items()
        for end, size in (
            (A, (ranks.get(name, 0), one.in_features)),
            (B, (one.out_features, ranks.get(name, 0))),
        )
    }
    wanted = {name: torch.empty(size, dtype=kind, device="meta") for name, size in sizes.items()}
    check_fit(arrived, wanted, what)
    if new:
        with building(0):
            for name, base in layers.items():
                layer = AdaptedLinear(base, LoraConfig(rank=ranks[name], alpha=ranks[name]))
                replace_layer(model, name, layer.requires_grad_(False))
    own = {name: one for name, one in model.named_parameters() if is_of_adapter(name)}
    with torch.no_grad():
        for name, one in arrived.items():
            own[name].copy_(one)


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of this name is part of an adapter."""
    return name.endswith((A, B))


def adapter_config(language: nn.Module, config: AdapterConfig, base: str) -> bytes:
    """Return the ``adapter_config.json`` of a model that was given an adapter.

    ``base``: the model's own folder, or empty.
    """
    names = [name for name, _ in adapted(language)]
    leaves = sorted({name.rpartition(".")[2] for name in names})
    matched = [
        name for name, _ in language.named_modules() if name.rpartition(".")[2] in set(leaves)
    ]
    return _described(config, leaves if matched == names else names, base)


def _described(config: LoraConfig, targets: Sequence[str], base: str) -> bytes:
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
    }
    return json.dumps(described, indent=2).encode()


def scale_of(described: bytes) -> float:
    """Return the factor of the updates, of an ``adapter_config.json`` that was written here."""
    fields: dict[str, Any] = json.loads(described)
    return float(fields["lora_alpha"] / fields["r"])


def write_adapter(tensors: Mapping[str, Tensor], described: bytes, folder: Path) -> None:
    """Write an adapter, whose tensors have their names in the model, as peft does."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {PEFT_PREFIX + name: one.detach().contiguous() for name, one in tensors.items()}
    (folder / ADAPTER_CONFIG).write_bytes(described)
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def write_update(update: WeightUpdate, folder: Path) -> None:
    """Write an adapter that was published, `folded`, as peft does.

    Raises `WeightsDamaged`, before anything is written.
    """
    verify(update)
    tensors = unpack(update)
    rank = next(one.shape[0] for name, one in tensors.items() if name.endswith(A))
    names = [name.removesuffix(A) for name in tensors if name.endswith(A)]
    described = _described(AdapterConfig(rank=rank, alpha=float(rank)), names, "")
    write_adapter(tensors, described, folder)
