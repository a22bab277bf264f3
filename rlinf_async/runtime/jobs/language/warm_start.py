"""The supervised phase before a run: its result is the folder that the run starts from.

It happens once: a run that is resumed, or started again in its folder, finds the weights there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlinf_async.algorithms.language.config import LanguageLossConfig
from rlinf_async.backends.fsdp.config import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.language.config import (
    LanguageFSDPConfig,
    LanguageModelConfig,
    LanguageTrainerConfig,
    SupervisedConfig,
)
from rlinf_async.config import ConfigError
from rlinf_async.data import DataError, Prompts, load_tokenizer
from rlinf_async.messages.language import Tokens
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.workers.actor.supervised import SupervisedWorker

Examples = list[tuple[Tokens, Tokens]]
"""prompts, and what is to be answered"""


def has_weights(folder: Path) -> bool:
    """Whether a model folder has weights."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def examples(config: LanguageConfig, model: Path) -> Examples:
    """Every prompt of the phase's data, held-out ones left out, with its answer and the end token.

    Raises:
        ConfigError: the data cannot be read, or do not fill a batch; the tokenizer has no
            end-of-sequence token.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so the model could not learn to stop",
            path=("model", "tokenizer"),
        )
    try:
        prompts = Prompts(config.warm_start.data or config.data, tokenizer)
    except DataError as error:
        section = ("warm_start", "data") if config.warm_start.data else ("data",)
        raise ConfigError(str(error), path=section) from error
    found = []
    while prompts.epoch == 0:
        prompt = next(prompts)
        ids = tokenizer(prompt.reference, add_special_tokens=False)["input_ids"]
        found.append((prompt.token_ids, np.asarray([*ids, tokenizer.eos_token_id], np.int32)))
    if len(found) < config.warm_start.batch_size:
        raise ConfigError(
            f"there are {len(found)} examples, which do not fill a batch of "
            f"{config.warm_start.batch_size}: set it to at most {len(found)}, or give more data",
            path=("warm_start", "batch_size"),
        )
    return found


async def warm_start(config: LanguageConfig, model: Path, learnt: Examples) -> list[float]:
    """Fit the model of this folder, and put its weights there; the loss of every step."""
    phase, actor = config.warm_start, config.actor
    optimizer = OptimizerConfig(lr=phase.lr, eps=1e-8, max_grad_norm=1.0)
    scheduler = SchedulerConfig(
        kind="cosine",
        warmup_steps=min(phase.warmup_steps, phase.steps - 1),
        total_steps=phase.steps,
        min_factor=0.1,
    )
    trainer = LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=LanguageModelConfig(path=str(model), random=not has_weights(model)),
            device=actor.device,
            precision=actor.precision,
            strategy=actor.strategy,
            optimizer=optimizer,
            scheduler=scheduler,
        ),
        loss=LanguageLossConfig(name="supervised"),
        seed=config.seed,
    )
    supervised = SupervisedConfig(steps=phase.steps, batch_size=phase.batch_size, seed=config.seed)
    counts = config.cluster
    cluster = Cluster.local() if counts.backend == "local" else Cluster.process()
    async with cluster:
        workers = await cluster.launch(
            SupervisedWorker,
            trainer,
            supervised,
            count=counts.actors,
            name="WarmStart",
            collective=config.collective,
            env_vars=counts.environment,
        )
        losses = await workers.call(SupervisedWorker.fit, learnt, str(model))
    return losses[0]
