"""What a folder of LeRobot says of its policy, and whether an environment fits it. No torch.

::

    config.json                      sizes, cameras, numbers of states and actions
    model.safetensors                weights
    policy_preprocessor.json         how observations are normalised; names a file of statistics
    policy_postprocessor.json        how actions are, likewise

The folder does not hold the tokenizer of the vision-language model that it is built on, whose name
it says: a folder (of its own, or below this one), or a name in Hugging Face's cache.
"""

from __future__ import annotations

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.policies.config import EXPERT_FLOWS, PolicyConfig

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
BEFORE: Final = "policy_preprocessor.json"
AFTER: Final = "policy_postprocessor.json"
STATE_KEY: Final = "observation.state"
ACTION_KEY: Final = "action"
IMAGES: Final = "observation.images."
STATISTICS: Final = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""the statistics that each way of normalising needs"""
EPSILON: Final = 1e-8


class FolderError(ValueError):
    """A folder cannot be read as such a policy; the text says why."""


class Feature(msgspec.Struct, frozen=True):
    """One part of an observation, or the action."""

    type: Literal["VISUAL", "STATE", "ACTION", "ENV", "REWARD", "LANGUAGE"]
    shape: tuple[int, ...]
    """of an image ``(channels, height, width)``"""


class FolderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of ``config.json`` says how the policy computes, of every family; the defaults are
    LeRobot's."""

    family: ClassVar[str]
    """what ``type`` is, and the policy's name here"""
    steps_name: ClassVar[str]
    """LeRobot's name of the number of steps"""
    type: str
    input_features: dict[str, Feature]
    output_features: dict[str, Feature]
    n_obs_steps: int = 1
    chunk_size: int = 50
    normalization_mapping: dict[str, str] = {}
    max_state_dim: int = 32
    max_action_dim: int = 32
    empty_cameras: int = 0
    tokenizer_max_length: int = 48
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    min_period: float = 4e-3
    max_period: float = 4.0
    use_peft: bool = False

    @property
    def cameras(self) -> dict[str, Feature]:
        """Images that the policy knows, in its order; those that stand for none left out."""
        return {
            key: one
            for key, one in self.input_features.items()
            if one.type == "VISUAL" and not key.startswith(f"{IMAGES}empty_camera_")
        }

    @property
    def state_size(self) -> int:
        """Numbers of a state; 0: there is none."""
        found = self.input_features.get(STATE_KEY)
        return found.shape[0] if found else 0

    @property
    def action_size(self) -> int:
        """Numbers of an action."""
        return self.output_features[ACTION_KEY].shape[0]

    @property
    def times(self) -> Times:
        """Where cloning matches the flow."""
        return Times()

    def unread(self) -> tuple[tuple[bool, str], ...]:
        """What is wrong with it, or not read, and the text that says so."""
        return ()

    def language(self, path: Path, tokenizer: str) -> Path:
        """Return the folder of what is needed of the vision-language model beside ``path``:
        its tokenizer, which the processors call ``tokenizer``. Raises `FolderError`."""
        raise NotImplementedError


class Times(NamedTuple):
    """LeRobot's times in cloning, from actions (0) to noise (1): ``scale * beta + offset``."""

    first: float = 1.5
    """of the beta distribution"""
    second: float = 1.0
    scale: float = 0.999
    offset: float = 0.001


class Affine(NamedTuple):
    """``(x - shift) / divisor`` goes in, ``y * scale + shift`` comes out; ``[D]`` each, float32."""

    shift: NDArray[np.float32]
    divisor: NDArray[np.float32]
    scale: NDArray[np.float32]


class ExpertFolder(NamedTuple):
    """A folder that was read, but for its weights."""

    settings: Any
    """the `FolderSettings` of its family"""
    language: Path
    """folder of the vision-language model's tokenizer, and of what else is needed of it"""
    state: Affine
    action: Affine
    parts: dict[str, str]
    """names of an environment's parts, by the folder's names of cameras"""


@lru_cache(maxsize=4)
def read_folder(folder: str, kind: type[FolderSettings]) -> ExpertFolder:
    """Read all but the weights. Raises `FolderError`."""
    path = Path(folder)
    settings = _settings(path, kind)
    before, after = _read(path / BEFORE, _Pipeline), _read(path / AFTER, _Pipeline)
    renamed = before.step("rename_observations_processor").get("rename_map", {})
    tokenizer = before.step("tokenizer_processor").get("tokenizer_name", "")
    return ExpertFolder(
        settings,
        settings.language(path, str(tokenizer)),
        _affine(path, before, "normalizer_processor", settings, STATE_KEY, settings.state_size),
        _affine(path, after, "unnormalizer_processor", settings, ACTION_KEY, settings.action_size),
        _parts(settings, {key: source for source, key in renamed.items()}),
    )


def misfit(config: PolicyConfig, kind: type[FolderSettings]) -> str:
    """Return why the policy cannot have these observations and actions, or this folder; empty if it
    can."""
    if importlib.util.find_spec("transformers") is None:
        return "it needs the package 'transformers': pip install 'rlinf-async[llm]'"
    own = config.vision_language
    if own.lora.rank and importlib.util.find_spec("peft") is None:
        return "vision_language.lora needs the package 'peft': pip install 'rlinf-async[lora]'"
    if not own.folder:
        return (
            "it is loaded from a folder that lerobot wrote: set actor.fsdp.policy.vision_language."
            "folder. Policy 'flow_action' is built anew"
        )
    if not config.acts.continuous:
        return f"its actions are vectors of numbers (Box); the environment takes {config.acts}"
    try:
        found = read_folder(own.folder, kind)
    except FolderError as error:
        return f"vision_language.folder is {own.folder!r}: {error}"
    problem = _misfit_of_spaces(config, found)
    return f"vision_language.folder is {own.folder!r}: {problem}" if problem else ""


def _misfit_of_spaces(config: PolicyConfig, found: ExpertFolder) -> str:
    settings, executed = found.settings, max(config.action_chunk, 1)
    numbers = config.action_size // executed
    if numbers != settings.action_size:
        return (
            f"its actions have {settings.action_size} numbers, those of the environment have "
            f"{numbers}"
        )
    if executed > settings.chunk_size:
        return (
            f"it predicts chunk_size = {settings.chunk_size} actions at once, but "
            f"env.action_chunk is {executed}: take at most {settings.chunk_size}"
        )
    sees = config.sees
    if sees.state_size != settings.state_size:
        return (
            f"its {STATE_KEY} has {settings.state_size} numbers, the state of the environment has "
            f"{sees.state_size} ({sees})"
        )
    if len(sees.of_kind("text")) != 1:
        return f"it reads one instruction (a Text space); the environment shows {sees}"
    shown = {one.name: one for one in sees.of_kind("image")}
    names = list(found.parts.values())
    for name in shown:
        if name not in names:
            return (
                f"it knows the cameras {', '.join(names)}, but the environment shows an image "
                f"{name!r}: rename it, or leave it out (gymnasium.wrappers)"
            )
    missing = [name for name in names if name not in shown]
    if len(missing) > settings.empty_cameras or not shown:
        return (
            f"it needs the cameras {', '.join(names)}, and the environment does not show "
            f"{', '.join(missing)}; its config.json allows empty_cameras = "
            f"{settings.empty_cameras} of them to be missing"
        )
    for key, name in found.parts.items():
        channels, *sides = settings.cameras[key].shape
        if name in shown and shown[name].shape != (*sides, channels):
            return (
                f"its camera {name!r} has pictures of {[*sides, channels]}, but the environment "
                f"shows {list(shown[name].shape)}: let the environment show them in that size"
            )
    return ""


def _settings(path: Path, kind: type[FolderSettings]) -> FolderSettings:
    raw = _read(path / CONFIG, dict[str, Any])
    family = raw.get("type")
    if family != kind.family:
        other = f"a policy of the family {family!r}" if family else "no policy of lerobot"
        if not family and "model_type" in raw:
            other = f"a model of type {raw['model_type']!r}, and no policy of lerobot"
        if family in EXPERT_FLOWS:
            raise FolderError(f"it holds {other}: set actor.fsdp.policy.name = {family!r}")
        read = " and ".join(map(repr, EXPERT_FLOWS))
        raise FolderError(f"it holds {other}; the families that are read are {read}")
    settings = _converted(path / CONFIG, raw, kind)
    for wrong, text in (
        (settings.n_obs_steps != 1, f"n_obs_steps is {settings.n_obs_steps}; 1 is read"),
        *settings.unread(),
        (settings.use_peft, "use_peft is true: merge the adapter into the weights"),
        (ACTION_KEY not in settings.output_features, f"it has no output feature {ACTION_KEY!r}"),
        (not settings.cameras, "it knows no camera"),
        (
            settings.normalization_mapping.get("VISUAL", "IDENTITY") != "IDENTITY",
            "it normalises images by statistics, which is not read",
        ),
        (not (path / WEIGHTS).is_file(), f"it has no {WEIGHTS}"),
    ):
        if wrong:
            raise FolderError(text)
    for name, most, numbers, what in (
        ("max_state_dim", settings.max_state_dim, settings.state_size, "a state"),
        ("max_action_dim", settings.max_action_dim, settings.action_size, "an action"),
    ):
        if most < numbers:
            raise FolderError(f"{name} is {most}, which is less than the {numbers} of {what}")
    return settings


def located(path: Path, name: str, what: str, files: tuple[str, ...]) -> Path:
    """Return the folder of a model that is named by its folder, also below ``path``, or by its name
    in Hugging Face's cache.

    Args:
        path: folder of the policy.
        name: of the model.
        what: what the name is, in a text.
        files: the folder has the first of them, the cache all.

    Raises `FolderError`.
    """
    for place in (path / name, Path(name)):
        if (place / files[0]).is_file():
            return place
    if importlib.util.find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        try:
            found = [try_to_load_from_cache(name, one) for one in files]
        except ValueError:  # no name of a repository
            found = []
        if found and all(isinstance(one, str) for one in found):
            return Path(str(found[0])).parent
    raise FolderError(
        f"{what} = {name!r}, is neither a folder with its {files[0]}, nor in Hugging Face's cache: "
        f"hf download {name} {' '.join(files)}, or write the name of a folder"
    )


class _Step(msgspec.Struct, frozen=True):
    registry_name: str = ""
    config: dict[str, Any] = {}
    state_file: str = ""


class _Pipeline(msgspec.Struct, frozen=True):
    steps: list[_Step]

    def step(self, name: str) -> dict[str, Any]:
        """The configuration of a step; empty if there is none."""
        return next((one.config for one in self.steps if one.registry_name == name), {})

    def state_file(self, name: str) -> str:
        return next((one.state_file for one in self.steps if one.registry_name == name), "")


def _affine(
    path: Path, pipeline: _Pipeline, step: str, settings: FolderSettings, key: str, size: int
) -> Affine:
    kind = "STATE" if key == STATE_KEY else "ACTION"
    config = pipeline.step(step)
    way = config.get("norm_map", settings.normalization_mapping).get(kind, "IDENTITY")
    if way == "IDENTITY" or not size:
        zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
        return Affine(zeros, ones, ones)
    if way not in STATISTICS:
        raise FolderError(f"it normalises {kind} by {way!r}; {', '.join(STATISTICS)} are read")
    statistics = _statistics(path, pipeline.state_file(step))
    found: list[NDArray[np.float32]] = []
    for name in STATISTICS[way]:
        one = statistics.get(f"{key}.{name}")
        if one is None:
            raise FolderError(
                f"it normalises {key} by {way}, but the statistics {key}.{name} are missing from "
                f"the state of {step} ({pipeline.state_file(step) or 'it has none'}): write the "
                "folder with its data set's statistics"
            )
        if one.shape != (size,) or not np.isfinite(one).all():
            raise FolderError(f"{key}.{name} has shape {list(one.shape)}, not [{size}], or NaN")
        found.append(one.astype(np.float32))
    first, second = found
    if way == "MEAN_STD":
        return Affine(first, second + np.float32(config.get("eps", EPSILON)), second)
    width = second - first
    width[width == 0] = config.get("eps", EPSILON)
    half = width * np.float32(0.5)
    return Affine(np.add(first, half, dtype=np.float32), half, half)


def _statistics(path: Path, file: str) -> dict[str, NDArray[Any]]:
    if not file:
        return {}
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path / file))
    except Exception as error:  # the library has its own
        raise FolderError(f"{file} cannot be read: {error}") from error


def _parts(settings: FolderSettings, sources: dict[str, str]) -> dict[str, str]:
    names = {key: sources.get(key, key) for key in settings.cameras}
    return {
        key: name.removeprefix(IMAGES).removeprefix("observation.") for key, name in names.items()
    }


T = TypeVar("T")


def _read(file: Path, kind: type[T]) -> T:
    try:
        raw: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FolderError(f"its {file.name} cannot be read: {error}") from error
    return _converted(file, raw, kind)


def _converted(file: Path, raw: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise FolderError(f"its {file.name} is damaged: {error}") from error
