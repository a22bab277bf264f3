"""Whether the folders of models go together: engine, critic, teacher, reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_async.algorithms.config import (
    LanguageLossConfig,
)
from rlinf_async.backends.language import (
    ModelOutputError,
    check_family,
)
from rlinf_async.backends.parts import language_trainers
from rlinf_async.config import ConfigError
from rlinf_async.data import (
    DataError,
    Tokenizer,
    load_tokenizer,
)
from rlinf_async.messages.language import Grammar
from rlinf_async.runtime.jobs.language.backends import has_weights, inference_backend
from rlinf_async.runtime.jobs.language.checks.named import (
    Setting,
    at_setting,
    check_reads_text,
    config_of,
    samplings,
    text_of,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig, LearnerConfig
from rlinf_async.runtime.jobs.language.model import check_weights


def check_comparison(
    actor: LearnerConfig, loss: LanguageLossConfig, top_k: int | str, *, where: tuple[str, ...]
) -> None:
    """Refuse a divergence of which the teacher does not tell enough, a setting of it that has no
    effect, and a trainer that cannot compute it.

    Args:
        actor: the policy.
        loss: its loss.
        top_k: setting of the teacher.
        where: section of the loss's settings.

    Raises:
        ConfigError: such a setting.
    """
    if top_k == 0 and loss.divergence != "reverse":
        raise ConfigError(
            f"{loss.divergence!r} compares distributions, but with teacher.top_k = 0 the teacher "
            "only tells the log-prob of the drawn token, by which the reverse KL is estimated: set "
            "that to a number of tokens, or to 'all'",
            path=(*where, "divergence"),
        )
    if top_k in (0, "all") and loss.divergence_outside != "one_token":
        raise ConfigError(
            f"{loss.divergence_outside!r} is about tokens that are not among the teacher's most "
            f"likely ones, but teacher.top_k is {top_k!r}: leave it out",
            path=(*where, "divergence_outside"),
        )
    for name in (actor.backend, inference_backend(actor)):
        if top_k and not language_trainers.load(name).tells_distributions:
            raise ConfigError(
                f"it is {top_k!r}, but the trainer {name!r} computes log-probs of the drawn tokens "
                "alone: set it to 0, or actor.backend to 'fsdp'",
                path=("teacher", "top_k"),
            )


def check_teacher(config: LanguageConfig, model: Path) -> None:
    """Refuse a folder for the teacher that is incomplete, or whose tokens are not the actor's.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    if config.teacher.path:
        check_teacher_folder(config.teacher.path, model)


def check_reward(config: LanguageConfig) -> None:
    """Refuse a folder that holds no reward model, and samples that are none for one.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
        MissingExtra: transformers is not installed.
    """
    if not config.reward.model:
        return
    where = ("reward", "model")
    if config.has_episodes:
        raise ConfigError(
            "it reads a prompt and its answer, and samples are episodes of several turns: leave it "
            "out, and ask a reward model in episode.run",
            path=where,
        )
    from rlinf_async.backends.transformers.reward_model import check_reward_model

    check_reward_model(config.reward.model)


def check_teacher_folder(path: str, model: Path) -> None:
    """Refuse a folder for a teacher that is incomplete, or whose tokens are not those of a model.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    folder, where = Path(path).expanduser(), ("teacher", "path")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: give a Hugging Face checkpoint on this disk", path=where
        )
    if not has_weights(folder):
        raise ConfigError(f"{folder} has no weights (*.safetensors)", path=where)
    try:
        own, theirs = load_tokenizer(model).get_vocab(), load_tokenizer(folder).get_vocab()
    except DataError as error:
        raise ConfigError(str(error), path=where) from error
    if own != theirs:
        differing = {*own.items()} ^ {*theirs.items()}
        _, token = min((number, token) for token, number in differing)
        raise ConfigError(
            f"the tokenizer in {folder} is not the model's: it has {len(theirs)} tokens, and the "
            f"model's has {len(own)}; the first that differs is {token!r}, which is token "
            f"{theirs.get(token, 'none')} there and {own.get(token, 'none')} here. A teacher is "
            "compared token by token: give one of the same family",
            path=where,
        )
    with at_setting(where):
        check_family(text_of(folder))
    check_reads_text(config_of(path), where, "teacher")
    check_weights(folder, where)


def check_engine(config: LanguageConfig, model: Path, device: str) -> None:
    """Refuse what the engine would refuse when it starts. Imports the engine's library.

    Args:
        config: the run's configuration.
        model: the model's folder.
        device: ``"cpu"`` or a CUDA device, of the rollout workers.

    Raises:
        ConfigError: a limit or an argument that the engine cannot have with this model.
    """
    from rlinf_async.backends.transformers.folder import ModelFolderError

    rollout = config.rollout
    try:
        rollout.part.inspect(rollout.engine, model, device)
    except (ModelFolderError, ValueError) as error:
        raise ConfigError(str(error), path=rollout.where) from error


def check_formats(config: LanguageConfig, model: Path) -> None:
    """Refuse formats of responses that are none, or that no response can begin with.

    Raises:
        ConfigError: with the setting.
        MissingExtra: xgrammar is not installed.
    """
    formats = {one.grammar: where for where, one in reversed(samplings(config).items())}
    for grammar, where in formats.items():
        if grammar:
            _check_format(grammar, model, (*where, "grammar", grammar.kind))


def _check_format(grammar: Grammar, model: Path, where: Setting) -> None:
    """Refuse what is no grammar, and one that no token of the model can begin."""
    from rlinf_async.backends.transformers.folder import open_folder
    from rlinf_async.backends.transformers.formats import ResponseFormats

    formats = ResponseFormats(open_folder(str(model)))
    try:
        formats.allowed([formats.begin(grammar, "check")])
    except ValueError as error:
        raise ConfigError(str(error), path=where) from error
    except ModelOutputError as error:
        raise ConfigError(
            f"no response can begin so: the tokenizer in {model} has no token for it", path=where
        ) from error


def check_critic(config: LanguageConfig, model: Path) -> None:
    """Refuse a folder for the critic that is incomplete, or whose tokens are not the actor's.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    if not config.critic.path:
        return
    folder, where = Path(config.critic.path).expanduser(), ("critic", "path")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: give a Hugging Face checkpoint on this disk, or leave "
            "it out for the actor's own",
            path=where,
        )
    if not has_weights(folder):
        raise ConfigError(f"{folder} has no weights (*.safetensors)", path=where)
    own, actors = text_of(folder).get("vocab_size"), text_of(model).get("vocab_size")
    if own != actors:
        raise ConfigError(
            f"the model in {folder} has {own} tokens, the actor's has {actors}: a critic needs the "
            "actor's tokenizer",
            path=where,
        )
    check_weights(folder, where)


def check_tokens(config: LanguageConfig, model: Path) -> None:
    """Refuse tokens in settings of samples that the model does not have."""
    size = text_of(model).get("vocab_size") if config.rollout.part.has_weights else None
    if not isinstance(size, int):
        return
    sampling = config.rollout.sampling
    given: dict[str, Sequence[int]] = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in given.items():
        if max(tokens, default=0) >= size:
            raise ConfigError(
                f"there is no token {max(tokens)}: the model has tokens 0 .. {size - 1}",
                path=("rollout", "sampling", name),
            )


def check_stops(config: LanguageConfig, tokenizer: Tokenizer) -> None:
    """Refuse a stop text with a special token, which the text of no response has."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(one) for number, one in added.items() if one.special}
    for stop in config.rollout.sampling.stop:
        for number, token in special.items():
            if token in stop:
                raise ConfigError(
                    f"{stop!r} would end no response: {token!r} is a special token, which is in no "
                    f"text; set rollout.sampling.stop_token_ids to [{number}] instead",
                    path=("rollout", "sampling", "stop"),
                )
