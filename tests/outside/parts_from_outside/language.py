"""An engine that answers with letters of the prompt, and a trainer that counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.parts import EnginePart, EngineRun, LanguageTrainerPart, Learner
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens, TrainingSample
from rlinf_async.messages.weights import WeightUpdate


class LettersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    length: int = 4


class Letters:
    """Nothing is ever under way: an answer is there at once."""

    max_concurrent = 8

    def __init__(self, config: LettersConfig, seed: int, device: str) -> None:
        self.config = config
        self.version = -1

    def decode(self, token_ids: Tokens) -> str:
        return "".join(chr(ord("a") + int(one) % 26) for one in token_ids)

    async def generate(self, request: Request) -> Generated:
        count = min(self.config.length, request.sampling.max_tokens)
        return Generated(
            token_ids=np.resize(request.prompt.token_ids, count).astype(np.int32),
            log_prob=np.zeros(count, np.float32),
            version=np.full(count, self.version, np.int32),
            finish="stop",
        )

    async def load(self, update: WeightUpdate) -> int:
        self.version = update.version
        return update.checksum

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        return [np.zeros(len(response), np.float32) for _, response in sequences]

    async def so_far(self) -> dict[str, Generated]:
        return {}

    async def abort(self, names: Sequence[str] | None = None) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class LettersPart(EnginePart):
    """Described: made by name alone in the process that uses it."""

    Config = LettersConfig
    factory = "parts_from_outside.language:Letters"
    has_weights = False

    def check(self, run: EngineRun) -> None:
        if run.settings.length > run.sampling.max_tokens:
            raise ConfigError(
                f"length is {run.settings.length}, more than rollout.sampling.max_tokens",
                path=(*run.where, "length"),
            )


class CountingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    times: float = 1.0


class Counting(ToyTrainer):
    """Its loss is the number of tokens."""

    def __init__(self, config: Any, world_size: int, rank: int) -> None:
        super().__init__(config.costs, world_size, rank)
        self.times = config.times

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        counted: list[TrainingSample] = []

        def passing() -> Iterable[MicroBatch]:
            for one in micro_batches:
                counted.extend(one.samples)
                yield one

        found = dict(super().training_step(passing()))
        tokens = sum(len(one.response_ids) for one in counted)
        return found | {"policy_loss": self.times * tokens}


class Made(msgspec.Struct, frozen=True):
    """What a rank is made from."""

    costs: Any
    times: float


class CountingPart(LanguageTrainerPart):
    """Described, with settings and a configuration of its own."""

    Config = CountingConfig
    factory = "parts_from_outside.language:Counting"
    has_weights = False
    collective = False

    def config(self, learner: Learner) -> Made:
        from rlinf_async.backends.toy.config import ToyPolicyConfig

        costs = ToyPolicyConfig(loss=learner.loss, seconds_per_token=0.0, seconds_per_step=0.0)
        return Made(costs, learner.options.times)
