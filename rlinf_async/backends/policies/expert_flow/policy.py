"""The flow of a folder carries noise to ``H`` actions; the first ``k`` of them are executed.

The steps, the noise in them, cloning and log-probs are those of ``flow_action``. What is new is
that a folder's flow carries more numbers than are executed: actions behind the first ``k``, and
numbers that only fill an action up (``max_action_dim``). Noise is added to the executed numbers
alone; the others follow without any, so that a chain, which has the executed numbers after each
step and where the others began, says all. Its log-prob is exact: the others are integrated again,
one step after the other, with gradients.

Observations and actions are in the environment's units, which the folder's statistics normalise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_async.backends.policies.base import (
    HALF_LOG_TWO_PI,
    Evaluation,
    Policy,
    Step,
)
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.expert_flow.folder import (
    WEIGHTS,
    Affine,
    FolderSettings,
    misfit,
    read_folder,
)
from rlinf_async.backends.policies.expert_flow.model import ExpertFlow, Seen, loaded
from rlinf_async.backends.policies.expert_flow.writing import write_folder
from rlinf_async.backends.policies.flow_action.noise import StepNoise
from rlinf_async.backends.policies.flow_action.policy import FlowActionPolicy
from rlinf_async.backends.policies.mlp import run_mlp, tanh_mlp
from rlinf_async.backends.policies.vision_language.policy import add_adapters
from rlinf_async.messages.spaces import STATE

ADAPTED = r".*\.(q|k|v|o|gate|up|down)_proj"
"""linear layers of the expert that get adapters"""

Observation = Mapping[str, Tensor]


class _Run(NamedTuple):
    """An integration with noise."""

    chain: list[Tensor]
    """executed numbers ``[N, k * A]`` before the first step and after each"""
    log_prob: Tensor
    """``[N, k * A]``, summed over the steps"""
    entropy: Tensor


class ExpertFlowPolicy(Policy[Observation]):
    """Actions ``[N, k * A]`` in the environment's units; log-probs and entropies ``[N, k * A]``,
    values ``[N, k]``, or as many as log-probs with ``token_values``.

    A chain ``[N, (S + 1) * k * A + rest]`` is what is executed of ``x_0 ... x_S``, normalised, and
    the rest of ``x_0``.
    """

    reads: ClassVar[type[FolderSettings]]
    flow: ClassVar[type[ExpertFlow]]
    levels = ("token", "action", "chunk")
    normalizes = False

    @classmethod
    def misfit(cls, config: PolicyConfig) -> str:
        return misfit(config, cls.reads)

    @classmethod
    def entropy_misfit(cls, config: PolicyConfig) -> str:
        return FlowActionPolicy.entropy_misfit(config)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        own = config.vision_language
        found = read_folder(own.folder, self.reads)
        self._folder, self.settings = own.folder, found.settings
        self.steps, self.executed = config.flow.steps, max(config.action_chunk, 1)
        self.numbers = config.action_size // self.executed
        self.chunk, self.padded = self.settings.chunk_size, self.settings.max_action_dim
        self.size = self.executed * self.numbers
        """numbers that are executed: ``k * A``"""
        self.drawn = self.chunk * self.padded
        """numbers that the flow carries: ``H * D``"""
        self._noise = StepNoise(config.flow)
        shown = {one.name for one in config.sees.of_kind("image")}
        self._images = [name for name in found.parts.values() if name in shown]
        [text] = config.sees.of_kind("text")
        self._text = text.name
        self._tokens = _Tokens(str(found.language), self.settings.tokenizer_max_length)
        self._affine("state", found.state)
        self._affine("action", found.action)
        inside = torch.zeros(self.chunk, self.padded, dtype=torch.bool)
        inside[: self.executed, : self.numbers] = True
        self.register_buffer("_inside", inside, persistent=False)
        weights = Path(own.folder) / WEIGHTS
        self.model = loaded(self.flow, self.settings, found.language, weights)
        if own.lora.rank:
            self.model.trunk.requires_grad_(False)
            add_adapters(self.model.expert, own.lora, ADAPTED)
        width, hidden = self.model.width, config.hidden_sizes
        said = (width, *hidden, self.numbers)
        self.deviation = tanh_mlp(said, output_gain=0.01) if self._noise.learnt else None
        values = self.size if config.token_values else self.executed
        self.critic = tanh_mlp((self.model.hidden, *hidden, values), output_gain=1.0)

    # -- what a policy does -------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Observation, generator: torch.Generator | None = None) -> Step:
        seen = self.features(self.normalized(observation))
        count, device = len(seen.summary), seen.summary.device
        x = torch.randn((count, self.drawn), generator=generator, device=device)
        noises = torch.randn((self.steps, count, self.size), generator=generator, device=device)
        run = self._run(seen, self._whole(x), noises=noises)
        value = run_mlp(self.critic, seen.summary)
        self.require_finite(action=run.chain[-1], log_prob=run.log_prob, value=value)
        rest = self._whole(x)[:, ~self._buffer("inside")]
        chain = torch.cat([*run.chain, rest], 1)
        return Step(self._outside(run.chain[-1]), run.log_prob, value, chain)

    @torch.no_grad()
    def mode(self, observation: Observation) -> Tensor:
        seen = self.features(self.normalized(observation))
        action = self.draw(seen, seen.summary.new_zeros(len(seen.summary), self.drawn))
        self.require_finite(action=action)
        return action

    @torch.no_grad()
    def value(self, observation: Observation) -> Tensor:
        value = run_mlp(self.critic, self.features(self.normalized(observation)).summary)
        self.require_finite(value=value)
        return value

    def features(self, normalized: Observation) -> Seen:
        """Return what expert and value see of an observation, with gradients."""
        images = [normalized[name] for name in self._images]
        images = [one.expand(*one.shape[:3], 3) for one in images]
        tokens, written = self._tokens(normalized[self._text])
        state = normalized.get(STATE)
        if state is None:
            state = tokens.new_zeros(len(tokens), 0, dtype=torch.float32)
        return self.model.see(images, tokens, written, state)

    def predict(self, seen: Seen, noise: Tensor) -> Tensor:
        """Return the ``H`` actions ``[N, H, A]``, in the environment's units, to which the flow
        carries ``noise [N, H * D]``, without noise in its steps."""
        x = self._whole(noise)
        for index in range(self.steps):
            velocity, _ = self.model(seen, x, index / self.steps)
            x = x + velocity / self.steps
        action = x[..., : self.numbers]
        return action * self._buffer("action_scale") + self._buffer("action_shift")

    def draw(self, features: Seen, noise: Tensor) -> Tensor:
        """Return those actions that are executed, ``[N, k * A]``."""
        return self.predict(features, noise)[:, : self.executed].flatten(1)

    def normalized(self, observation: Observation) -> Observation:
        """Normalise the state by the folder's statistics."""
        if STATE not in observation:
            return observation
        state = (observation[STATE] - self._buffer("state_shift")) / self._buffer("state_divisor")
        return {**observation, STATE: state}

    def demonstrated(self, action: Tensor, generator: np.random.Generator) -> tuple[Tensor, ...]:
        """Return the actions ``[N, H * A]``, and noise and time of a point on the path to each,
        ``[N, H * D + 1]``."""
        noise = generator.standard_normal((len(action), self.drawn), np.float32)
        first, second, scale, offset = self.settings.times
        time = 1.0 - (scale * generator.beta(first, second, (len(action), 1)) + offset)
        return action, torch.from_numpy(np.concatenate([noise, time.astype(np.float32)], 1))

    def forward(
        self, normalized: Observation, action: Tensor, point: Tensor | None = None
    ) -> Evaluation:
        """Evaluate chains; with points of `demonstrated`, match the flow to actions instead: minus
        the squared error of the velocity stands for the log-prob of each number."""
        seen = self.features(normalized)
        value = run_mlp(self.critic, seen.summary)
        if point is not None:
            error = self._mismatch(seen, action, point)
            return Evaluation(-error, torch.zeros_like(error), value)
        end = (self.steps + 1) * self.size
        known, rest = action[:, :end], action[:, end:]
        chain = list(known.chunk(self.steps + 1, 1))
        x = known.new_zeros(len(known), self.chunk, self.padded)
        inside = self._buffer("inside").expand_as(x)
        x = x.masked_scatter(inside, chain[0]).masked_scatter(~inside, rest)
        run = self._run(seen, x, chain=chain)
        return Evaluation(run.log_prob, run.entropy, value)

    def graph_misfit(self) -> str:
        return "a vision-language model reads its observations"

    def write_lerobot(self, folder: Path) -> dict[str, Tensor]:
        """Write LeRobot's folder; return the tensors that have no place in it."""
        changes = {self.settings.steps_name: self.steps, "n_action_steps": self.executed}
        write_folder(self.model, Path(self._folder), folder, changes)
        return {
            name: one for name, one in self.state_dict().items() if not name.startswith("model.")
        }

    # -- the flow -----------------------------------------------------------------------------

    def _run(
        self,
        seen: Seen,
        x: Tensor,
        *,
        noises: Tensor | None = None,
        chain: list[Tensor] | None = None,
    ) -> _Run:
        """Integrate from ``x [N, H, D]``, with noise, or along a chain of executed numbers."""
        outside = (0, self.padded - self.numbers, 0, self.chunk - self.executed)
        inside = self._buffer("inside")
        made = [self._executed(x).flatten(1)]
        log_prob = entropy = torch.zeros_like(made[0])
        for index in range(self.steps):
            time = index / self.steps
            velocity, hidden = self.model(seen, x, time)
            said = None
            if self.deviation is not None:
                said = run_mlp(self.deviation, hidden[:, : self.executed]).flatten(1)
            now, drift = self._executed(x).flatten(1), self._executed(velocity).flatten(1)
            at = torch.full_like(now[:, :1], time)
            mean, log_std = self._noise.after(now, drift, at, said)
            if chain is None:
                assert noises is not None
                after = torch.addcmul(mean, noises[index], log_std.exp())
            else:
                after = chain[index + 1]
            noise = (after - mean) * (-log_std).exp()
            log_prob = log_prob - (0.5 * noise.square() + log_std + HALF_LOG_TWO_PI)
            entropy = entropy + log_std + (0.5 + HALF_LOG_TWO_PI)
            made.append(after)
            placed = functional.pad(after.view(len(after), self.executed, self.numbers), outside)
            x = torch.where(inside, placed, x + velocity / self.steps)
        return _Run(made, log_prob, entropy)

    def _mismatch(self, seen: Seen, action: Tensor, point: Tensor) -> Tensor:
        """Squared errors of the velocity on straight paths, ``[N, H * A]``."""
        noise, time = self._whole(point[:, :-1]), point[:, -1]
        inner = action.view(len(action), self.chunk, self.numbers) - self._buffer("action_shift")
        inner = inner / self._buffer("action_divisor")
        target = functional.pad(inner, (0, self.padded - self.numbers))
        x = torch.lerp(noise, target, time.view(-1, 1, 1))
        velocity, _ = self.model(seen, x, time)
        error: Tensor = (velocity - (target - noise))[..., : self.numbers].square()
        return error.flatten(1)

    def _whole(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(len(numbers), self.chunk, self.padded)

    def _executed(self, x: Tensor) -> Tensor:
        return x[:, : self.executed, : self.numbers]

    def _outside(self, executed: Tensor) -> Tensor:
        """Executed numbers ``[N, k * A]`` in the environment's units."""
        actions = executed.reshape(len(executed), self.executed, self.numbers)
        return (actions * self._buffer("action_scale") + self._buffer("action_shift")).flatten(1)

    def _affine(self, name: str, values: Affine) -> None:
        for part, array in values._asdict().items():
            self.register_buffer(f"_{name}_{part}", torch.from_numpy(array.copy()))

    def _buffer(self, name: str) -> Tensor:
        return self.get_buffer(f"_{name}")


class _Tokens:
    """UTF-8 bytes -> tokens of a line, and where there is no padding."""

    def __init__(self, folder: str, most: int) -> None:
        import transformers

        self._words: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._most = most
        self._encoded = lru_cache(maxsize=4096)(self._encode)

    def __call__(self, text: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self._encoded(bytes(row)) for row in text.cpu().numpy()]
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        written = torch.arange(padded.shape[1]) < lengths
        return padded.to(text.device), written.to(text.device)

    def _encode(self, text: bytes) -> tuple[int, ...]:
        line = text.rstrip(b"\0").decode("utf-8", "replace")
        line = line if line.endswith("\n") else f"{line}\n"
        return tuple(self._words(line, truncation=True, max_length=self._most)["input_ids"])
