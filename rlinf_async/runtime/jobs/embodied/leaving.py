"""A trained policy leaves its run: written as `rlinf_async.policy` reads it, loaded again, compared
with the trained one, and timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.config import UsageError
from rlinf_async.messages.described import zero_of
from rlinf_async.messages.embodied import Choice
from rlinf_async.messages.spaces import STATE, ObservationArray
from rlinf_async.runtime.interpreters import versions
from rlinf_async.runtime.jobs.embodied.playing import TrainedPolicy, trained_policy
from rlinf_async.runtime.jobs.embodied.settings import spaces_of

if TYPE_CHECKING:
    from rlinf_async.backends.policies.left import Form
    from rlinf_async.policy import Policy

COMPARED: Final = 64
"""observations for which the policy that was written is compared with the trained one"""
MOST_DIFFERENCE: Final = 1e-4
"""largest difference of an action, relative where it is above 1, with which a policy is written;
one choice that is another counts as 1"""
TIMED: Final = 1000
"""actions that are timed, at most"""
TIMED_SECONDS: Final = 2.0


class Left(NamedTuple):
    """A policy that was written."""

    env: str
    name: str
    """name of the policy, as in ``actor.fsdp.policy.name``"""
    version: int
    bytes: int
    """size of all its files"""
    difference: float
    """largest difference to the trained policy, over `COMPARED` observations"""
    median: float
    """seconds of one action"""
    slowest: float
    """seconds that 99 of 100 actions stay below"""


def leave(trained: TrainedPolicy, checkpoint: Path, out: Path, form: Form) -> Left:
    """Write the policy of a checkpoint as a new folder ``out``.

    Raises:
        UsageError: the policy cannot have this form, or would be another one in it; or the
            environment cannot be had.
        CheckpointError: ``out`` exists, or the checkpoint is damaged.
    """
    from rlinf_async.backends.checkpoint.streaming import new_folder
    from rlinf_async.backends.policies.leaving import write_policy
    from rlinf_async.backends.policies.left import Note
    from rlinf_async.backends.policies.serving import PolicyServer
    from rlinf_async.policy import Policy

    config = trained.config
    server = trained_policy(*trained, checkpoint)
    if not isinstance(server, PolicyServer):
        raise UsageError(f"{type(server).__name__} is no policy of torch: it cannot be exported")
    acting = config.acting_policy
    note = Note(
        form=form,
        made_by=f"rlinf_async {versions()['rlinf_async']}",
        env=config.env.name,
        version=server.version,
        actions=config.env.actions,
        spaces=spaces_of(config),
        policy=acting,
    )
    with new_folder(out) as folder:
        write_policy(server.policy, note, folder)
        (folder / "README.md").write_text(_read_me(note.env, note.version, out), encoding="utf-8")
        policy = Policy.load(folder)
        seen = _observations(acting)
        difference = _difference(np.asarray(server.mode(seen)), policy.answers(seen))
        if not difference <= MOST_DIFFERENCE:
            raise UsageError(
                f"as {form} the policy {acting.name!r} acts otherwise than the trained one, by "
                f"{difference:.2g}: nothing was written. Where the policy is your own, its draw() "
                "has to do what its mode() does"
            )
        times = _timed(policy)
        size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    slowest = float(np.quantile(times, 0.99))
    median = float(np.median(times))
    return Left(note.env, acting.name, note.version, size, difference, median, slowest)


def _observations(policy: PolicyConfig) -> ObservationArray:
    """Observations to compare by: numbers of a wide range, pixels and letters."""
    random = np.random.default_rng(0)
    rows = policy.sees.empty(COMPARED)
    for part in policy.sees.parts:
        place = rows if rows.dtype.names is None else rows[part.name]
        if part.name == STATE:
            scale = 10.0 ** random.uniform(-2, 1, (COMPARED, 1))
            place[...] = random.standard_normal(place.shape) * scale
        elif part.kind == "image":
            place[...] = random.integers(0, 256, place.shape)
        else:
            place[...] = random.integers(ord("a"), ord("z") + 1, place.shape)
    return rows


def _difference(ours: Choice, theirs: Choice) -> float:
    if ours.dtype.kind != "f":
        return float((ours != theirs).any())
    return float((np.abs(ours - theirs) / np.maximum(np.abs(ours), 1.0)).max())


def _timed(policy: Policy) -> list[float]:
    """Seconds of each of some actions, from an observation to an action."""
    observation, times = zero_of(policy.observation_space), list[float]()
    for _ in range(10):
        policy.act(observation)
    until = time.perf_counter() + TIMED_SECONDS
    while len(times) < TIMED and (len(times) < 20 or time.perf_counter() < until):
        began = time.perf_counter()
        policy.act(observation)
        times.append(time.perf_counter() - began)
    return times


def _read_me(env: str, version: int, out: Path) -> str:
    return f"""\
# A policy for {env}

Trained by [rlinf-async](https://pypi.org/project/rlinf-async/), version {version} of its weights.

```python
from rlinf_async import Policy

policy = Policy.load("{out.name}")
action = policy.act(observation)
```

`policy.json` has both spaces, what is done to actions, and the inputs and outputs of the graph.
"""
