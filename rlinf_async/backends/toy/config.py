"""Settings of the toy engine and the toy trainer."""

from __future__ import annotations

import msgspec

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.config.counts import check_bounds


class ToyEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model of an engine that batches continuously.

    One step makes one token for every running sequence and takes ``seconds_per_step +
    running * seconds_per_sequence``.
    """

    slots: int = 64
    """sequences that run at a time; more wait, by priority"""
    seconds_per_step: float = 0.01
    seconds_per_sequence: float = 0.0
    """seconds that each running sequence adds to a step"""
    load_seconds: float = 0.0
    """seconds that loading weights takes; nothing runs meanwhile"""
    mean_tokens: float = 32.0
    """mean tokens of a response, before ``max_tokens`` of the request cuts it"""
    tail: float = 0.0
    """sigma of the log-normal lengths: 0 makes all equally long, 1 a few very long"""
    context: int = 32768
    """tokens of a prompt and its response"""
    vocabulary: int = 100

    def __post_init__(self) -> None:
        check_bounds(self, "slots", "context", "mean_tokens", least=1)
        check_bounds(self, "vocabulary", least=2)
        seconds = ("seconds_per_step", "seconds_per_sequence", "load_seconds")
        check_bounds(self, *seconds, "tail", least=0)


class ToyTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model of a trainer."""

    seconds_per_token: float = 1e-4
    """seconds of a forward and backward pass, prompts included"""
    seconds_per_step: float = 0.01
    """seconds of an optimizer step"""
    seconds_to_move: float = 0.0
    """seconds of an offload, and of an onload"""
    weight_bytes: int = 4096

    def __post_init__(self) -> None:
        check_bounds(self, "seconds_per_token", "seconds_per_step", "seconds_to_move", least=0)
        check_bounds(self, "weight_bytes", least=1)


class ToyPolicyConfig(ToyTrainerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model of a trainer of a policy."""

    loss: LanguageLossConfig = LanguageLossConfig()
    """settings of the weights of ``off_policy``; the toy computes no loss"""
