"""Settings of an episode worker."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from rlinf_async.config.counts import check_bounds
from rlinf_async.episodes import Limits
from rlinf_async.episodes.endpoint import EndpointConfig


class EpisodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Samples in which the model acts in several turns: ``[episode]``."""

    run: str = ""
    """coroutine function of one argument, an `Episode`: ``"file.py:name"``, ``"module:name"``, or
    the name that a package gives it, or that of an environment; left out: each sample is one
    answer"""
    environment: dict[str, Any] = {}
    """settings of the environment that ``run`` names"""
    max_turns: int = 8
    """most turns of an episode, over all of its branches"""
    max_tokens: int = 2048
    """most tokens of an episode's longest branch, prompt and results of tools included"""
    seconds: float = 120.0
    """longest time of the agent and its tools. The clock stands still while the model draws an
    answer: how long that takes depends on engines and learners, not on the episode"""
    on_timeout: Literal["fail", "score"] = "fail"
    """what an episode comes to that takes longer: ``fail``: it is left out of training, and
    counted; ``score``: the verifier judges it as it stands"""
    concurrent: int = 256
    """episodes that a worker has open at a time"""
    tools: str = "hermes"
    """format in which the model writes calls of tools: ``hermes``, ``llama``, ``pythonic``,
    ``mistral``, ``deepseek``, or ``"file.py:parser"``"""
    on_tool_failure: Literal["tell", "fail"] = "tell"
    """what becomes of a tool that raises, hangs, dies or floods, unless it says so itself:
    ``tell``: the model reads of it; ``fail``: the episode fails"""
    sticky: bool = True
    """whether a turn goes to the rollout worker that drew the one before, whose prefix cache has
    its context, unless that has no room while another one has"""
    endpoint: EndpointConfig = EndpointConfig()
    """where agents that speak HTTP find their episode"""
    on_rewrite: Literal["fail", "branch", "keep"] = "fail"
    """what becomes of an episode whose chat template writes earlier answers otherwise once there
    are later ones: ``fail``; ``branch``: it goes on in a further branch of the sample, which the
    model reads as the template writes it now; ``keep``: what the model has read stays as it is"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_turns", "concurrent", least=1)
        check_bounds(self, "max_tokens", least=2)
        if not 0.0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}; it must be a number of seconds above 0")

    def limits(self, answer: int) -> Limits:
        """Return the limits of an episode whose answers may have this number of tokens each."""
        return Limits(turns=self.max_turns, tokens=self.max_tokens, answer=answer)
