"""What a language-model run sends: requests, samples, their scores, groups to train on.

::

    Request       source    -> rollout     one sample to generate (or to go on with)
    Sample        rollout   -> inference   finished; each goes on at once, in the order they finish
                  inference -> reward      with previous and reference log-probs, where asked for
    ScoredSample  reward    -> collector   with its outcome: scored, rejected or failed
    SampleGroup   collector -> actor       every sample of one prompt, by key of the DP rank
    WeightsTaken  rollout   -> actor       an engine serves the weights of a version, checked
    LanguageTrainReport  actor, critic -> runtime   what one rank trained in one iteration

Shapes are written with ``P`` prompt tokens and ``R`` response tokens. Log-probs are of the
distribution that was sampled from: after temperature, top-k and top-p.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Floats

Tokens = NDArray[np.int32]
Versions = NDArray[np.int32]
Mask = NDArray[np.bool_]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one sample are drawn."""

    max_tokens: int = 128
    """of the response, a partial one's own included"""
    temperature: float = 1.0
    """0: the most likely token each time (greedy); log-probs are then those of temperature 1"""
    top_k: int = 0
    """0: off"""
    top_p: float = 1.0
    """1: off"""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: off)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task, as the data gave it."""

    index: int
    """its position in the data, counted over epochs"""
    text: str
    """what the model reads, after the chat template"""
    token_ids: Tokens
    """``[P]``"""
    verifier: str
    """the name of what scores the response"""
    reference: str
    """what the verifier compares with: the right answer, or JSON of the verifier's own"""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a model made for a prompt so far."""

    token_ids: Tokens
    """``[R]``, the end-of-sequence token included where it was drawn"""
    log_prob: Floats
    """``[R]``"""
    version: Versions
    """``[R]``: the weights that made each token"""
    finish: Literal["stop", "length", "abort"]
    """``stop``: the model ended it; ``length``: max_tokens; ``abort``: it can be gone on with"""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """source -> rollout: one sample to generate."""

    group: int
    """counts the prompts that were admitted in this run; samples of one prompt share it"""
    index: int
    """of this sample in its group, below ``group_size``"""
    group_size: int
    iteration: int
    """the training step that it was admitted for"""
    min_version: int
    """the oldest weights that may make a token of it: ``iteration - max_staleness``, at least 0"""
    prompt: Prompt
    sampling: Sampling
    seed: int
    """of this sample's random numbers, where the engine can seed a single request"""
    priority: int = 0
    """lower goes first"""
    partial: Generated | None = None
    """tokens of an earlier life that was interrupted: generation goes on after them"""
    evaluation: bool = False

    @property
    def name(self) -> str:
        """Unique in a run: ``group/index``."""
        return f"{self.group}/{self.index}"


class Sample(msgspec.Struct, kw_only=True):
    """rollout -> inference -> reward: a finished response."""

    request: Request
    """without its ``partial``, whose tokens are in ``generated``"""
    generated: Generated
    text: str
    """of the response, special tokens left out"""
    rollout_rank: int
    prev_log_prob: Floats | None = None
    """``[R]``, by the actor's forward under weights at least as new as the newest token, and as
    those that training begins with where the run is on-policy; one version for all tokens"""
    ref_log_prob: Floats | None = None
    """``[R]``, by the actor's forward under the reference weights"""
    value: Floats | None = None
    """``[R]``, by the critic: of the state before each response token"""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The verifier judged the response."""

    reward: float
    parts: dict[str, float] = {}
    """what the reward is made of, for metrics"""


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The verifier refuses to judge: it is left out of training, and counted."""

    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The verifier broke (raised, timed out, died, returned no number): left out, and counted."""

    error: str


Outcome = Scored | Rejected | Failed


class ScoredSample(msgspec.Struct, kw_only=True):
    """reward -> collector."""

    sample: Sample
    outcome: Outcome
    seconds: float = 0.0
    """that scoring took, waiting for a free process included"""


class TrainingSample(msgspec.Struct, kw_only=True):
    """One sample as the trainer sees it."""

    group: int
    index: int
    prompt_ids: Tokens
    """``[P]``"""
    response_ids: Tokens
    """``[R]``"""
    loss_mask: Mask
    """``[R]``: tokens that the loss is made of; none of a sample that was not scored"""
    log_prob: Floats
    """``[R]``: behaviour log-probs, as sampled"""
    version: Versions
    """``[R]``"""
    temperature: float
    """the logits are divided by it before log-probs are taken"""
    reward: float
    """NaN where it was not scored"""
    scored: bool
    prev_log_prob: Floats | None = None
    """``[R]``"""
    ref_log_prob: Floats | None = None
    """``[R]``"""
    value: Floats | None = None
    """``[R]``"""
    advantage: Floats | None = None
    """``[R]``; filled by `compute_advantages_and_returns`, left alone where it is there"""
    returns: Floats | None = None
    """``[R]``: the target of the critic"""

    @property
    def tokens(self) -> int:
        """``P + R``: what a forward pass over it costs."""
        return len(self.prompt_ids) + len(self.response_ids)


class SampleGroup(msgspec.Struct, kw_only=True):
    """collector -> actor: every sample of one prompt."""

    iteration: int
    group: int
    samples: list[TrainingSample]


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """rollout -> actor: an engine now serves this version."""

    rollout_rank: int
    version: int
    checksum: int
    """of the `WeightUpdate`, after the engine compared it with what arrived"""
    seconds: float
    """from its arrival until the engine served it"""


class LanguageTrainReport(msgspec.Struct, kw_only=True):
    """actor, critic -> runtime: one rank trained its share of an iteration."""

    iteration: int
    version: int
    """of the weights that came out"""
    rank: int
    metrics: dict[str, float]
    """means over the optimizer steps: loss, entropy, approx_kl, grad_norm, lr, ..."""
    steps: int
    """optimizer steps that were asked for; ``metrics["skipped"]`` is the share left out"""
    samples: int
    """in this rank's share, those that were not scored included"""
    unscored: int
    """samples that were left out: rejected or failed"""
    groups: int
    groups_without_signal: int
    """groups whose scored samples all have the same reward: nothing can be learnt from them"""
    prompt_tokens: int
    response_tokens: int
    reward_mean: float
    """of the scored samples; NaN where there are none"""
    lag_mean: float
    """versions between the weights that made a token and those that were trained, over tokens"""
    lag_max: int
    wait_seconds: float
    """in which it stood still until samples came: before it trained, or, pipelined, in between"""
    train_seconds: float
    """of the iteration once it had begun; pipelined, those of waiting are among them"""
    checkpoint: str | None = None
    """folder of the newest checkpoint whose part this rank has written since its last report"""
    ranks: int = 1
    """that train the next iteration, and share its data: 0 .. ranks - 1"""
