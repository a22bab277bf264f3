"""Whether there are prompts enough that fit the model, and verifiers that read their references."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.data import (
    DataConfig,
    DataError,
    Prompts,
    PromptsTooLong,
    Tokenizer,
)
from rlinf_async.episodes.environments import environments, is_number
from rlinf_async.messages.language import Rejected, Sampling
from rlinf_async.observe.evaluations import HELD_OUT
from rlinf_async.rewards import ScoringPool, load_verifier
from rlinf_async.rewards.judging import BUILT_IN, INLINE, Answer, judge, verifiers
from rlinf_async.runtime.jobs.language.acceptance import acceptance_rules
from rlinf_async.runtime.jobs.language.checks.models import check_stops, check_tokens
from rlinf_async.runtime.jobs.language.checks.named import (
    OF_TRAINING,
    SETS,
    Setting,
    data_sections,
    text_of,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import EvaluationSet
from rlinf_async.runtime.jobs.language.model import processor_of
from rlinf_async.runtime.signals import run
from rlinf_async.workers.reward import RewardConfig


def open_prompts(config: LanguageConfig, model: Path, tokenizer: Tokenizer) -> Prompts:
    """The run's prompts; each fits the context of the model.

    Args:
        config: the run's configuration.
        model: the model's folder.
        tokenizer: the model's.

    Raises:
        ConfigError: they cannot be read, do not fit the model or are too few, or a verifier that
            they name cannot be loaded.
    """
    check_tokens(config, model)
    room = _room(config, model, config.rollout.sampling, OF_TRAINING)
    prompts = _opened(config, config.data, ("data",), model, tokenizer, room)
    _check_count(config, prompts)
    if config.evaluation.samples and not prompts.held_out:
        raise ConfigError(
            f"all {config.data.held_out} held-out prompts are longer than max_prompt_tokens = "
            f"{prompts.config.max_prompt_tokens} and left out: nothing is left to evaluate; raise "
            "the limit, or set evaluation.samples to 0",
            path=("data", "held_out"),
        )
    if not prompts.usable:
        raise ConfigError(
            f"none of the {len(prompts)} records is left to train on: their prompts are too long, "
            "or those of held-out records. Does the chat template write each record's own prompt?",
            path=("data",),
        )
    return prompts


def open_sets(
    config: LanguageConfig, model: Path, tokenizer: Tokenizer, training: Prompts | None = None
) -> list[EvaluationSet]:
    """The sets of prompts that every evaluation asks; each prompt fits the context of the model.

    Says on stderr where prompts of a set are among those that are trained on.

    Args:
        config: the run's configuration.
        model: the model's folder.
        tokenizer: the model's.
        training: the run's prompts, of which the held-out ones are a set; None: nothing is trained.

    Raises:
        ConfigError: as `open_prompts`.
    """
    wanted, drawn = config.evaluation, config.rollout.sampling
    held_out = [] if training is None else training.held_out[: wanted.samples]
    found = [EvaluationSet(HELD_OUT, held_out, drawn.greedily())] if held_out else []
    for name, one in wanted.sets.items():
        where, sampling = (*SETS, name), one.sampling(drawn)
        limit = OF_TRAINING if one.max_tokens is None else (*where, "max_tokens")
        room = _room(config, model, sampling, limit)
        data = msgspec.structs.replace(one.data, epochs=1)
        prompts = _opened(config, data, (*where, "data"), model, tokenizer, room)
        try:
            asked = list(itertools.islice(prompts, one.prompts or None))
        except DataError as error:  # all are too long
            raise ConfigError(str(error), path=(*where, "data")) from error
        known = 0 if training is None else training.known(asked)
        if known:
            print(
                f"{config.name}: {known} of the {len(asked)} prompts of evaluation.sets.{name} are "
                "among the records of [data], which are trained on (but for held-out ones): its "
                "figures are not those of prompts that the model has never seen",
                file=sys.stderr,
            )
        found.append(EvaluationSet(name, asked, sampling, one.samples))
    return found


def _opened(
    config: LanguageConfig,
    data: DataConfig,
    where: Setting,
    model: Path,
    tokenizer: Tokenizer,
    room: tuple[int | None, str],
) -> Prompts:
    """The prompts of a section, checked; ``room``: see `_room`."""
    check_stops(config, tokenizer)
    most, why = room
    narrowed = most is not None and most < data.max_prompt_tokens
    if most is not None and narrowed:
        data = msgspec.structs.replace(data, max_prompt_tokens=most)
    try:
        messages = config.has_episodes or bool(config.reward.model)
        prompts = Prompts(data, tokenizer, messages=messages, processor=processor_of(model))
    except DataError as error:
        blamed = narrowed and isinstance(error, PromptsTooLong)
        hint = f" ({why})" if blamed else ""
        raise ConfigError(f"{error}{hint}", path=where) from error
    for name in prompts.verifiers:
        verifiers.check(name, (*where, "verifier"), apart=True)
        if name in BUILT_IN:
            _check_references(name, prompts.references(name), (*where, "verifier"))
    run = config.episode.run
    if not data.environment_tasks and run in environments and environments[run].numbered:
        _check_numbers(run, prompts, (*where, "reference_column"))
    return prompts


def _check_numbers(run: str, prompts: Prompts, where: Setting) -> None:
    """Refuse references of which none is the number of an environment's task."""
    given = ""
    for reference in (one for name in prompts.verifiers for one in prompts.references(name)):
        if is_number(reference):
            return
        given = given or reference
    raise ConfigError(
        f"a task of the environment {run!r} is a number from 0, its reference, but no record has "
        f"one (the first has {given[:80]!r}): set data.environment_tasks in place of data.path, or "
        "name the column with the numbers",
        path=where,
    )


def _check_references(name: str, references: Iterator[str], where: Setting) -> None:
    """Refuse references of which a built-in verifier can read none: nothing would be scored.

    One that it can read is enough: others are counted by the run, and train nothing.
    """
    verifier, why, count = load_verifier(name), "", 0
    for reference in references:
        outcome = judge(name, verifier, Answer(prompt="", text="", reference=reference))
        if not isinstance(outcome, Rejected):
            return
        why, count = why or outcome.reason, count + 1
    raise ConfigError(
        f"{name!r} can read the reference of none of the {count} records that it scores, so that "
        f"nothing would be learned: {why}; is reference_column the right one?",
        path=where,
    )


def check_verifiers(config: LanguageConfig) -> None:
    """Load the verifiers that settings name, a user's own included. Those that records name are
    loaded with the prompts.

    Raises:
        ConfigError: there is no such verifier, or it cannot be imported.
        MissingExtra: a library that it needs is not installed.
    """
    missing = [name for name in config.reward.environment if name not in os.environ]
    if missing and config.cluster.backend != "ray":
        raise ConfigError(
            f"there is no environment variable {missing[0]}: set it, or leave it out",
            path=("reward", "environment"),
        )
    for data, where in data_sections(config):
        if data.verifier:
            verifiers.check(data.verifier, (*where, "verifier"), apart=True)
    for name in config.reward.preload:
        verifiers.check(name, ("reward", "preload"), apart=True)
    if config.training.accept:
        acceptance_rules.check(config.training.accept, ("training", "accept"))


def check_scoring(config: LanguageConfig, verifiers: Sequence[str]) -> None:
    """Load verifiers as a reward worker does: in a process with its limits, and without variables
    of this one that were not named. With Ray that is another host's to do.

    Raises:
        ConfigError: one cannot be loaded there, or a setting has no effect with these verifiers.
    """
    reward, names = config.reward, sorted({*verifiers, *config.reward.preload} - INLINE)
    if verifiers and not names:
        check_judges(config, inline=True, asynchronous=False)
    if not names or config.cluster.backend == "ray":
        return

    async def load() -> bool:
        async with ScoringPool(
            processes=1,
            time_limit=reward.time_limit,
            memory_limit_mib=reward.memory_limit_mib,
            environment=reward.environment,
        ) as pool:
            await pool.load(names)
            return any(name in pool.asynchronous for name in names)

    try:
        asynchronous = run(load())
    except ConfigError as error:
        raise ConfigError(
            f"in a scoring process, which has reward.memory_limit_mib = {reward.memory_limit_mib} "
            f"and the variables of reward.environment: {error.problem}",
            path=("data", "verifier"),
        ) from error
    check_judges(config, inline=False, asynchronous=asynchronous)


def check_judges(config: LanguageConfig, *, inline: bool, asynchronous: bool) -> None:
    """Refuse settings that have no effect with the verifiers of this run.

    Args:
        config: the run's configuration.
        inline: all verifiers run in the worker itself.
        asynchronous: one of them is asynchronous.

    Raises:
        ConfigError: such a setting.
    """
    reward, default = config.reward, RewardConfig()
    if not asynchronous and not reward.model and reward.calls != default.calls:
        raise ConfigError(
            f"calls is {reward.calls}, but no verifier of this run is asynchronous: each process "
            "judges one answer at a time. Write it as `async def`, set reward.processes instead, "
            "or leave it out",
            path=("reward", "calls"),
        )
    for name in ("retries", "cache"):
        if inline and getattr(reward, name) != getattr(default, name):
            raise ConfigError(
                f"{name} is {getattr(reward, name)}, but exact and numeric are neither called "
                "again nor remembered: leave it out",
                path=("reward", name),
            )


def _room(
    config: LanguageConfig, model: Path, sampling: Sampling, where: Setting
) -> tuple[int | None, str]:
    """Largest number of tokens of a prompt, and the reason; None: the model has no limit.

    Args:
        config: the run's configuration.
        model: the model's folder.
        sampling: how answers are drawn.
        where: setting of their ``max_tokens``.
    """
    context, longest = _context(config, model), sampling.max_tokens
    if config.has_episodes:
        most = config.episode.max_tokens
        if context is not None and most > context:
            raise ConfigError(
                f"max_tokens is {most}, but an episode has to fit the model's context of {context} "
                "tokens: lower it",
                path=("episode", "max_tokens"),
            )
        why = f"episode.max_tokens = {most} leaves {most - 1}: raise it for longer prompts"
        return most - 1, why
    if context is None:
        return None, ""
    if longest >= context:
        raise ConfigError(
            f"max_tokens is {longest}, but prompt and response have to fit the model's context of "
            f"{context} tokens together: lower it",
            path=where,
        )
    room = context - longest
    return room, (
        f"a context of {context} tokens less max_tokens = {longest} leaves {room}: lower "
        f"{'.'.join(where)} for longer prompts"
    )


def _context(config: LanguageConfig, model: Path) -> int | None:
    """Largest number of tokens of a prompt with its response; None: no limit."""
    rollout = config.rollout
    return rollout.part.context(rollout.engine, text_of(model))


def _check_count(config: LanguageConfig, prompts: Prompts) -> None:
    epochs, training = config.data.epochs, config.training
    there, wanted = prompts.usable * epochs, training.iterations * training.prompts
    if epochs and there < wanted:
        raise ConfigError(
            f"{prompts.usable} records x {epochs} epochs are {there} prompts, but "
            f"{training.iterations} iterations of {training.prompts} need {wanted}: set epochs to "
            "0 (on and on), or fewer iterations",
            path=("data", "epochs"),
        )
