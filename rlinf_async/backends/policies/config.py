"""The configuration of a policy, and which built-in one fits an environment. Needs no torch."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from rlinf_async.backends.policies.flow_action.config import FlowConfig
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.config.counts import check_between, check_bounds
from rlinf_async.messages.spaces import ActionSpec, ObservationSpec, continuous, flat_spec


class Corrected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen policy, whose actions another one corrects."""

    base: PolicyConfig
    scale: float
    """largest correction of each number of an action, which lie in [-1, 1]"""
    middle: tuple[float, ...]
    """what is 0 there, in the units of the frozen policy"""
    half: tuple[float, ...]
    """what is 1, beyond the middle"""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered policy. Sizes and specs are empty until the environment has been asked."""

    name: str = "auto"
    """``"auto"``: the built-in policy that fits the spaces, see `policy_for`"""
    observation_size: int = 0
    action_size: int = 0
    """values of a continuous action, or the number of discrete ones"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    channels: tuple[int, ...] = (16, 32, 32)
    """outputs of the convolutions of a CNN; each halves height and width"""
    memory_size: int = 64
    """numbers that the policy ``"gru"`` remembers"""
    initial_log_std: float = 0.0
    observation_clip: float = 10.0
    """bound of normalised observations, in both directions"""
    vision_language: VisionLanguageConfig = VisionLanguageConfig()
    """settings of the policy ``vision_language_action``; of `EXPERT_FLOWS` folder and adapters"""
    flow: FlowConfig = FlowConfig()
    """settings of the policies ``flow_action`` and `EXPERT_FLOWS`"""
    action_chunk: int = 0
    """actions of an answer; taken from the environment"""
    token_values: bool = False
    """whether an answer has a value for each token; taken from ``actor.advantage.level``"""
    corrected: Corrected | None = None
    """the frozen policy of which this one is the residual; taken from ``[residual]``"""
    observation: ObservationSpec = ObservationSpec()
    """the parts of an observation; taken from the environment"""
    action: ActionSpec = ActionSpec()
    """the factors of an action; taken from the environment"""

    def __post_init__(self) -> None:
        if self.observation_size < 0 or self.action_size < 0:
            raise ValueError(
                f"observation_size is {self.observation_size}, action_size is {self.action_size}; "
                "they must be positive, or 0 to be taken from the environment"
            )
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"hidden_sizes is {self.hidden_sizes}; every size must be at least 1")
        if not self.channels or any(count < 1 for count in self.channels):
            raise ValueError(
                f"channels is {self.channels}; there must be at least one, each at least 1"
            )
        check_bounds(self, "memory_size", least=1)
        check_between(self, "initial_log_std", low=-20, high=2)
        check_bounds(self, "observation_clip", above=0)

    @property
    def sees(self) -> ObservationSpec:
        """The parts of an observation; where only its size was given, it is one vector."""
        return self.observation if self.observation.parts else flat_spec(self.observation_size)

    @property
    def acts(self) -> ActionSpec:
        """The factors of an action; where only its size was given, it is continuous."""
        return self.action if self.action.factors else continuous(self.action_size)


MLPS: Final = ("mlp_gaussian", "mlp_categorical", "mlp_factored")
"""The built-in policies of one vector: the action space chooses among them."""

VISION_LANGUAGE: Final = "vision_language_action"

FLOW: Final = "flow_action"

SMOLVLA: Final = "smolvla"
PI0: Final = "pi0"
EXPERT_FLOWS: Final = (SMOLVLA, PI0)
"""flows that are loaded from a folder of LeRobot, whose ``type`` is this"""

OWNERS: Final = {
    "vision_language": VISION_LANGUAGE,
    "channels": "cnn",
    "memory_size": "gru",
    "flow": FLOW,
}
"""settings that one built-in policy has for itself; ``flow_action`` has those of its trunk, too,
and `EXPERT_FLOWS` those of a flow, and the folder and adapters of a vision-language model"""
TOKENS: Final = ("bins", "chunk", "decoding", "attention", "head")
"""settings of ``vision_language`` that are of actions at slots"""
LOADED: Final = ("folder", "lora")
"""settings of ``vision_language`` that do not say how a new model is built"""
BUILT_IN: Final = (*MLPS, *OWNERS.values(), *EXPERT_FLOWS)


def ignored(config: PolicyConfig) -> tuple[tuple[str, ...], str]:
    """Return the path of a setting that was changed and that the built-in policy would ignore, and
    why; two empty ones if there is none.

    A policy of somebody's own may use any of them.
    """
    if config.corrected is not None:
        return ("corrected",), (
            "it is set by the section [residual] of job = 'embodied_sac': leave it out"
        )
    if config.name not in BUILT_IN:
        return (), ""
    for name, owner in OWNERS.items():
        path = _changed(getattr(config, name), getattr(PolicyConfig(), name), (name,))
        if path and owner not in (config.name, *_parts(config)):
            return path, (
                f"it is a setting of policy {owner!r}, but the policy is {config.name!r}, which "
                "would ignore it: leave it out, set it to its default, or set "
                f"actor.fsdp.policy.name = {owner!r}"
            )
    for name in TOKENS if config.name == FLOW else ():
        if getattr(config.vision_language, name) != getattr(VisionLanguageConfig(), name):
            return ("vision_language", name), (
                f"it is of actions as tokens, but policy {FLOW!r} answers with numbers: leave it "
                "out"
            )
    for name in VisionLanguageConfig.__struct_fields__ if config.name in EXPERT_FLOWS else ():
        changed = getattr(config.vision_language, name) != getattr(VisionLanguageConfig(), name)
        if changed and name not in LOADED:
            return ("vision_language", name), (
                f"policy {config.name!r} is as its folder says (vision_language.folder): leave it "
                "out"
            )
    clips = config.observation_clip not in (PolicyConfig().observation_clip, math.inf)
    if config.name in EXPERT_FLOWS and clips:
        return ("observation_clip",), (
            f"policy {config.name!r} normalises observations by its folder's statistics, without a "
            "bound: leave it out"
        )
    setting, problem = config.flow.ignored()
    if problem:
        return ("flow", setting), problem
    reads, flows = config.name == VISION_LANGUAGE, config.name in (FLOW, *EXPERT_FLOWS)
    deviates = config.vision_language.head == "continuous" if reads else not flows
    for name, used in (
        ("hidden_sizes", not reads),
        ("initial_log_std", deviates and config.acts.numbers > 0),
    ):
        if getattr(config, name) != getattr(PolicyConfig(), name) and not used:
            return (name,), (
                f"policy {config.name!r} would ignore it for actions of {config.acts}: leave it out"
            )
    return (), ""


def _parts(config: PolicyConfig) -> tuple[str, ...]:
    """The policies whose settings a policy has beside its own: those of its parts."""
    if config.name in EXPERT_FLOWS:
        return FLOW, VISION_LANGUAGE
    if config.name != FLOW or not config.sees.of_kind("image"):
        return ()
    return (VISION_LANGUAGE,) if reads_text(config) else ("cnn",)


def reads_text(config: PolicyConfig) -> bool:
    """Whether an observation has a part that is text."""
    return bool(config.sees.of_kind("text"))


def _changed(value: object, default: object, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the first setting in which a section differs; empty if it is the default one."""
    if not isinstance(value, msgspec.Struct):
        return () if value == default else path
    for field in value.__struct_fields__:
        found = _changed(getattr(value, field), getattr(default, field), (*path, field))
        if found:
            return found
    return ()


def policy_for(config: PolicyConfig) -> str:
    """The built-in policy that fits the spaces: a CNN for images, else an MLP."""
    return "cnn" if config.sees.of_kind("image") else mlp_for(config.acts)


def cnn_misfit(config: PolicyConfig) -> str:
    """Return why a CNN cannot have these observations; empty if it can."""
    if not config.sees.of_kind("image"):
        return f"a CNN takes images, but the environment shows {config.sees}"
    for image in config.sees.of_kind("image"):
        if len(image.shape) > 3:
            return (
                f"image {image.name!r} has shape {list(image.shape)}; a CNN takes [height, width] "
                "or [height, width, channels]: put stacked frames side by side as channels"
            )
        if _channels_first(image.shape):
            return (
                f"image {image.name!r} has shape {list(image.shape)}, which has its channels "
                "first; a CNN takes [height, width, channels]: let the environment transpose it "
                "(gymnasium.wrappers.TransformObservation)"
            )
    if config.sees.of_kind("text"):
        return (
            f"a CNN reads no text, but the environment shows {config.sees}: take "
            f"actor.fsdp.policy.name = {VISION_LANGUAGE!r}, or leave the text out "
            "(gymnasium.wrappers.FilterObservation)"
        )
    return ""


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image can only be meant so: a few rows of many columns with many channels."""
    return len(shape) == 3 and shape[0] in (1, 3, 4) and min(shape[1:]) >= 16


def mlp_for(action: ActionSpec) -> str:
    """The MLP whose distribution is that of the action space."""
    if action.continuous:
        return "mlp_gaussian"
    return "mlp_categorical" if action.discrete else "mlp_factored"


def box_misfit(config: PolicyConfig) -> str:
    """Return why a policy of numbers alone cannot have these actions; empty if it can."""
    if config.acts.numeric:
        return ""
    return "it samples continuous actions, of one Box or several; the environment's are others"


def mlp_misfit(config: PolicyConfig, name: str = "") -> str:
    """Why an MLP cannot have these observations, or the one of this name these actions; empty if it
    can. Which actions it has is not known where only their size was given."""
    if config.sees.flat:
        fitting = mlp_for(config.acts)
        if not config.action.factors or name in ("", "mlp_factored", fitting):
            return ""
        drawn = "a vector of numbers" if name == "mlp_gaussian" else "one choice"
        return (
            f"{name!r} draws {drawn}, but the environment takes {config.acts}: leave "
            f"actor.fsdp.policy.name out, which takes {fitting!r}"
        )
    return (
        f"an MLP takes one vector of numbers, but the environment shows {config.sees}: leave "
        "actor.fsdp.policy.name out, and images get a CNN; with texts, take "
        f"{VISION_LANGUAGE!r}; or let the environment show numbers "
        "(gymnasium.wrappers.FilterObservation, FlattenObservation)"
    )
