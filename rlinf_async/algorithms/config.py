"""Which advantage and which loss a model is trained with, and their coefficients. Imports no torch.

Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from rlinf_async.config.counts import check_between, check_bounds

KLEstimator = Literal["k1", "k2", "k3"]
OffPolicyCorrection = Literal["none", "truncated", "truncated_sequence", "decoupled", "icepop"]
Divergence = Literal["reverse", "forward", "jsd", "mixed"]
MASKS = ("off_policy_geometric", "off_policy_product", "off_policy_veto")
"""settings that leave out whole samples"""
Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]

OFF_POLICY_CAP = 2.0
"""default upper limit of the weight of what an older policy, or an engine, has sampled"""
OF_CORRECTION = ("off_policy_weight", "off_policy_change", "off_policy_capped")
"""metrics of those weights; no loss of a robot policy may return them"""
LOG_RATIO_LIMIT = 20.0
"""default limit of log-ratios, as in verl: ``exp(20)`` is 4.9e8"""
LARGEST_LOG_RATIO = 80.0
"""highest limit that can be set; ``exp(88.8)`` is infinite in float32"""
K3_LIMIT = 10.0
"""default limit of ``k3``, as in verl"""
DISTIL = "distill"
"""loss that learns from a teacher alone"""
PAIRED = frozenset({"dpo"})
"""losses that compare the samples of pairs"""
WITHOUT_TEACHER = PAIRED | {"ppo", "gspo", "cispo", "sapo", "reinforce", "supervised"}
"""built-in losses that use no teacher; a user's own may"""
WHITENED = frozenset({"gae", "reinforce++", "reinforce++_baseline"})
"""advantages that are normalised over the global batch by default"""


class LanguageAdvantageConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The advantage of a language model's tokens, and the KL in their rewards."""

    name: str = "grpo"
    """``grpo``, ``turn_grpo``, ``rloo``, ``reinforce++``, ``reinforce++_baseline``, ``gae``, or a
    user's own"""
    divide_by_std: bool = True
    """grpo, turn_grpo: divide by the standard deviation of the group; False is Dr. GRPO"""
    gamma: float = 1.0
    """discount per token: gae and reinforce++"""
    gae_lambda: float = 1.0
    normalize: Literal["auto", "none", "batch"] = "auto"
    """tokens over which advantages are normalized: ``batch``: the global batch, all ranks together;
    ``auto``: the same where the named advantage is defined that way (gae, reinforce++ and its
    baseline form)"""
    kl_coefficient: float = 0.0
    """coefficient of the KL to the reference that is subtracted from each token's reward; 0: none
    """
    kl_estimator: KLEstimator = "k1"
    k3_limit: float = K3_LIMIT
    """upper limit of ``k3`` of one token"""

    def __post_init__(self) -> None:
        check_between(self, "gamma", "gae_lambda")
        check_bounds(self, "k3_limit", above=0)
        check_bounds(self, "kl_coefficient", least=0, below=math.inf)

    @property
    def whitens(self) -> bool:
        """Advantages are normalised over the global batch."""
        return self.normalize == "batch" or (self.normalize == "auto" and self.name in WHITENED)


class LanguageLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss of a language model, and its coefficients."""

    name: str = "ppo"
    """``ppo``, ``gspo``, ``cispo``, ``sapo``, ``reinforce``, ``supervised``, ``distill``, or a
    user's own"""
    clip_low: float = 0.2
    """the ratio is clipped at ``1 - clip_low`` from below; 1: not at all"""
    clip_high: float = 0.2
    """the ratio is clipped at ``1 + clip_high`` from above; DAPO: larger than ``clip_low``"""
    dual_clip: float | None = None
    """factor of the limit of a loss with a negative advantage, ``-dual_clip * advantage``; above 1
    """
    sapo_positive: float = 1.0
    """sapo: temperature of the gate where the advantage is positive"""
    sapo_negative: float = 1.05
    """sapo: temperature of the gate where it is not"""
    proximal: Literal["auto", "behaviour", "current", "step"] = "auto"
    """denominator of the ratio. ``auto``: the recomputed log-probs if the sample has them, else
    those of the engine; ``behaviour``: those of the engine; ``current``: those of the current
    weights, which are the initial ones of the iteration if that is one optimizer step; ``step``:
    those of the weights that the iteration begins with, computed by the trainer itself"""
    off_policy: OffPolicyCorrection = "none"
    """weight of tokens that another policy than the proximal one sampled; ``proximal`` is then
    ``step`` or ``current``, or samples bring log-probs of the trainer's"""
    off_policy_cap: float = OFF_POLICY_CAP
    """``truncated``, ``truncated_sequence``: upper limit of the weight; ``decoupled``, ``icepop``:
    tokens above it are left out"""
    off_policy_floor: float = 0.5
    """``icepop``: tokens whose weight is below it are left out"""
    off_policy_geometric: tuple[float, float] | None = None
    """bounds of the geometric mean of a sample's weights, outside of which it is left out; needs
    ``proximal = "step"``"""
    off_policy_product: tuple[float, float] | None = None
    """bounds of the product of a sample's weights; the same"""
    off_policy_veto: float | None = None
    """a sample with a token whose weight is below it is left out; needs ``proximal = "step"``"""
    kl_coefficient: float = 0.0
    """coefficient of the KL to the reference that is added to the loss; 0: none"""
    kl_estimator: KLEstimator = "k3"
    k3_limit: float = K3_LIMIT
    """upper limit of ``k3`` of one token; the KL has no gradient beyond"""
    teacher_coefficient: float = 0.0
    """coefficient of the divergence from the teacher that is added to the loss; 0: none"""
    divergence: Divergence = "reverse"
    """divergence of the policy from its teacher, over the next token: ``reverse``: KL(policy,
    teacher); ``forward``: KL(teacher, policy); ``jsd``, ``mixed``: between the two"""
    divergence_beta: float = 0.5
    """``jsd``: weight of the teacher in the mixture, and of its KL to it; ``mixed``: weight of the
    forward KL"""
    divergence_outside: Literal["one_token", "left_out"] = "one_token"
    """with a teacher's most likely tokens: the others count as one token, or what is compared are
    the distributions over the most likely ones"""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """log-ratios are clamped to plus or minus this before `exp`; the ratio has no gradient beyond.
    At most 80: ratios stay finite in float32"""
    entropy_coefficient: float = 0.0
    """coefficient of the entropy bonus"""
    aggregation: Aggregation = "token-mean"
    aggregation_length: int | None = None
    """divisor of the sum over a sample's tokens with ``sequence-mean-token-sum``; in Dr. GRPO the
    length of the longest possible response. None: the sum is not divided"""
    early_stop_ratio: float | None = None
    """the loss of a sample whose mean ratio is above it is multiplied by 0; every rank still takes
    part in the same collectives"""

    def __post_init__(self) -> None:
        if self.name in PAIRED and not isinstance(self, PairLossConfig):
            raise ValueError(
                f"{self.name!r} learns from pairs of a chosen and a rejected answer, which "
                f"reinforcement learning has none of: use a file of job = {self.name!r}"
            )
        check_bounds(self, "clip_low", above=0, most=1)
        check_bounds(self, "clip_high", above=0, below=math.inf)
        check_bounds(self, "dual_clip", above=1)
        check_bounds(self, "off_policy_cap", "early_stop_ratio", "k3_limit", above=0)
        check_bounds(self, "sapo_positive", "sapo_negative", above=0, below=math.inf)
        check_bounds(self, "aggregation_length", least=1)
        if self.aggregation_length is not None and self.aggregation != "sequence-mean-token-sum":
            raise ValueError(
                f"aggregation_length divides the sum over a sample's tokens, but aggregation is "
                f"{self.aggregation!r}: set that to 'sequence-mean-token-sum', or leave it out"
            )
        check_bounds(self, "log_ratio_limit", above=0, most=LARGEST_LOG_RATIO)
        check_bounds(self, "kl_coefficient", "entropy_coefficient", least=0, below=math.inf)
        if self.off_policy != "none" and self.proximal == "behaviour":
            raise ValueError(
                f"off_policy is {self.off_policy!r}, which weights tokens by proximal / behaviour: "
                "with proximal = 'behaviour' each weight is 1; set proximal to 'step'"
            )
        self._check_teacher()
        self._check_masks()

    @property
    def uses_teacher(self) -> bool:
        """Whether the loss has a divergence from a teacher."""
        return self.name == DISTIL or self.teacher_coefficient > 0.0

    @property
    def may_use_teacher(self) -> bool:
        """Whether the loss has a divergence from a teacher, or is a user's own."""
        return self.uses_teacher or self.name not in WITHOUT_TEACHER

    def _check_teacher(self) -> None:
        check_bounds(self, "teacher_coefficient", least=0, below=math.inf)
        check_bounds(self, "divergence_beta", above=0, below=1)
        if self.name == DISTIL and self.teacher_coefficient:
            raise ValueError(
                f"teacher_coefficient is {self.teacher_coefficient}, but {DISTIL!r} is the "
                "divergence from the teacher itself: leave it out, or name another loss to add it "
                "to"
            )
        if self.divergence in ("reverse", "forward") and self.divergence_beta != 0.5:
            raise ValueError(
                f"divergence_beta is {self.divergence_beta}, but divergence is "
                f"{self.divergence!r}: set that to 'jsd' or 'mixed', or leave it out"
            )

    @property
    def masks(self) -> list[str]:
        """Settings that are used and leave out whole samples."""
        return [name for name in MASKS if getattr(self, name) is not None]

    def _check_masks(self) -> None:
        if self.off_policy == "icepop" and not 0 < self.off_policy_floor < self.off_policy_cap:
            raise ValueError(
                f"off_policy_floor is {self.off_policy_floor}; it must be above 0 and below "
                f"off_policy_cap ({self.off_policy_cap})"
            )
        for name in ("off_policy_geometric", "off_policy_product"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] < 1 < bounds[1]:
                raise ValueError(
                    f"{name} is {list(bounds)}; it must be [low, high] with low below 1, which is "
                    "the weight of a sample of the proximal policy, and high above"
                )
        check_bounds(self, "off_policy_veto", above=0, below=1)
        if self.masks and self.proximal != "step":
            raise ValueError(
                f"{self.masks[0]} leaves out samples by proximal / behaviour, before the first "
                f"optimizer step: set proximal to 'step' (it is {self.proximal!r})"
            )


class PairLossConfig(LanguageLossConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss of pairs: samples ``2k`` and ``2k + 1`` of a micro-batch are the chosen and the
    rejected answer to one prompt."""

    name: str = "dpo"
    beta: float = 0.1
    """factor of the implicit reward: of the log-ratio to the reference"""
    label_smoothing: float = 0.0
    """probability that the two answers of a pair are the wrong way round, below 0.5"""
    aggregation: Aggregation = "sequence-mean-token-sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "beta", above=0, below=math.inf)
        check_bounds(self, "label_smoothing", least=0, below=0.5)
        if self.aggregation != "sequence-mean-token-sum" or self.aggregation_length:
            raise ValueError(
                f"aggregation is {self.aggregation!r}: the mean over pairs is that of "
                "'sequence-mean-token-sum', without aggregation_length"
            )


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The advantage of a robot policy, and its discounts."""

    name: str = "gae"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    level: Literal["chunk", "action", "token"] = "chunk"
    """where actions come in chunks or tokens: what has a reward, a value and an advantage"""
    group_size: int = 1
    """episodes from the same initial state; taken from the environments"""

    def __post_init__(self) -> None:
        check_between(self, "gamma", "gae_lambda")


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss of a robot policy, and its coefficients."""

    name: str = "ppo"
    clip_low: float = 0.2
    """the ratio is clipped at ``1 - clip_low`` from below"""
    clip_high: float = 0.2
    """the ratio is clipped at ``1 + clip_high`` from above"""
    dual_clip: float | None = None
    """factor of the limit of a loss with a negative advantage, ``-dual_clip * advantage``; above 1
    """
    value_clip: float | None = None
    """largest change of a value from the old one, for the clipped value loss"""
    value_coefficient: float = 1.0
    """coefficient of the value loss, half the mean squared error"""
    entropy_coefficient: float = 0.0
    proximal: Literal["step", "behaviour"] = "step"
    """denominator of the ratio: log-probs of the policy that the iteration begins with, computed by
    the trainer where an older one acted; or those of the policy that acted, however old it is"""
    off_policy: Literal["truncated", "none"] = "truncated"
    """weight of samples that an older policy acted for, with ``proximal = "step"``: ``proximal /
    behaviour``, at most ``off_policy_cap``; or 1"""
    off_policy_cap: float = OFF_POLICY_CAP

    def __post_init__(self) -> None:
        check_bounds(self, "off_policy_cap", least=1, below=math.inf)
        weighted = self.proximal == "step" and self.off_policy != "none"
        if self.off_policy_cap != OFF_POLICY_CAP and not weighted:
            raise ValueError(
                f"off_policy_cap is {self.off_policy_cap}, but no sample is weighted: it needs "
                "proximal = 'step' and off_policy = 'truncated'"
            )
        check_bounds(self, "clip_low", above=0, below=1)
        check_bounds(self, "clip_high", above=0)
        check_bounds(self, "dual_clip", above=1)
        check_bounds(self, "value_clip", above=0)
        if not math.isfinite(self.entropy_coefficient):
            raise ValueError(
                f"entropy_coefficient is {self.entropy_coefficient}; it must be a finite number"
            )
        check_bounds(self, "value_coefficient", least=0, below=math.inf)


class Share(NamedTuple):
    """The weight of one sample."""

    weight: float
    """weight of each trained token of the sample"""
    units: float
    """the sample's part of the denominator"""


def share_of(trained_tokens: int, loss: LanguageLossConfig) -> Share:
    """Return the share of a sample of ``R`` trained tokens in the loss of a global batch.

    ::

        loss = sum over trained tokens of (weight x token loss)  /  sum over samples of units

    Weights and units are known sample by sample; only the denominator needs the whole global batch.
    So gradients are summed undivided, and divided once at the end: the result does not depend on
    how samples are divided into micro-batches or among ranks.

    ============================  ====================  ==========================================
    ``token-mean``                weight 1, units R     every token counts alike (DAPO, Yu et al.
                                                        2025, equation 8)
    ``sequence-mean-token-mean``  weight 1/R, units 1   every sample counts alike (GRPO, Shao et al.
                                                        2024, equation 3)
    ``sequence-mean-token-sum``   weight 1, units 1     no bias by length (Dr. GRPO, Liu et al.
                                                        2025); weight 1/L with its constant L,
                                                        ``aggregation_length``
    ============================  ====================  ==========================================
    """
    if trained_tokens == 0:
        return Share(0.0, 0.0)
    if loss.aggregation == "token-mean":
        return Share(1.0, float(trained_tokens))
    if loss.aggregation == "sequence-mean-token-mean":
        return Share(1.0 / trained_tokens, 1.0)
    return Share(1.0 / (loss.aggregation_length or 1), 1.0)
