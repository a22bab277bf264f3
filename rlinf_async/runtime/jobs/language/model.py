"""The model of a language run as a folder: what engines and actors read, and what the run leaves.

A checkpoint's folder is used as it is. A model that starts from a configuration gets a folder
without weights inside the run's own: the actor draws them, and publishes them before anything is
generated; or a short supervised phase, the warm start, puts them there first. It happens once: a
run that is resumed, or started again in its folder, finds the weights there. The weights are in the
folder only when all of them are written: a run that is killed before starts warm again.
"""

from __future__ import annotations

import difflib
import io
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from rlinf_async.backends.language import model_factory, sees_images
from rlinf_async.backends.language_training.config import AdapterConfig, SupervisedConfig
from rlinf_async.config import ConfigError, needed
from rlinf_async.config.registry import raised
from rlinf_async.data import DataError, Prompts, Tokenizer
from rlinf_async.data.images import PROCESSOR_FILES, ImageProcessor
from rlinf_async.data.prompts import FILES as TOKENIZER_FILES
from rlinf_async.data.prompts import save_arithmetic_tokenizer
from rlinf_async.messages.language import Example
from rlinf_async.observe.files import atomic_write, explaining
from rlinf_async.observe.progress import ProgressState, ProgressView
from rlinf_async.runtime.jobs.language.backends import plan_roles, supervised_config
from rlinf_async.runtime.jobs.language.config import LanguageConfig, ModelConfig
from rlinf_async.workers.actor.language import SupervisedWorker

T = TypeVar("T")
Shape = tuple[int, ...]
Examples = list[Example]
"""prompts and answers"""

ARITHMETIC = "arithmetic"
SMALL_MODEL = 100_000_000
"""parameters up to which a model with random weights is made to look at it"""
CHAT_TEMPLATE = "chat_template.jinja"
BESIDE = (
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "merges.txt",
    *PROCESSOR_FILES,
)
"""files that belong to some tokenizers, and those of processors of images"""


class _Index(msgspec.Struct):
    """The part of ``model.safetensors.index.json`` that is read: tensor -> file."""

    weight_map: dict[str, str]


def checkpoint_folder(model: ModelConfig) -> Path | None:
    """The folder of a checkpoint, checked; None for a model with random weights.

    Raises:
        ConfigError: it is not there, has no config, weights or tokenizer, or one is damaged.
    """
    if not model.path:
        return None
    path = Path(model.path).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"the folder {model.path!r} is not there: give a Hugging Face checkpoint on this "
            "disk (nothing is downloaded)",
            path=("model", "path"),
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} has no config.json: it is not a Hugging Face checkpoint",
            path=("model", "path"),
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ConfigError(
            f"{path} has no weights (*.safetensors): copy them into it, or give model.config "
            "instead to start from random ones",
            path=("model", "path"),
        )
    if not model.tokenizer and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy "
            "tokenizer.json and tokenizer_config.json into it, or name a folder that has them "
            "by model.tokenizer",
            path=("model", "path"),
        )
    _check_whole(path)
    return path


def _check_whole(folder: Path) -> None:
    """Refuse a config that is not JSON, and incomplete weights (an interrupted download)."""
    _read_json(folder / "config.json", dict[str, Any])
    for path in folder.glob("*.safetensors.index.json"):
        shards = set(_read_json(path, _Index).weight_map.values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"{folder} lacks {missing[0]}{more}, which {path.name} lists: copy it there",
                path=("model", "path"),
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="numpy"):
                pass
        except SafetensorError as error:
            raise ConfigError(
                f"{file} is damaged ({error}): copy it again", path=("model", "path")
            ) from error


def _read_json(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}", path=("model", "path")) from error


def make_model_folder(model: ModelConfig, into: Path, chat_template: str = "") -> Path:
    """The folder that engines read: config, tokenizer, and the weights of a checkpoint.

    Args:
        model: the settings.
        into: folder to make, unless a checkpoint's own will do.
        chat_template: path of a template that takes the place of the tokenizer's, so that whoever
            loads what is trained has it.

    Raises:
        ConfigError: the architecture is unknown, its settings are wrong, or a folder is incomplete.
        MissingExtra: transformers is not installed.
    """
    source = checkpoint_folder(model)
    if source is not None and not model.tokenizer and not chat_template:
        return source
    into.mkdir(parents=True, exist_ok=True)
    if model.tokenizer == ARITHMETIC:
        save_arithmetic_tokenizer(into)
    else:
        folder = Path(model.tokenizer or model.path).expanduser()
        if not copy_tokenizer(folder, into):
            raise ConfigError(
                f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there",
                path=("model", "tokenizer"),
            )
    if chat_template:  # transformers prefers this file to the template in tokenizer_config.json
        try:
            shutil.copyfile(Path(chat_template).expanduser(), into / CHAT_TEMPLATE)
        except OSError as error:
            raise ConfigError(
                f"{chat_template!r} cannot be read: {error}", path=("data", "chat_template")
            ) from error
    if source is not None:
        for path in source.iterdir():
            if path.is_file() and not (into / path.name).exists():
                (into / path.name).symlink_to(path.resolve())
        return into
    atomic_write(into / "config.json", msgspec.json.format(_config_json(model, into)) + b"\n")
    return into


def copy_tokenizer(folder: Path, into: Path) -> bool:
    """Copy the tokenizer's files. Returns whether there are any."""
    found = [folder / name for name in (*TOKENIZER_FILES, *BESIDE) if (folder / name).is_file()]
    for path in found:
        shutil.copy2(path, into / path.name)
    return any(path.name in TOKENIZER_FILES for path in found)


def _config_json(model: ModelConfig, folder: Path) -> bytes:
    """The configuration: the given settings, the architecture's defaults, the tokenizer's ids."""
    library = needed("transformers", extra="llm", needed_for="a language model")
    tokenizer: Any = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    given = dict(model.config)
    kind = given.pop("model_type")
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    sees = sees_images(model.config)
    own: dict[str, Any] = given.get("text_config", {}) if sees else given
    where = ("text_config",) if sees else ()
    if own.get("vocab_size", len(tokenizer)) < len(tokenizer):
        raise ConfigError(
            f"vocab_size is {own['vocab_size']}, but the tokenizer has {len(tokenizer)} tokens: "
            "leave it out",
            path=("model", "config", *where, "vocab_size"),
        )
    _check_kind(kind)
    if sees:
        image = dict(_processor(folder).special_ids)
        ids = image | {"pad_token_id": tokenizer.pad_token_id, "text_config": ids | own}
        given.pop("text_config", None)
    try:
        made = library.AutoConfig.for_model(kind, **(ids | given))
    except Exception as error:  # a configuration's own checks raise errors of many types
        raise ConfigError(raised(error), path=("model", "config")) from error
    _check_spelling(kind, given)
    architecture = _architecture(made)
    if architecture is not None:  # vLLM finds the model's class by it
        made.architectures = [architecture]
    text: bytes = made.to_json_string(use_diff=False).encode()
    return text


def processor_of(folder: Path) -> ImageProcessor | None:
    """Return the processor of a model's folder; None: it takes no images.

    Raises:
        ConfigError: the model takes images, and the folder has no processor, or a damaged one.
    """
    described = folder / "config.json"
    if not described.is_file() or not sees_images(_read_json(described, dict[str, Any])):
        return None
    return _processor(folder)


def _processor(folder: Path) -> ImageProcessor:
    try:
        return ImageProcessor(folder)
    except DataError as error:
        raise ConfigError(str(error), path=("model",)) from error


def _check_kind(kind: str) -> None:
    """Refuse an unknown architecture. The error of transformers lists all of its names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if kind in KNOWN or sees_images({"model_type": kind}):
        return
    near = difflib.get_close_matches(str(kind), list(KNOWN), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"transformers has no causal language model of model_type {kind!r}{hint}",
        path=("model", "config", "model_type"),
    )


def _check_spelling(kind: str, given: Mapping[str, Any]) -> None:
    """Refuse a field that is nearly the name of another: a configuration of transformers takes any,
    and leaves those that it does not know unused."""
    from transformers import AutoConfig

    default: Any = AutoConfig.for_model(kind, **_padding(kind))
    known = {*default.to_dict(), *default.attribute_map}
    for name in given:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if not hasattr(default, name) and near:
            raise ConfigError(
                f"{kind!r} has no {name!r}: it would change nothing; did you mean {near[0]!r}?",
                path=("model", "config", name),
            )


def _padding(kind: str) -> dict[str, int]:
    """Return a padding token that a default vocabulary has, of which transformers would warn."""
    return {"pad_token_id": 0} if sees_images({"model_type": kind}) else {}


def _architecture(config: Any) -> str | None:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if sees_images({"model_type": config.model_type}):
        known = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    name: str | None = known.get(config.model_type)
    return name


class _Found(NamedTuple):
    """A tensor whose size is not that of the configuration."""

    name: str
    actual: Shape
    expected: Shape
    file: str


def check_weights(folder: Path, where: tuple[str, ...]) -> None:
    """Refuse safetensors whose sizes are not those of config.json, or with NaN or infinity. Reads
    all of them.

    Sizes of tensors that transformers renames while it loads, quantised weights and other files are
    not checked: engine and trainer refuse them.

    Args:
        folder: the checkpoint's folder.
        where: the setting that names it.

    Raises:
        ConfigError: with the first tensor, and both of its shapes.
    """
    files = sorted(folder.glob("*.safetensors"))
    wanted = _described_shapes(folder) if files else {}
    found = [one for file in files for one in _differing(file, wanted)]
    if found:
        first = min(found)
        raise ConfigError(
            f"{folder}: {len(found)} tensors do not have the sizes of config.json: "
            f"{first.name} is {list(first.actual)} in {first.file} and {list(first.expected)} in "
            "config.json: copy the config.json that belongs to the weights",
            path=where,
        )
    for file in files:
        if name := _not_finite(file):
            raise ConfigError(
                f"{file}: {name} holds numbers that are NaN or infinite: copy the weights again, "
                "or take an earlier checkpoint",
                path=where,
            )


def _not_finite(file: Path) -> str:
    """The first tensor with NaN or infinity; empty where there is none."""
    import torch

    with safe_open(str(file), framework="pt") as opened:
        names: list[str] = sorted(opened.keys())
        for name in names:
            tensor = opened.get_tensor(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                return name
    return ""


def check_tokens(folder: Path, where: tuple[str, ...]) -> None:
    """Refuse a tokenizer with more tokens than the model, and one that ends no answer.

    Args:
        folder: the model's folder.
        where: the setting that names its tokenizer.

    Raises:
        ConfigError: with both sizes; or that no end-of-sequence token is known.
    """
    from rlinf_async.backends.transformers.folder import ModelFolderError, open_folder

    try:
        found = open_folder(str(folder))
    except (ModelFolderError, OSError, ValueError) as error:
        raise ConfigError(str(error), path=where) from error
    size, largest = found.config.vocab_size, max(found.tokenizer.get_vocab().values(), default=-1)
    if largest >= size:
        raise ConfigError(
            f"the tokenizer has tokens up to {largest}, but the model has embeddings for {size} "
            "(vocab_size): take the tokenizer that belongs to the model",
            path=where,
        )
    if not any(0 <= one < size for one in found.stop_token_ids):
        raise ConfigError(
            "there is no end-of-sequence token, neither in the tokenizer nor in config.json or "
            "generation_config.json: the model would never end an answer. Set eos_token in "
            "tokenizer_config.json, or eos_token_id in config.json",
            path=where,
        )


def _differing(file: Path, wanted: dict[str, Shape]) -> list[_Found]:
    with safe_open(str(file), framework="numpy") as opened:
        names: list[str] = opened.keys()
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return [
        _Found(name, there, wanted[name], file.name)
        for name, there in shapes.items()
        # Some are transposed while they are loaded.
        if name in wanted and math.prod(there) != math.prod(wanted[name])
    ]


def _described_shapes(folder: Path) -> dict[str, Shape]:
    """The shapes of the model in config.json; none where transformers cannot build it, or stores
    its weights in another form."""
    import torch
    from transformers import AutoConfig

    from rlinf_async.backends.building import one_at_a_time

    described = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    if "quantization_config" in described:
        return {}
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        factory = model_factory(config.model_type)
        with one_at_a_time, torch.device("meta"):
            model = factory.from_config(config)
    except (ValueError, TypeError, KeyError, OSError, ImportError):
        return {}  # engine and trainer report it
    return {name: tuple(one.shape) for name, one in model.state_dict().items()}


def check_forward(folder: Path, where: tuple[str, ...]) -> None:
    """Refuse a config.json of which no model can be made, or none that computes numbers: where it
    is small, one is made, and looked at as the trainer does.

    Raises:
        ConfigError: with what transformers, torch or the trainer says of it.
    """
    import torch
    from transformers import AutoConfig

    from rlinf_async.backends.building import one_at_a_time
    from rlinf_async.backends.fsdp.language.network import PolicyNetwork, check_same_as_transformers
    from rlinf_async.backends.language_training.config import LanguageModelConfig
    from rlinf_async.backends.language_training.model import build_language_model

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        factory = model_factory(config.model_type)
        with one_at_a_time, torch.device("meta"):
            size = sum(one.numel() for one in factory.from_config(config).parameters())
        if size > SMALL_MODEL:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made, packs = build_language_model(LanguageModelConfig(path=str(folder), random=True))
        network = PolicyNetwork(made, packs=packs, logit_chunk_bytes=2**28)
        check_same_as_transformers(network)
        if processor := processor_of(folder):
            check_vision(network, processor)
    except Exception as error:  # a configuration's own checks raise errors of many types
        raise ConfigError(f"no model can be made of it: {raised(error)}", path=where) from error


def check_vision(network: Any, processor: ImageProcessor) -> None:
    """Raise `ValueError` unless the vision tower makes as many vectors of an image as the processor
    makes tokens."""
    import torch
    from PIL import Image

    from rlinf_async.backends.transformers.images import SeeingPrompt, image_inputs, image_vectors

    drawn = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(drawn, "PNG")
    images = (drawn.getvalue(),)
    tokens = processor.tokens(f"{processor.image_token}a", images, "an image")
    inputs = image_inputs([SeeingPrompt(0, tokens, images)], processor, torch.device("cpu"))
    assert inputs is not None  # there is an image
    with torch.no_grad():
        image_vectors(network.language, inputs)


def check_adapter(folder: Path, config: AdapterConfig) -> None:
    """Refuse targets that the model in a folder does not have, or that cannot be adapted.

    Raises:
        ConfigError: with the target, and the layers that there are.
    """
    if not config.rank:
        return
    from rlinf_async.backends.language_training.lora import targeted
    from rlinf_async.backends.transformers.tensors import model_without_memory

    described = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    try:
        model = model_without_memory(described)
    except (ValueError, TypeError, KeyError, ImportError):
        return  # the trainer reports it
    try:
        targeted(model, config.targets)
    except ValueError as error:
        raise ConfigError(str(error), path=("actor", "lora", "targets")) from error


def examples(
    config: LanguageConfig, tokenizer: Tokenizer, processor: ImageProcessor | None = None
) -> Examples:
    """Every training prompt of the warm start, with its answer and the end-of-sequence token.

    Raises:
        ConfigError: the data cannot be read, or are fewer than a batch; the tokenizer has no
            end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token: the model would never end an answer",
            path=("model", "tokenizer"),
        )
    try:
        data = config.warm_start.data or config.data
        prompts = Prompts(data, tokenizer, processor=processor)
    except DataError as error:
        section = ("warm_start", "data") if config.warm_start.data else ("data",)
        raise ConfigError(str(error), path=section) from error
    found = []
    while prompts.epoch == 0:
        prompt = next(prompts)
        ids = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
        answer = np.asarray([*ids, tokenizer.eos_token_id], np.int32)
        found.append(Example(prompt.token_ids, answer, images=prompt.images))
    if len(found) < config.warm_start.batch_size:
        raise ConfigError(
            f"there are {len(found)} examples, fewer than a batch of "
            f"{config.warm_start.batch_size}: set it to at most {len(found)}, or give more data",
            path=("warm_start", "batch_size"),
        )
    return found


async def warm_start(
    config: LanguageConfig, model: Path, learned: Examples, log: Path | None = None
) -> list[float]:
    """Train the model of this folder on examples, and put its weights there once all are written.

    Shows its progress, and returns the loss of every step.

    Args:
        config: the run's configuration.
        model: folder of the model, without weights.
        learned: the examples.
        log: file for what worker processes print; None: stderr.
    """
    phase = config.warm_start
    supervised = SupervisedConfig(steps=phase.steps, batch_size=phase.batch_size, seed=config.seed)
    losses: list[float] = []

    async def train_and_write(folder: Path) -> None:
        async with config.cluster.make_cluster(log) as cluster:
            plan = plan_roles(config, cluster.devices)
            device = plan.device("actor", own_process=config.cluster.processes)
            workers = await cluster.launch(
                SupervisedWorker,
                supervised_config(config, model, device),
                supervised,
                config.actor.backend,
                count=config.actors,
                name="WarmStart",
                collective=plan.collective("actor"),
                **plan.options("actor", config.cluster.environment),
            )
            channel = cluster.channel(float, name="losses")
            fitting = workers.call(SupervisedWorker.fit, learned, str(folder), channel.sender)
            with ProgressView() as view, channel.receiver as steps:
                async for loss in steps:
                    losses.append(loss)
                    view.update(
                        ProgressState(
                            run=f"{config.name} (seed {config.seed}), warm start",
                            iteration=len(losses),
                            iterations=phase.steps,
                            figures=(("loss", f"{loss:.3f}"),),
                        )
                    )
            await fitting

    await export(train_and_write, model, model)
    return losses


async def export(write: Callable[[Path], Awaitable[None]], model: Path, into: Path) -> None:
    """Write a model with the tokenizer that it began with, as transformers and vLLM load it.

    It is written as ``.NAME``, and renamed once it is whole; an earlier folder is called
    ``.NAME.previous`` for the moment between two renames, and removed then. A process that is
    killed in that moment leaves no NAME, but both other folders: the next export gives the earlier
    one its name back first.

    Args:
        write: writes configuration and weights.
        model: the folder that the run began with; may be ``into``.
        into: where the new one goes.

    Raises:
        RunFolderError: it cannot be written.
    """
    staging = into.with_name(f".{into.name}")
    with explaining("write the trained model", into):
        _bring_back(into)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    await write(staging)
    with explaining("write the trained model", into):
        copy_tokenizer(model, staging)
        _replace(into, staging)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _bring_back(folder: Path) -> None:
    """Give a folder its name back, after a kill in `_replace`."""
    if _previous(folder).exists() and not folder.exists():
        _previous(folder).rename(folder)


def _replace(folder: Path, new: Path) -> None:
    """Give ``new`` the name of this folder, which is removed. One of the two is there throughout,
    under its name or as ``.NAME.previous``."""
    previous = _previous(folder)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    new.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)
