"""Messages of the embodied jobs: tickets, observations, actions, trajectories, transitions.

::

    Collect       runtime -> env       "collect so many steps for this iteration"
    Observations  env     -> rollout   one stage of one env worker waits for its actions
    Actions       rollout -> env       the answer, by key ``stage_key(env_rank, stage)``
    Proposal      env     -> person    what the policy is about to do
    Intervention  person  -> env       the answer, by the same key: an action, or nothing
    Trajectory    env     -> actor     what one stage collected for one iteration, by data rank

    BatchRequest  actor   -> replay    "draw this batch"; priorities of earlier ones
    ReplayBatch   replay  -> actor     the answer
    Collected     replay  -> runtime   what an iteration has added, and what is in the store

Shapes are written with ``E`` envs of one stage, ``T`` steps, ``D`` observation values, ``A``
columns of actions, ``H`` numbers of a recurrent policy's memory, and ``B`` transitions of an
optimizer step, which ``R`` data ranks share. Arrays are float32 unless said otherwise. Observations
with images or texts are structured, without the last dimension: see `rlinf_async.messages.spaces`.
Discrete actions are int64 ``[T, E]``. A transition may span several steps: see
`rlinf_async.workers.replay.store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.spaces import ObservationArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Choice = NDArray[np.float32 | np.int64]
"""Actions: float32 ``[..., A]``, int64 ``[..., A]`` of choices, int64 ``[...]`` of one choice."""


def stage_key(env_rank: int, stage: int) -> str:
    """The key under which a stage's answers travel."""
    return f"{env_rank}/{stage}"


class ControlCounts(msgspec.Struct, kw_only=True):
    """What a robot's loop in real time has counted: `rlinf_async.realtime`."""

    steps: int = 0
    """steps whose time has come"""
    starved: int = 0
    """steps for which no action was there at their deadline"""
    late: int = 0
    """steps whose command was sent after their deadline, though its action was there"""
    skipped: int = 0
    """steps that got no command, since the next one was due before"""
    clipped: int = 0
    """commands that were clipped to a limit"""
    refused: int = 0
    """commands that were refused: beyond a limit, NaN or infinite"""
    answers: int = 0
    """answers of the policy"""
    stale_answers: int = 0
    """answers that came when the steps of all their actions had gone by"""
    jitter_sum: float = 0.0
    """seconds from the time at which steps were due to their beginning, over all that began"""
    jitter_max: float = 0.0
    answer_sum: float = 0.0
    """seconds from what was shown to the answer, over all answers"""
    answer_max: float = 0.0

    @property
    def missed(self) -> int:
        """Steps that have missed their deadline."""
        return self.starved + self.late + self.skipped

    @property
    def otherwise(self) -> int:
        """Answers and commands that were not executed as the policy said."""
        return self.stale_answers + self.clipped + self.refused

    def add_jitter(self, seconds: float) -> None:
        """Count a step that began so late."""
        self.jitter_sum += seconds
        self.jitter_max = max(self.jitter_max, seconds)

    def add_answer(self, seconds: float) -> None:
        """Count an answer that took so long."""
        self.answer_sum += seconds
        self.answer_max = max(self.answer_max, seconds)

    def plus(self, other: ControlCounts) -> ControlCounts:
        """Return both together: sums, and the larger of two maxima."""
        return ControlCounts(
            **{
                name: max(mine, theirs) if name.endswith("_max") else mine + theirs
                for name in self.__struct_fields__
                for mine, theirs in [(getattr(self, name), getattr(other, name))]
            }
        )

    def metrics(self) -> dict[str, float]:
        """Columns of the metrics; milliseconds."""
        began = max(self.steps - self.skipped, 1)
        return {
            "control_steps": float(self.steps),
            "control_missed": float(self.missed),
            "control_starved": float(self.starved),
            "control_late": float(self.late),
            "control_skipped": float(self.skipped),
            "control_clipped": float(self.clipped),
            "control_refused": float(self.refused),
            "control_stale_answers": float(self.stale_answers),
            "control_jitter_ms": 1e3 * self.jitter_sum / began,
            "control_jitter_max_ms": 1e3 * self.jitter_max,
            "control_answer_ms": 1e3 * self.answer_sum / max(self.answers, 1),
            "control_answer_max_ms": 1e3 * self.answer_max,
        }


def all_counts(parts: Iterable[ControlCounts | None]) -> ControlCounts | None:
    """Return the counts of all together; None where none of them is in real time."""
    found = [one for one in parts if one is not None]
    return reduce(ControlCounts.plus, found) if found else None


class Level(msgspec.Struct, frozen=True):
    """A level of a curriculum."""

    number: int = 0
    """from 0"""
    options: dict[str, Any] = {}
    """with which its episodes are begun: of ``reset``"""


class Collect(msgspec.Struct, frozen=True, kw_only=True):
    """runtime -> env: collect ``steps`` steps in every env of this worker for ``iteration``."""

    iteration: int
    steps: int
    min_version: int
    """The oldest weights that may act: ``iteration - max_staleness``, at least 0."""
    actor_ranks: int | None = None
    """ranks that share the trajectories of this iteration; None: as many as the worker was given"""
    epochs: int = 1
    """trajectories of ``steps`` steps that each stage collects, one after the other"""
    transitions: bool = False
    """Trajectories have the next observations, for a replay worker, instead of values."""
    level: Level | None = None
    """level in which episodes begin; None: there is no curriculum"""


class Observations(msgspec.Struct, kw_only=True):
    """env -> rollout: one stage waits."""

    env_rank: int
    stage: int
    incarnation: int
    """Number of restarts of this env worker; an answer to an earlier life is dropped."""
    sequence: int
    """Number of the question in this stage; the answer has the same."""
    observation: ObservationArray
    """``[E, D]``"""
    min_version: int
    value_only: bool = False
    """The trajectory ends here: only values are asked for, for the bootstrap."""
    final_observation: ObservationArray | None = None
    """``[K, D]``: the last observations of the K episodes that were truncated in the last step."""
    deterministic: bool = False
    """The most likely actions are asked for, not sampled ones: evaluation."""
    memory: Floats | None = None
    """``[E, H]``: what a recurrent policy remembers of the episodes; None: they all begin"""
    final_memory: Floats | None = None
    """``[K, H]``: the same, of the episodes of ``final_observation``"""


class Actions(msgspec.Struct, kw_only=True):
    """rollout -> env: the answer to one `Observations`."""

    incarnation: int
    sequence: int
    action: Choice | None
    """``[E, A]`` (or int64 ``[E]``); None when only values were asked for."""
    log_prob: Floats | None
    """``[E]``, of the distribution that was sampled from."""
    value: Floats
    """``[E]``"""
    final_value: Floats | None
    """``[K]``: values of ``final_observation``."""
    version: int
    """version of the weights that answered"""
    memory: Floats | None = None
    """``[E, H]``: what a recurrent policy remembers after these observations; others: None"""
    chain: Floats | None = None
    """``[E, C]``: how the actions of a flow policy came about; others: None"""
    intervened: Bools | None = None
    """``[E]``: whose action, or label, is that of a person; None: no person is asked"""
    label: Choice | None = None
    """as ``action``: what a person who only says it would do; None: they do it"""
    verdict: Ints | None = None
    """``[E]``: whose episode a person ends with this step, 1 as a success, 0 as a failure, -1
    where it goes on; None: everywhere"""


GOES_ON: Final = -1
"""verdict on an episode that is not ended: see `Actions`"""


class Verdict(msgspec.Struct, frozen=True):
    """What a person answers who ends the episode with the step that they are asked about."""

    success: bool
    """the step pays 1, and the episode has succeeded; or 0, and it has failed"""
    action: Any = None
    """what the person does in this step; None: what the policy does"""


class Proposal(msgspec.Struct, kw_only=True):
    """env -> intervention: the policy is about to act; does the person act instead?"""

    env_rank: int
    stage: int
    incarnation: int
    """Number of restarts of this env worker."""
    sequence: int
    """Number of the question in this stage; the answer has the same."""
    observation: ObservationArray
    """``[E, D]``"""
    action: Choice
    """``[E, A]`` (or int64 ``[E]``): the policy's"""


class Intervention(msgspec.Struct, kw_only=True):
    """intervention -> env: the answer to one `Proposal`."""

    incarnation: int
    sequence: int
    action: Choice | None
    """``[E, A]``, of which those count where the person acts; None: the policy acts everywhere"""
    acts: Bools | None
    """``[E]``: where the person acts; None as ``action``"""
    verdict: Ints | None = None
    """``[E]``, as in `Actions`; None: no episode is ended"""
    says: bool = False
    """whether the person only says what they would do, and the policy acts"""


class Trajectory(msgspec.Struct, kw_only=True):
    """env -> actor: what one stage collected for one iteration."""

    iteration: int
    env_rank: int
    stage: int
    epoch: int = 0
    """number of this trajectory among those that the stage collected for the iteration"""
    observation: ObservationArray
    """``[T, E, D]``, as the env gave it (not normalised)"""
    action: Choice
    """``[T, E, A]`` or int64 ``[T, E]``"""
    log_prob: Floats
    """``[T, E]``"""
    value: Floats
    """``[T + 1, E]``; the last row is the bootstrap value"""
    reward: Floats
    """``[T, E]``"""
    terminated: Bools
    """``[T, E]``: the episode ended for good: no bootstrap"""
    truncated: Bools
    """``[T, E]``: the episode was cut: bootstrap with ``final_value``"""
    final_value: Floats
    """``[T, E]``: value of the observation an episode was cut at, 0 elsewhere"""
    version: Ints
    """``[T]``: version of the weights that acted at each step"""
    action_reward: Floats | None = None
    """``[T, E, k]``: the reward of each action of a chunk, 0 where it was not executed. ``reward``
    is their sum, and a step is a chunk"""
    executed: Bools | None = None
    """``[T, E, k]``: which actions of a chunk were executed: none after the end of an episode"""
    valid: Bools | None = None
    """``[T, E]``: False where a step only began an episode, in simulators that do so in a step of
    its own; None: all are samples"""
    incarnation: int = 0
    """Number of restarts of the env worker; another life has other episodes."""
    memory: Floats | None = None
    """``[E, H]``: what a recurrent policy remembered before the first step; None: nothing, all 0"""
    chain: Floats | None = None
    """``[T, E, C]``: how the actions of a flow policy came about, which training evaluates in place
    of them; others: None"""
    last_observation: ObservationArray | None = None
    """``[E, D]``, with ``Collect.transitions``: the observations after the last step"""
    final_observation: ObservationArray | None = None
    """``[K, D]``, with ``Collect.transitions``: the last observations of the K episodes that were
    truncated, in the order of steps, then envs; None: there are none"""
    terminal_observation: ObservationArray | None = None
    """``[J, D]``, with ``Collect.transitions``: the same of the J that terminated; None: there are
    none, or a simulator of many did not show them"""
    control: ControlCounts | None = None
    """what was counted in real time; None: it was not in real time"""
    episode_return: list[float] = []
    """undiscounted return of each episode that ended in here"""
    episode_length: list[int] = []
    """steps of each episode that ended in here"""
    episode_success: list[bool | None] = []
    """whether each episode that ended in here succeeded; None: the environment does not say"""
    episode_level: list[int] = []
    """level of the curriculum in which each episode that ended in here began; none without one"""
    intervened: Bools | None = None
    """``[T, E]``: whose action, or label, is that of a person; None: no person is asked"""
    label: Choice | None = None
    """as ``action``: what a person who only says it would do, where ``intervened``"""
    late_interventions: int = 0
    """answers of the person that were found in here, and came after their deadline: dropped"""
    unanswered: int = 0
    """questions to the person whose deadline went by"""


def samples_of(trajectory: Trajectory) -> int:
    """Steps of the environments, those of a chunk that was cut short included.

    Steps that only began an episode are none.
    """
    if trajectory.executed is not None:
        return trajectory.executed.size
    return trajectory.reward.size if trajectory.valid is None else int(trajectory.valid.sum())


class InterventionCounts(msgspec.Struct, kw_only=True):
    """What a person has done in the steps of an iteration."""

    steps: int = 0
    acted: int = 0
    """steps whose action, or label, is that of the person"""
    late: int = 0
    """answers that came after their deadline, and were dropped"""
    unanswered: int = 0
    """questions whose deadline went by"""
    demonstrations: int = 0
    """transitions of the person that are drawn as demonstrations, of the whole run"""

    def metrics(self) -> dict[str, float]:
        """Columns of the metrics."""
        return {
            "intervention_share": self.acted / max(self.steps, 1),
            "intervention_late": float(self.late),
            "intervention_unanswered": float(self.unanswered),
            "intervention_demonstrations": float(self.demonstrations),
        }


def interventions_in(trajectories: Sequence[Trajectory]) -> InterventionCounts | None:
    """Return what a person has done in these; None where none was asked."""
    asked = [(one, one.intervened) for one in trajectories if one.intervened is not None]
    if not asked:
        return None
    return InterventionCounts(
        steps=sum(samples_of(one) for one, _ in asked),
        acted=sum(int(acts[... if one.valid is None else one.valid].sum()) for one, acts in asked),
        late=sum(one.late_interventions for one, _ in asked),
        unanswered=sum(one.unanswered for one, _ in asked),
    )


class TrainReport(msgspec.Struct, kw_only=True):
    """actor -> runtime: one rank trained its share of an iteration; its weights are published."""

    iteration: int
    version: int
    """version of the resulting weights"""
    metrics: dict[str, float]
    """losses, KL, clip fraction, gradient norm, learning rate, ..."""
    env_steps: int
    """environment steps in this rank's share of the iteration"""
    lag_mean: float
    """versions between the weights that acted and the weights that were trained, over steps"""
    lag_max: int
    duplicates: int
    """trajectories left out since the last report because they had come before"""
    episode_return: list[float] = []
    episode_length: list[int] = []
    episode_success: list[bool | None] = []
    episode_level: list[int] = []
    ranks: int = 1
    """number of ranks that train the next iteration and share its data"""
    control: ControlCounts | None = None
    """what was counted in real time in this rank's share"""


class BatchRequest(msgspec.Struct, kw_only=True):
    """rank 0 of the actor -> replay: draw a batch for an optimizer step of all ranks."""

    iteration: int
    number: int
    """number of the batch in its iteration, from 0"""
    index: Ints | None = None
    """``[K]``: transitions of earlier batches whose priorities have changed"""
    priority: Floats | None = None
    """``[K]``: absolute temporal-difference errors"""


class ReplayBatch(msgspec.Struct, kw_only=True):
    """replay -> each data rank of the actor: its share of the transitions of an optimizer step."""

    iteration: int
    number: int
    index: Ints
    """``[B]``: numbers of the transitions, in the order in which the store has got them, -1 of
    demonstrations; the shares of all ranks, one after the other"""
    weight: Floats
    """``[B / R]``: importance-sampling weights, at most 1; all 1 where sampling is uniform"""
    observation: ObservationArray
    """``[B / R, D]``"""
    action: Choice
    """``[B / R, A]``"""
    reward: Floats
    """``[B / R]``: discounted sum over the steps of the transition"""
    next_observation: ObservationArray
    """``[B / R, D]``"""
    discount: Floats
    """``[B / R]``: of the next observation's value; 0 where the episode terminated"""
    version: Ints
    """``[B / R]``: version of the weights that acted; -1 of demonstrations"""
    demonstrated: Bools | None = None
    """``[B / R]``: which are demonstrations; None: the run has none"""


class Collected(msgspec.Struct, kw_only=True):
    """replay -> runtime: an iteration's trajectories are in the store."""

    iteration: int
    env_steps: int
    """environment steps of the iteration"""
    size: int
    """transitions in the store"""
    age_mean: float
    """versions since the stored transitions were collected, as a mean"""
    age_max: int
    lag_mean: float
    """versions between the weights that acted in the iteration and those it is trained with"""
    lag_max: int
    duplicates: int
    """trajectories left out since the last report because they had come before"""
    episode_return: list[float] = []
    episode_length: list[int] = []
    episode_success: list[bool | None] = []
    episode_level: list[int] = []
    control: ControlCounts | None = None
    """what was counted in real time"""
    intervention: InterventionCounts | None = None
    """what was counted of the person; None: none is asked"""


SUCCESS: Final = ("is_success", "success")
"""Keys of info; the first that says something counts."""


def success_of(info: Any) -> bool | None:
    """Return whether the episode succeeded of whose last step this is the info; None: no word.

    An environment says so by ``is_success`` or ``success`` in the info of the last step: True or
    False, or 1 or 0. Anything else (nothing at all, None, NaN, 0.7) is no word.
    """
    if not isinstance(info, Mapping):
        return None
    said = (_truth(info[name]) for name in SUCCESS if name in info)
    return next((one for one in said if one is not None), None)


def success_at(infos: Any, place: int) -> bool | None:
    """`success_of` one of many environments that are stepped in one call.

    ``infos`` are a dict of arrays, where ``_is_success`` says which of them mean something
    (`gymnasium.vector.VectorEnv`), or a dict for each environment (Gymnasium before 1.0).
    """
    if not isinstance(infos, Mapping):
        return success_of(infos[place])
    known = {
        name: infos[name][place]
        for name in SUCCESS
        if name in infos and (f"_{name}" not in infos or infos[f"_{name}"][place])
    }
    return success_of(known)


def success_rate(said: Sequence[bool | None], *, reports: bool = False) -> float | None:
    """Return the share of episodes that succeeded; None where there are none, or none of them says.

    ``reports``: whether the environment has said it of others, so that silence is no success.

    Where an environment reports success in some episodes, those of which it says nothing count as
    not succeeded.
    """
    if not said or not (reports or any(one is not None for one in said)):
        return None
    return sum(one is True for one in said) / len(said)


def _truth(value: Any) -> bool | None:
    """The value as a bool: of a number, an array of one element, a tensor on any device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    return bool(array.item()) if array.item() in (0, 1) else None
