"""A SmolVLA: the first layers of a small vision-language model, and an action expert beside them.

::

    images | instruction | state --trunk--> keys and values of each layer      (once)
                                               |
    actions with noise, time ----expert--------+------> velocity               (at each step)

Images and instruction see each other, the state sees all; of the expert, every other layer attends
to the trunk's keys and values and to the actions before, the others to the trunk's alone, through
projections of their own (Shukor et al. 2025, "SmolVLA", arXiv 2506.01844). Parameters below
``trunk`` and ``expert`` have Hugging Face's names.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.building import one_at_a_time
from rlinf_async.backends.policies.smolvla.folder import SmolVlaSettings

LONGEST: Final = 10_000.0
"""of the wavelengths of rotary positions, over 2 pi, whatever the model's own configuration says"""
NAMES: Final = {
    "trunk.": "model.vlm_with_expert.vlm.model.",
    "expert.": "model.vlm_with_expert.lm_expert.",
    "state_proj.": "model.state_proj.",
    "action_in_proj.": "model.action_in_proj.",
    "action_out_proj.": "model.action_out_proj.",
    "action_time_mlp_in.": "model.action_time_mlp_in.",
    "action_time_mlp_out.": "model.action_time_mlp_out.",
}
"""beginnings of our names of parameters, and LeRobot's"""


def lerobot_name(name: str) -> str:
    """Return LeRobot's name of a parameter of `SmolVla`."""
    ours = next(start for start in NAMES if name.startswith(start))
    return NAMES[ours] + name[len(ours) :]


class Seen(NamedTuple):
    """What the expert sees of ``N`` observations."""

    keys: list[Tensor]
    """of each layer, ``[N, P, heads, size]``"""
    values: list[Tensor]
    there: Tensor
    """``[N, P]``, False for padding"""
    summary: Tensor
    """``[N, hidden]``: the trunk's last hidden state, at the state"""


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
    biased: bool
    biased_mlp: bool


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
        self.gate_proj = nn.Linear(width, inner, biased)
        self.up_proj = nn.Linear(width, inner, biased)
        self.down_proj = nn.Linear(inner, width, biased)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., width]``"""
        mixed: Tensor = self.down_proj(
            functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return mixed


class Layer(nn.Module):
    """A layer of the trunk, or, with what the trunk's layer made, of the expert.

    ``across``: keys and values are made of the trunk's alone.
    """

    def __init__(self, shape: Shape, *, across: bool = False) -> None:
        super().__init__()
        self.across = across
        self.input_layernorm = nn.RMSNorm(shape.width, shape.epsilon)
        width = shape.shared * shape.size if across else shape.width
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.epsilon)
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
        if self.across and seen is not None:
            key, value = (
                _heads(projection(one.flatten(2)), size)
                for projection, one in zip((attention.k_proj, attention.v_proj), seen, strict=True)
            )
        else:
            key = rotated(_heads(attention.k_proj(normed), size), position)
            # A copy, so that no view is returned: FSDP2 loses its hooks on those.
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
        self.norm = nn.RMSNorm(shape.width, shape.epsilon)


class Trunk(nn.Module):
    """Vision encoder, connector and the first layers of the language model."""

    def __init__(self, config: Any, layers: int, shape: Shape) -> None:
        super().__init__()
        library: Any = importlib.import_module("transformers.models.smolvlm.modeling_smolvlm")
        # The longest list of layers is sharded by layer; of several, the first.
        self.text_model = Text(
            [Layer(shape) for _ in range(layers)], shape, config.text_config.vocab_size
        )
        self.vision_model = library.SmolVLMVisionTransformer._from_config(config.vision_config)
        self.connector = library.SmolVLMConnector(config)

    def embed_image(self, image: Tensor) -> Tensor:
        """``[N, tokens, hidden]`` of pictures ``[N, 3, H, W]`` in [-1, 1]."""
        features = self.vision_model(pixel_values=image).last_hidden_state
        embedded: Tensor = self.connector(features)
        return embedded * math.sqrt(embedded.shape[-1])

    def embed_text(self, tokens: Tensor) -> Tensor:
        """``[N, tokens, hidden]``"""
        embedded: Tensor = self.text_model.embed_tokens(tokens)
        return embedded * math.sqrt(embedded.shape[-1])

    def forward(self, embedded: Tensor, there: Tensor) -> Seen:
        """Read ``[N, P, hidden]``, the state last."""
        mask = there.unsqueeze(1).repeat(1, there.shape[1], 1)
        mask[:, :-1, -1] = False
        position = there.cumsum(1).sub(1).clamp(min=0)
        keys, values = [], []
        hidden = embedded
        for layer in self.text_model.layers:
            hidden, key, value = layer(hidden, position, mask)
            keys.append(key)
            values.append(value)
        return Seen(keys, values, there, self.text_model.norm(hidden[:, -1]))


class SmolVla(nn.Module):
    """Observations -> what the expert sees; actions with noise -> their velocity.

    Time and velocity are as in ``flow_action``: noise at 0, actions at 1.

    Args:
        settings: of the folder.
        model: folder of the vision-language model's configuration.
    """

    def __init__(self, settings: SmolVlaSettings, model: Path) -> None:
        super().__init__()
        import transformers

        config: Any = transformers.AutoConfig.from_pretrained(model)
        text = config.text_config
        layers = settings.num_vlm_layers
        layers = min(layers, text.num_hidden_layers) if layers > 0 else text.num_hidden_layers
        shape = _shape(text, text.hidden_size, text.intermediate_size)
        self.width = int(text.hidden_size * settings.expert_width_multiplier)
        """of the expert"""
        self.hidden = int(text.hidden_size)
        self._periods = (settings.min_period, settings.max_period)
        self._resized = settings.resize_imgs_with_padding
        own = _shape(text, self.width, _inner(self.width))
        self.trunk = Trunk(config, layers, shape)
        every = settings.self_attn_every_n_layers
        crossing = "cross" in settings.attention_mode
        across = [crossing and not (every > 0 and i % every == 0) for i in range(layers)]
        self.expert = Text([Layer(own, across=one) for one in across], own)
        numbers = settings.max_action_dim
        self.state_proj = nn.Linear(settings.max_state_dim, self.hidden)
        self.action_in_proj = nn.Linear(numbers, self.width)
        self.action_out_proj = nn.Linear(self.width, numbers)
        self.action_time_mlp_in = nn.Linear(2 * self.width, self.width)
        self.action_time_mlp_out = nn.Linear(self.width, self.width)

    def see(self, images: list[Tensor], tokens: Tensor, written: Tensor, state: Tensor) -> Seen:
        """Read images ``[N, H, W, 3]`` (uint8), tokens ``[N, T]`` with what of them is written, and
        states ``[N, D]``, normalised."""
        parts = [self.trunk.embed_image(self._prepared(one)) for one in images]
        there = [part.new_ones(part.shape[:2], dtype=torch.bool) for part in parts]
        parts.append(self.trunk.embed_text(tokens))
        there.append(written)
        padded = functional.pad(state, (0, self.state_proj.in_features - state.shape[1]))
        parts.append(self.state_proj(padded).unsqueeze(1))
        there.append(written.new_ones(len(written), 1))
        seen: Seen = self.trunk(torch.cat(parts, 1), torch.cat(there, 1))
        return seen

    def forward(self, seen: Seen, x: Tensor, time: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity ``[N, H, D]`` of actions ``x [N, H, D]`` at a time (of all, or
        ``[N]``), and the expert's hidden states ``[N, H, width]``."""
        hidden = self._embedded(x, time)
        count, length, _ = hidden.shape
        later = torch.arange(length, device=x.device)
        there = seen.there.unsqueeze(1).expand(-1, length, -1)
        causal = (later.unsqueeze(0) <= later.unsqueeze(1)).expand(count, -1, -1)
        both = torch.cat([there, causal], 2)
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

    def _prepared(self, pixels: Tensor) -> Tensor:
        image = pixels.movedim(-1, 1).to(torch.float32) / 255.0
        if self._resized is not None:
            image = resized(image, *self._resized)
        return image * 2.0 - 1.0


def resized(image: Tensor, width: int, height: int) -> Tensor:
    """Scale pictures ``[N, C, H, W]`` until one side fits, and fill with 0 left and above."""
    ratio = max(image.shape[3] / width, image.shape[2] / height)
    size = (int(image.shape[2] / ratio), int(image.shape[3] / ratio))
    image = functional.interpolate(image, size, mode="bilinear", align_corners=False)
    return functional.pad(image, (max(0, width - size[1]), 0, max(0, height - size[0]), 0))


def load_weights(model: SmolVla, tensors: Mapping[str, Tensor]) -> None:
    """Take the weights of a folder. Raises `ValueError` where one is missing, or of another
    shape."""
    wanted = model.state_dict()
    taken: dict[str, Tensor] = {}
    for name, one in wanted.items():
        theirs = lerobot_name(name)
        found = tensors.get(theirs)
        if found is None or found.shape != one.shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ValueError(f"its weights do not fit: {theirs} {what}, not {list(one.shape)}")
        taken[name] = found.to(torch.float32)
    model.load_state_dict(taken)


def loaded(settings: SmolVlaSettings, model: Path, weights: Path) -> SmolVla:
    """Build the model of a folder. Raises `ValueError` for weights that do not fit."""
    from safetensors.torch import load_file

    with one_at_a_time:
        built = SmolVla(settings, model)
    load_weights(built, load_file(weights))
    if settings.train_expert_only:
        built.trunk.requires_grad_(False)
    elif settings.freeze_vision_encoder:
        built.trunk.vision_model.requires_grad_(False)
    built.state_proj.requires_grad_(settings.train_state_proj)
    return built


def _shape(text: Any, width: int, inner: int) -> Shape:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        width=width,
        inner=inner,
        heads=text.num_attention_heads,
        shared=text.num_key_value_heads,
        size=size,
        epsilon=text.rms_norm_eps,
        biased=bool(getattr(text, "attention_bias", False)),
        biased_mlp=bool(getattr(text, "mlp_bias", False)),
    )


def _inner(width: int) -> int:
    """Width within the expert's perceptrons: 8/3 of its own, up to a multiple of 256."""
    return -(-4 * (2 * width // 3) // 256) * 256
