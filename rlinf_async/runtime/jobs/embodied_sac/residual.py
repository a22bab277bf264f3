"""A frozen policy that a run corrects: ``[residual] path``.

It is a case of a run that begins with weights of another one: those of the frozen policy are part
of the trained one, and taken at version 0; from then on they are in its checkpoints.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from rlinf_async.backends.base import FirstWeights
from rlinf_async.backends.policies.config import Corrected, PolicyConfig
from rlinf_async.config import ConfigError
from rlinf_async.messages.converting import middle_and_half
from rlinf_async.messages.described import BoxSpace, leaves
from rlinf_async.runtime.jobs import get_job
from rlinf_async.runtime.jobs.embodied.beginning import Beginning, Source, some_of, source_of
from rlinf_async.runtime.jobs.embodied.playing import PlayingJob
from rlinf_async.runtime.jobs.embodied.settings import spaces_of
from rlinf_async.runtime.jobs.embodied_sac.config import FittedSac, SacConfig

PATH: Final = ("residual", "path")
PART: Final = "policy."
BASE: Final = "policy.base."
"""what the names of the frozen policy's tensors have before them in what is trained"""


def residual_of(config: SacConfig, policy: PolicyConfig) -> PolicyConfig:
    """The policy that corrects the one that ``residual.path`` names.

    Args:
        config: the run's configuration.
        policy: the policy that would act by itself, with the environment's spaces.

    Raises:
        ConfigError: there is no such policy, or it cannot be corrected here.
    """
    acts = policy.acts
    if not acts.numeric:
        raise ConfigError(
            f"a correction is added to the numbers of an action, but {config.env.name} takes "
            f"{acts}: leave it out",
            path=PATH,
        )
    source = _source(config)
    base, actions = _trained(source)
    _check_base(config, base, policy)
    middle, half = _stretch(config, actions, acts.columns)
    return msgspec.structs.replace(
        policy,
        name=f"{policy.name.partition('_')[0]}_residual",
        corrected=Corrected(base=base, scale=config.residual.scale, middle=middle, half=half),
    )


def begins_with_base(full: FittedSac) -> Beginning:
    """The frozen policy's weights, with which the run begins.

    Raises:
        ConfigError: its checkpoint is not there or damaged, or lacks weights or statistics.
    """
    from torch import nn

    from rlinf_async.backends.building import building
    from rlinf_async.backends.checkpoint.folders import CheckpointError
    from rlinf_async.backends.fsdp.beginning import compare
    from rlinf_async.backends.policies.base import find_policy

    corrected = full.policy.corrected
    if corrected is None:
        raise TypeError("a policy that corrects none")
    origin = _source(full).origin(corrected.base, "", None)
    with building(full.actor.seed):
        base: nn.Module = find_policy(corrected.base.name)(corrected.base)
    try:
        # In a run that learns from transitions the policy is a part of what is trained.
        found = compare(nn.ModuleDict({"policy": base}), origin.folder, prefix=PART)
        if not found.tensors:
            found = compare(base, origin.folder)
    except CheckpointError as error:
        raise ConfigError(str(error), path=PATH) from error
    if found.misfits:
        raise ConfigError(
            f"{origin.folder} is not all of a policy {corrected.base.name!r}: "
            f"{some_of(found.misfits)}",
            path=PATH,
        )
    tensors = {BASE + name.removeprefix(PART): there for name, there in found.tensors.items()}
    first = FirstWeights(folder=str(origin.folder.resolve()), tensors=tensors)
    said = f"begins with the policy of {origin.folder}, which is frozen and corrected"
    return Beginning(origin, first, said, section="residual")


def _source(config: SacConfig) -> Source:
    return source_of(config.residual, "residual", use="read as a policy of torch")


def _trained(source: Source) -> tuple[PolicyConfig, str]:
    """The frozen policy, fitted to its environment, and ``env.actions`` there."""
    try:
        job = get_job(source.job) if source.job else None
    except ConfigError as error:
        raise ConfigError(f"{source.run}: {error}", path=PATH) from error
    if job is not None and not isinstance(job, PlayingJob):
        raise ConfigError(
            f"{source.run} is a run of {source.job!r}, which trains no policy that acts in an "
            "environment: name another run",
            path=PATH,
        )
    policy, actions, _ = source.trained_by(job)
    return policy, actions


def _check_base(config: SacConfig, base: PolicyConfig, ours: PolicyConfig) -> None:
    """Refuse a policy whose actions cannot be corrected one by one, as they are here."""
    from rlinf_async.backends.policies.base import find_policy

    where, env = f"the policy in {config.residual.path}", config.env.name
    problem = ""
    if base.action_chunk > 1:
        problem = f"answers with chunks of {base.action_chunk} actions, and single ones are "
        problem += "corrected: take one that was trained with env.action_chunk = 1"
    elif base.acts != ours.acts:
        problem = f"answers with {base.acts}, and {env} takes {ours.acts}: take one for it"
    elif base.sees != ours.sees:
        problem = f"sees {base.sees}, and {env} shows {ours.sees}: take one for it"
    elif base.vision_language.folder:
        problem = f"needs the model in {base.vision_language.folder!r}, which does not travel with"
        problem += " the run: take one that was built anew"
    elif getattr(find_policy(base.name), "recurrent", False):
        problem = f"is recurrent ({base.name!r}): what it remembers at a transition is not stored; "
        problem += "take one without a memory"
    if problem:
        raise ConfigError(f"{where} {problem}", path=PATH)


def _stretch(config: SacConfig, actions: str, size: int) -> tuple[tuple[float, ...], ...]:
    """Middle and half of the range of each number, in the units of the frozen policy: those of the
    environment where its actions are clipped, else [-1, 1]."""
    if actions == "rescale":
        return (0.0,) * size, (1.0,) * size
    boxes = [one for one in leaves(spaces_of(config).action) if isinstance(one, BoxSpace)]
    middle, half = (
        np.concatenate(parts) for parts in zip(*map(middle_and_half, boxes), strict=True)
    )
    # A number with one value is 0 in [-1, 1].
    return tuple(middle.tolist()), tuple(one or 1.0 for one in half.tolist())
