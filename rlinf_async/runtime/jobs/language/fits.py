"""Whether data, model and lengths fit one another: what would otherwise end a run in its middle.

::

    context of the model - rollout.sampling.max_tokens = room for a prompt >= every prompt
    iterations x prompts of each <= records x epochs
    samples under way in a checkpoint: of groups and iterations of the size that they have now
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.data import DataError, Prompts, PromptTooLong, load_tokenizer
from rlinf_async.rewards import UnknownVerifier, load_verifier
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.ledger import LedgerState
from rlinf_async.runtime.jobs.language.sections import TrainingConfig
from rlinf_async.runtime.jobs.language.warm_start import has_weights
from rlinf_async.runtime.jobs.language.weights import check_weights


def open_prompts(config: LanguageConfig, model: Path) -> Prompts:
    """The run's prompts, none of which is too long for the model.

    Args:
        config: of the run.
        model: the model's folder.

    Raises:
        ConfigError: they cannot be read, do not fit the model or do not suffice, or a verifier
            that they name cannot be loaded.
    """
    room, why = _room(config, model)
    data, narrowed = config.data, room is not None and room < config.data.max_prompt_tokens
    if room is not None and narrowed:
        data = msgspec.structs.replace(data, max_prompt_tokens=room)
    try:
        prompts = Prompts(data, load_tokenizer(model))
    except DataError as error:
        blamed = narrowed and isinstance(error, PromptTooLong)
        hint = f" ({why}: lower rollout.sampling.max_tokens for longer prompts)" if blamed else ""
        raise ConfigError(f"{error}{hint}", path=("data",)) from error
    _check_count(config, prompts)
    for name in prompts.verifiers:
        try:
            load_verifier(name)
        except (UnknownVerifier, ConfigError) as error:
            problem = error.problem if isinstance(error, ConfigError) else str(error)
            raise ConfigError(problem, path=("data", "verifier")) from error
        except UsageError:
            raise
        except Exception as error:  # a user's own code may raise anything
            raise ConfigError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}",
                path=("data", "verifier"),
            ) from error
    return prompts


def check_critic(config: LanguageConfig, model: Path) -> None:
    """Refuse a folder for the critic that lacks something, or reads other tokens than the actor.

    Raises:
        ConfigError: with the folder, and what is the matter.
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
    own, actors = _described(folder).get("vocab_size"), _described(model).get("vocab_size")
    if own != actors:
        raise ConfigError(
            f"the model in {folder} knows {own} tokens, the actor's knows {actors}: a critic reads "
            "what the actor wrote, so it needs the same tokenizer",
            path=where,
        )
    check_weights(folder, where)


def _described(model: Path) -> dict[str, Any]:
    """The configuration of the text model."""
    described: dict[str, Any] = msgspec.json.decode((model / "config.json").read_bytes())
    text: dict[str, Any] = described.get("text_config") or described
    return text


def _room(config: LanguageConfig, model: Path) -> tuple[int | None, str]:
    """Tokens that a prompt may have, and why; None where the model names no limit."""
    context, longest = _context(config, model), config.rollout.sampling.max_tokens
    if context is None:
        return None, ""
    if longest >= context:
        raise ConfigError(
            f"max_tokens is {longest}, but prompt and response have to fit the model's context of "
            f"{context} tokens together: lower it",
            path=("rollout", "sampling", "max_tokens"),
        )
    room = context - longest
    return room, f"a context of {context} tokens less max_tokens = {longest} leaves {room}"


def _context(config: LanguageConfig, model: Path) -> int | None:
    """Tokens that a prompt and its response may have together."""
    rollout = config.rollout
    if rollout.backend == "toy":
        return rollout.toy.context
    engine = rollout.vllm if rollout.backend == "vllm" else rollout.transformers
    limits = (_described(model).get("max_position_embeddings"), engine.context)
    return min((one for one in limits if one), default=None)


def _check_count(config: LanguageConfig, prompts: Prompts) -> None:
    epochs, training = config.data.epochs, config.training
    there, wanted = len(prompts) * epochs, training.iterations * training.prompts
    if epochs and there < wanted:
        raise ConfigError(
            f"{len(prompts)} records x {epochs} epochs are {there} prompts, but "
            f"{training.iterations} iterations of {training.prompts} need {wanted}: set epochs to "
            "0 (on and on), or fewer iterations",
            path=("data", "epochs"),
        )


def check_unfinished(state: LedgerState, training: TrainingConfig) -> None:
    """Refuse to go on with samples under way that belong to groups or iterations of another size.

    Raises:
        UsageError: with both sizes.
    """
    requests = [*state.running, *(one.sample.request for one in state.finished)]
    groups = {one.group: one for one in requests}
    for one in groups.values():
        if one.group_size != training.group_size:
            _refuse("group_size", one.group_size, training.group_size)
    for prompts in Counter(one.iteration for one in groups.values()).values():
        if prompts != training.prompts:
            _refuse("prompts", prompts, training.prompts)


def _refuse(name: str, before: int, now: int) -> None:
    raise UsageError(
        f"training.{name} was {before} when the checkpoint was written, and is {now}: samples that "
        "were under way then could not be trained. Go on with the old value, or start anew in "
        "another folder"
    )
