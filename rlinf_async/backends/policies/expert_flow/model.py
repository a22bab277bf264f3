"""The first layers of a vision-language model, and an action expert beside them.

::

    images | instruction --trunk--> keys and values of each layer      (once; the state too, by the
                                        |                              trunk or by the expert)
    actions with noise, time --expert---+------> velocity              (at each step)

The layers are own ones, so that FSDP2's units are called by their forward. Parameters below
``trunk`` and ``expert`` have Hugging Face's names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.building import one_at_a_time
from rlinf_async.backends.policies.expert_flow.folder import FolderSettings

LONGEST: Final = 10_000.0
"""of the wavelengths of rotary positions, over 2 pi, whatever the model's own configuration says"""


class Seen(NamedTuple):
    """What the expert sees of ``N`` observations."""

    keys: list[Tensor]
    """of each layer, ``[N, P, heads, size]``"""
    values: list[Tensor]
    there: Tensor
    """``[N, P]``, False for padding"""
    summary: Tensor
    """``[N, hidden]``: the last hidden state at the state, which has seen everything"""


class Shape(NamedTuple):
    """Sizes of a layer."""

    width: int
    inner: int
    heads: int
    shared: int
    """heads of keys and values"""
    size: int
    """of a head"""
    epsilon: float
    biased: bool = False
    biased_mlp: bool = False
    norm: type[nn.RMSNorm] = nn.RMSNorm
    activation: Callable[[Tensor], Tensor] = functional.silu
    """within the gated networks"""


class Attention(nn.Module):
    """Projections of a layer."""

    def __init__(self, shape: Shape, width_of_keys: int) -> None:
        super().__init__()
        keys = shape.shared * shape.size
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.size, shape.biased)
        self.k_proj = nn.Linear(width_of_keys, keys, shape.biased)
        self.v_proj = nn.Linear(width_of_keys, keys, shape.biased)
        self.o_proj = nn.Linear(shape.heads * shape.size, shape.width, shape.biased)

    def queries(self, hidden: Tensor, position: Tensor) -> Tensor:
        """``[N, S, heads, size]``, rotated."""
        return rotated(_heads(self.q_proj(hidden), self.shape.size), position)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Return ``[N, S, width]``; ``mask [N, S, P]`` is True where a query sees a key."""
        mixed = functional.scaled_dot_product_attention(
            query.float().transpose(1, 2),
            key.float().transpose(1, 2),
            value.float().transpose(1, 2),
            attn_mask=mask.unsqueeze(1),
            enable_gqa=self.shape.heads != self.shape.shared,
        )
        attended: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2).to(value.dtype))
        return attended


class Perceptron(nn.Module):
    """A gated network of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, biased = shape.width, shape.inner, shape.biased_mlp
        self.activation = shape.activation
        self.gate_proj = nn.Linear(width, inner, biased)
        self.up_proj = nn.Linear(width, inner, biased)
        self.down_proj = nn.Linear(inner, width, biased)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., width]``"""
        mixed: Tensor = self.down_proj(
            self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return mixed


class Layer(nn.Module):
    """A layer of the trunk, or, with what the trunk's layer made, of the expert.

    ``across``: keys and values are made of the trunk's alone.
    """

    def __init__(self, shape: Shape, *, across: bool = False) -> None:
        super().__init__()
        self.across = across
        self.input_layernorm = shape.norm(shape.width, shape.epsilon)
        width = shape.shared * shape.size if across else shape.width
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = shape.norm(shape.width, shape.epsilon)
        self.mlp = Perceptron(shape)

    def forward(
        self,
        hidden: Tensor,
        position: Tensor,
        mask: Tensor,
        seen: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states ``[N, S, width]``, and keys and values of these positions."""
        attention = self.self_attn
        normed = self.input_layernorm(hidden)
        query = attention.queries(normed, position)
        size = attention.shape.size
        # Copies, so that no view is returned: FSDP2 loses its hooks on those.
        if self.across and seen is not None:
            key, value = (
                _heads(projection(one.flatten(2)), size).clone()
                for projection, one in zip((attention.k_proj, attention.v_proj), seen, strict=True)
            )
        else:
            key = rotated(_heads(attention.k_proj(normed), size), position)
            value = _heads(attention.v_proj(normed), size).clone()
            if seen is not None:
                key, value = torch.cat([seen[0], key], 1), torch.cat([seen[1], value], 1)
        hidden = hidden + attention(query, key, value, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


def _heads(projected: Tensor, size: int) -> Tensor:
    """``[N, S, heads * size]`` -> ``[N, S, heads, size]``"""
    return projected.view(*projected.shape[:2], -1, size)


def rotated(heads: Tensor, position: Tensor) -> Tensor:
    """Rotate ``[N, S, heads, size]`` by positions ``[N, S]`` (rotary embeddings, in halves)."""
    half = heads.shape[-1] // 2
    power = torch.arange(half, dtype=torch.float32, device=heads.device) / half
    angle = (position.float().unsqueeze(-1) / LONGEST**power).unsqueeze(2)
    sine, cosine = angle.sin(), angle.cos()
    first, second = heads.float().chunk(2, -1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, -1).to(heads.dtype)


class Text(nn.Module):
    """Embeddings and layers of a language model; of the expert, no embeddings."""

    def __init__(self, layers: list[Layer], shape: Shape, tokens: int = 0) -> None:
        super().__init__()
        if tokens:
            self.embed_tokens = nn.Embedding(tokens, shape.width)
        self.layers = nn.ModuleList(layers)
        self.norm = shape.norm(shape.width, shape.epsilon)


class Read(NamedTuple):
    """What a trunk makes of embedded images and instructions."""

    hidden: Tensor
    """``[N, P, hidden]``"""
    keys: list[Tensor]
    """of each layer, ``[N, P, heads, size]``"""
    values: list[Tensor]


class Trunk(nn.Module):
    """Vision encoder, connector and layers of a language model.

    Args:
        text: embeddings and layers.
        vision: pictures ``pixel_values`` -> ``last_hidden_state``.
        connector: from there to the language model's hidden size.
        scale: of embedded pictures.
    """

    def __init__(self, text: Text, vision: nn.Module, connector: nn.Module, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.text_model = text
        self.vision_model = vision
        self.connector = connector

    def embed_image(self, image: Tensor) -> Tensor:
        """``[N, tokens, hidden]`` of pictures ``[N, 3, H, W]`` in [-1, 1]."""
        features = self.vision_model(pixel_values=image).last_hidden_state
        embedded: Tensor = self.connector(features)
        return embedded * self._scale

    def embed_text(self, tokens: Tensor) -> Tensor:
        """``[N, tokens, hidden]``"""
        embedded: Tensor = self.text_model.embed_tokens(tokens)
        return embedded * math.sqrt(embedded.shape[-1])

    def forward(self, embedded: Tensor, there: Tensor, mask: Tensor) -> Read:
        """Read ``[N, P, hidden]``; ``mask [N, P, P]`` is True where a position sees another."""
        position = there.cumsum(1).sub(1).clamp(min=0)
        keys, values = [], []
        hidden = embedded
        for layer in self.text_model.layers:
            hidden, key, value = layer(hidden, position, mask)
            keys.append(key)
            values.append(value)
        return Read(hidden, keys, values)


class ExpertFlow(nn.Module, ABC):
    """Observations -> what the expert sees; actions with noise -> their velocity.

    Time and velocity are as in ``flow_action``: noise at 0, actions at 1.

    Args:
        settings: of the folder.
        hidden: numbers of an embedded state, and of `Seen.summary`.
    """

    names: ClassVar[dict[str, str]]
    """beginnings of our names of parameters, and LeRobot's"""
    causal: ClassVar[bool]
    """whether an action sees none of those after it"""

    def __init__(
        self, settings: FolderSettings, trunk: Trunk, expert: Text, width: int, hidden: int
    ) -> None:
        super().__init__()
        self.width, self.hidden = width, hidden
        self._periods = (settings.min_period, settings.max_period)
        self.trunk, self.expert = trunk, expert
        numbers = settings.max_action_dim
        self.state_proj = nn.Linear(settings.max_state_dim, hidden)
        self.action_in_proj = nn.Linear(numbers, width)
        self.action_out_proj = nn.Linear(width, numbers)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @classmethod
    @abstractmethod
    def built(cls, settings: Any, language: Path, tensors: Mapping[str, Tensor]) -> ExpertFlow:
        """Build the model of a folder, with any weights; parameters may be on the device ``meta``,
        buffers not. Raises `ValueError` for ``tensors`` from which its sizes cannot be read."""

    @classmethod
    def lerobot_names(cls, name: str) -> tuple[str, ...]:
        """Return what LeRobot calls a parameter: the usual name first, then what else a folder may
        call it."""
        ours = next(start for start in cls.names if name.startswith(start))
        return (cls.names[ours] + name[len(ours) :],)

    @abstractmethod
    def prepared(self, image: Tensor) -> Tensor:
        """Return pictures ``[N, 3, H, W]`` in [0, 1] as the trunk takes them."""

    @abstractmethod
    def read(self, embedded: Tensor, there: Tensor, state: Tensor) -> Seen:
        """Read embedded images and instructions ``[N, P, F]``, and states ``[N, 1, hidden]``."""

    def see(self, images: list[Tensor], tokens: Tensor, written: Tensor, state: Tensor) -> Seen:
        """Read images ``[N, H, W, 3]`` (uint8), tokens ``[N, T]`` with what of them is written, and
        states ``[N, D]``, normalised."""
        floats = [one.movedim(-1, 1).to(torch.float32) / 255.0 for one in images]
        parts = [self.trunk.embed_image(self.prepared(one)) for one in floats]
        there = [part.new_ones(part.shape[:2], dtype=torch.bool) for part in parts]
        parts.append(self.trunk.embed_text(tokens))
        there.append(written)
        padded = functional.pad(state, (0, self.state_proj.in_features - state.shape[1]))
        embedded = self.state_proj(padded).unsqueeze(1)
        return self.read(torch.cat(parts, 1), torch.cat(there, 1), embedded)

    def forward(self, seen: Seen, x: Tensor, time: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity ``[N, H, D]`` of actions ``x [N, H, D]`` at a time (of all, or
        ``[N]``), and the expert's hidden states ``[N, H, width]``."""
        hidden = self._embedded(x, time)
        count, length, _ = hidden.shape
        later = torch.arange(length, device=x.device)
        there = seen.there.unsqueeze(1).expand(-1, length, -1)
        every = torch.ones(length, length, dtype=torch.bool, device=x.device)
        among = every.tril() if self.causal else every
        both = torch.cat([there, among.expand(count, -1, -1)], 2)
        alone = later.expand(count, -1)
        behind = alone + seen.there.sum(1, keepdim=True)
        for layer, key, value in zip(self.expert.layers, seen.keys, seen.values, strict=True):
            if layer.across:
                hidden, _, _ = layer(hidden, alone, there, (key, value))
            else:
                hidden, _, _ = layer(hidden, behind, both, (key, value))
        hidden = self.expert.norm(hidden)
        # LeRobot's time runs from 1 to 0, and so its velocity points to the noise.
        return -self.action_out_proj(hidden.float()).float(), hidden

    def _embedded(self, x: Tensor, time: float | Tensor) -> Tensor:
        action = self.action_in_proj(x)
        theirs = 1.0 - torch.as_tensor(time, dtype=torch.float64, device=x.device)
        least, largest = self._periods
        steps = torch.linspace(0, 1, self.width // 2, dtype=torch.float64, device=x.device)
        angle = theirs.expand(len(x)).unsqueeze(1) * (
            2.0 * math.pi / (least * (largest / least) ** steps)
        )
        waves = torch.cat([angle.sin(), angle.cos()], 1).to(action.dtype)
        joined = torch.cat([action, waves.unsqueeze(1).expand_as(action)], 2)
        embedded: Tensor = self.action_time_mlp_out(
            functional.silu(self.action_time_mlp_in(joined))
        )
        return embedded


def scaled(image: Tensor, width: int, height: int) -> Tensor:
    """Scale pictures ``[N, C, H, W]`` until one side fits."""
    ratio = max(image.shape[3] / width, image.shape[2] / height)
    size = (int(image.shape[2] / ratio), int(image.shape[3] / ratio))
    return functional.interpolate(image, size, mode="bilinear", align_corners=False)


def load_weights(model: ExpertFlow, tensors: Mapping[str, Tensor]) -> None:
    """Take the weights of a folder. Raises `ValueError` where one is missing, or of another
    shape."""
    taken: dict[str, Tensor] = {}
    for name, one in model.state_dict().items():
        names = model.lerobot_names(name)
        found = next((tensors[theirs] for theirs in names if theirs in tensors), None)
        if found is None or found.shape != one.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ValueError(f"its weights do not fit: {names[0]} {what}, not {list(one.shape)}")
        # A copy: what was loaded may be the file itself.
        taken[name] = found.to(torch.float32, copy=True)
    model.load_state_dict(taken, assign=True)


def loaded(
    kind: type[ExpertFlow], settings: FolderSettings, language: Path, weights: Path
) -> ExpertFlow:
    """Build the model of a folder. Raises `ValueError` for weights that do not fit."""
    from safetensors.torch import load_file

    tensors = load_file(weights)
    # Weights are drawn for nothing else than to be replaced: of a pi0, three billion.
    with one_at_a_time, torch.device("meta"):
        built = kind.built(settings, language, tensors)
    load_weights(built, tensors)
    if settings.train_expert_only:
        built.trunk.requires_grad_(False)
    elif settings.freeze_vision_encoder:
        built.trunk.vision_model.requires_grad_(False)
    return built
