"""The store: a ring of transitions, one array for each column, in memory or in mapped files.

::

    number of a transition   0 . . . . . first ........... count
                             overwritten |  in the window   |  not there yet

A transition's number is its place in the order in which all came; its slot is that modulo the
number of slots. The newest ``capacity`` are in the window.

Files are written through a shared mapping: what was written is there after a SIGKILL of the
process, because the pages belong to the system. ``spare`` slots beyond the capacity keep what a
checkpoint's window holds from being overwritten until the next checkpoint, so that a checkpoint is
two numbers and no copy.

Transitions can be drawn in proportion to priorities, as in Schaul et al. 2016, "Prioritized
Experience Replay", sections 3.3 and 3.4: probabilities ``p^alpha / sum``, weights ``(N P)^-beta``
divided by the largest of the batch; a new transition has the largest priority that there is.

A transition of step ``t`` has the rewards of up to ``n`` steps (Sutton and Barto 2018, section
7.1)::

    reward    r[t] + gamma r[t+1] + ... + gamma^(m-1) r[t+m-1]
    next      the observation after step t+m-1
    discount  gamma^m; 0 where the episode terminated at step t+m-1

``m`` is ``n``, or less where the episode ends (terminated or truncated) or the trajectory does. The
next observation of an episode that was truncated is its own last one, and its value counts: it
would have gone on (Pardo et al. 2018). Every step of a trajectory becomes one transition, whatever
comes after the trajectory, so each is in the store exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.data.demonstrations import DemonstratedEpisode
from rlinf_async.messages.embodied import Bools, Choice, Floats, Ints, Trajectory, samples_of
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.observe.files import atomic_write
from rlinf_async.workers.replay.columns import Column, ReplayError
from rlinf_async.workers.replay.images import ImageRing


class Transitions(NamedTuple):
    """``N`` transitions, in the order of steps, then envs."""

    observation: ObservationArray
    """``[N, D]``"""
    action: Choice
    """``[N, A]``"""
    reward: Floats
    """``[N]``"""
    next_observation: ObservationArray
    """``[N, D]``"""
    discount: Floats
    """``[N]``"""
    version: Ints
    """``[N]``"""


def transitions_of(trajectory: Trajectory, *, n_step: int, gamma: float) -> Transitions:
    """Return the transitions of all samples of a trajectory.

    Raises `ValueError` for a trajectory without next observations.
    """
    steps, envs = trajectory.reward.shape
    following = following_of(trajectory)
    ended = trajectory.terminated | trajectory.truncated
    columns = np.arange(envs)
    last = np.broadcast_to(np.arange(steps)[:, None], (steps, envs)).copy()
    reward = trajectory.reward.astype(np.float32, copy=True)
    discount = np.full((steps, envs), gamma, np.float32)
    for _ in range(1, n_step):
        goes_on = (last + 1 < steps) & ~ended[last, columns]
        last += goes_on
        reward += np.where(goes_on, discount * trajectory.reward[last, columns], np.float32(0.0))
        discount = np.where(goes_on, discount * np.float32(gamma), discount)
    discount = np.where(trajectory.terminated[last, columns], np.float32(0.0), discount)
    version = np.broadcast_to(trajectory.version[:, None], (steps, envs))
    samples = np.ones((steps, envs), np.bool_) if trajectory.valid is None else trajectory.valid
    return Transitions(
        trajectory.observation[samples],
        trajectory.action[samples],
        reward[samples],
        following[last, columns][samples],
        discount[samples],
        version[samples],
    )


def intervened_in(trajectory: Trajectory) -> Bools:
    """Return in which of its transitions ``[N]`` the action is that of a person."""
    if trajectory.intervened is None:
        return np.zeros(samples_of(trajectory), np.bool_)
    if trajectory.valid is None:
        return trajectory.intervened.ravel()
    return trajectory.intervened[trajectory.valid]


def following_of(trajectory: Trajectory) -> ObservationArray:
    """Return the observations ``[T, E, D]`` after each step, of its own episode; where that
    terminated and they are not known, of the next one.

    Raises `ValueError` for a trajectory without next observations.
    """
    if trajectory.last_observation is None:
        raise ValueError(
            "a trajectory came without next observations: its ticket has to ask for transitions"
        )
    following: ObservationArray = np.concatenate(
        [trajectory.observation[1:], trajectory.last_observation[None]]
    )
    if trajectory.final_observation is not None:
        following[trajectory.truncated] = trajectory.final_observation
    if trajectory.terminal_observation is not None:
        following[trajectory.terminated] = trajectory.terminal_observation
    return following


def shown_in(trajectory: Trajectory, made: Transitions) -> dict[str, NDArray[Any]]:
    """Return those of its transitions, by column, in which a person acted, or said what they would
    do: that is their action then."""
    acts, action = intervened_in(trajectory), made.action
    if trajectory.label is not None:
        said = trajectory.label
        action = said[...] if trajectory.valid is None else said[trajectory.valid]
        action = action.reshape(made.action.shape)
    return {name: array[acts] for name, array in made._replace(action=action)._asdict().items()}


def trajectory_of(episode: DemonstratedEpisode) -> Trajectory:
    """Return a demonstrated episode as the trajectory of one env, by version -1 of the weights.

    Raises `ValueError` for one without its outcome.
    """
    outcome, steps = episode.outcome, len(episode.action)
    if outcome is None:
        raise ValueError("a demonstrated episode has no rewards: its folder has no transitions")
    ended = np.arange(steps)[:, None] == steps - 1
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=0,
        observation=episode.observation[:, None],
        action=episode.action[:, None],
        log_prob=np.zeros((steps, 1), np.float32),
        value=np.zeros((steps + 1, 1), np.float32),
        reward=outcome.reward[:, None],
        terminated=ended & outcome.terminated,
        truncated=ended & (not outcome.terminated),
        final_value=np.zeros((steps, 1), np.float32),
        version=np.full(steps, -1),
        last_observation=outcome.last_observation,
        final_observation=None if outcome.terminated else outcome.last_observation,
    )


Values = NDArray[np.float64]


class SumTree:
    """Values of the numbers ``0 .. size - 1``, all 0 at first, drawn in logarithmic time.

    Source: Schaul et al. 2016, "Prioritized Experience Replay", appendix B.2.1. A parent is the sum
    of its children, computed anew whenever one of them changes: errors of rounding do not add up.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(size - 1, 1).bit_length()
        self._nodes = np.zeros(2 * self._leaves)  # node k has the children 2k and 2k + 1

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._nodes[1])

    def set(self, numbers: Ints, values: Values) -> None:
        """Give these numbers these values; of a number that stands there twice, the last counts."""
        nodes = numbers + self._leaves
        self._nodes[nodes] = values
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def get(self, numbers: Ints) -> Values:
        """Return the values of entries, by number."""
        found: Values = self._nodes[numbers + self._leaves]
        return found

    def find(self, sums: Values) -> Ints:
        """Return the numbers at these cumulative sums, each at least 0 and below `total`."""
        left = sums.copy()
        nodes = np.ones(len(sums), np.int64)
        while nodes[0] < self._leaves:
            children = 2 * nodes
            values = self._nodes[children]
            # Rounding may leave as much as the whole: then a child without any value is avoided.
            right = (left >= values) & (self._nodes[children + 1] > 0.0)
            left -= np.where(right, values, 0.0)
            nodes = children + right
        return nodes - self._leaves


LAYOUT = "layout.json"


class _Layout(msgspec.Struct, frozen=True):
    """Layout of the files of a store, which only the run that made them reads."""

    slots: int
    columns: dict[str, str]


class ReplayStore:
    """Transitions by number.

    Args:
        columns: columns by name.
        capacity: transitions in the window.
        spare: further slots, of what has left the window.
        folder: folder of the files; None: in memory.
        fresh: make new files; else those that are there are opened.

    Raises `ReplayError` where files that are to be opened are missing, or of another layout.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        capacity: int,
        *,
        spare: int = 0,
        folder: Path | None = None,
        fresh: bool = True,
    ) -> None:
        self.capacity, self.slots = capacity, capacity + spare
        self.count = 0
        """transitions that ever came"""
        self.oldest = 0
        """number before which transitions are not there, though the window might begin earlier"""
        if folder is None:
            self.arrays: dict[str, NDArray[Any]] = {
                name: np.zeros((self.slots, *column.shape), column.kept)
                for name, column in columns.items()
            }
        else:
            self.arrays = _mapped(columns, self.slots, folder, fresh=fresh)
        compressed = {name: column for name, column in columns.items() if column.images}
        self._images: ImageRing | None = None
        if compressed:
            self._images = ImageRing(compressed, self.arrays, self.slots, folder)

    @property
    def first(self) -> int:
        """The number of the oldest transition in the window."""
        return max(self.oldest, self.count - self.capacity)

    def __len__(self) -> int:
        return self.count - self.first

    def slots_of(self, numbers: Ints) -> Ints:
        """Return where these transitions lie."""
        return numbers % self.slots

    def write(self, rows: Mapping[str, NDArray[Any]]) -> Ints:
        """Write new transitions ``[N, ...]`` behind the newest, and return their numbers.

        They are in the window once `count` is moved on by ``N``.
        """
        numbers = np.arange(self.count, self.count + len(rows["reward"]))
        slots = self.slots_of(numbers)
        if self._images is not None:
            new = range(self.count, self.count + len(numbers))
            rows = {
                **rows,
                **self._images.put(new, rows, max(self.oldest, self.count - self.slots)),
            }
        for name, array in rows.items():
            self.arrays[name][slots] = array
        return numbers

    def column(self, name: str, numbers: Ints, *, images: bool = True) -> NDArray[Any]:
        """Return copies of what a column has of transitions.

        ``images``: whether images are wanted; else those that are compressed hold anything.

        Raises `ReplayError` where an image cannot be read.
        """
        if self._images is not None and name in self._images.columns:
            return self._images.take(name, numbers, images=images)
        return self.arrays[name][self.slots_of(numbers)]

    def take(self, numbers: Ints) -> dict[str, NDArray[Any]]:
        """Return copies of transitions, by column."""
        return {name: self.column(name, numbers) for name in self.arrays}

    def save(self, folder: Path, names: Iterable[str]) -> None:
        """Copy columns of what is in the window into the folder of a checkpoint."""
        slots = self.slots_of(self.numbers)
        for name in names:
            np.save(folder / f"{name}.npy", self.arrays[name][slots], allow_pickle=False)
        if self._images is not None:
            self._images.save(folder, range(self.first, self.count))

    def load(self, folder: Path, names: Iterable[str]) -> None:
        """Take them from there."""
        slots = self.slots_of(self.numbers)
        for name in names:
            file, array = folder / f"{name}.npy", self.arrays[name]
            found = np.load(file, allow_pickle=False)
            if found.dtype != array.dtype:
                raise ReplayError(
                    f"{file} has {found.dtype}; this run has {array.dtype}: it cannot go on with it"
                )
            array[slots] = found
        if self._images is not None:
            self._images.load(folder, range(self.first, self.count))

    def check_images(self) -> None:
        """Raise `ReplayError` where the file of an image in the window is missing, or cut."""
        if self._images is not None:
            self._images.check(range(self.first, self.count))

    @property
    def numbers(self) -> Ints:
        """The numbers of all transitions in the window."""
        return np.arange(self.first, self.count)


class Shown:
    """What is drawn as demonstrations: the transitions of several stores, one after the other."""

    def __init__(self, *stores: ReplayStore) -> None:
        self._stores = stores

    def __len__(self) -> int:
        return sum(map(len, self._stores))

    def take(self, places: Ints) -> dict[str, NDArray[Any]]:
        """Return copies of transitions, by column; places count from 0, over all stores."""
        rows: dict[str, NDArray[Any]] = {}
        before = 0
        for store in self._stores:
            here = (places >= before) & (places < before + len(store))
            for name, array in store.take(store.first + places[here] - before).items():
                whole = rows.setdefault(
                    name, np.empty((len(places), *array.shape[1:]), array.dtype)
                )
                whole[here] = array
            before += len(store)
        return rows


def _mapped(
    columns: Mapping[str, Column], slots: int, folder: Path, *, fresh: bool
) -> dict[str, NDArray[Any]]:
    described = {name: f"{column.kept} {list(column.shape)}" for name, column in columns.items()}
    layout = _Layout(slots, described)
    path = folder / LAYOUT
    if fresh:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("images-*.bin"):
            left.unlink()
    else:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Layout)
        except (OSError, msgspec.DecodeError) as error:
            raise ReplayError(
                f"the replay store in {folder} cannot be opened: {error}. Restore it, or start "
                "again in another folder"
            ) from error
        if found != layout:
            raise ReplayError(
                f"the replay store in {folder} has {found.slots} slots of {found.columns}; this "
                f"run has {slots} of {described}: it cannot go on with it"
            )
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        file = folder / f"{name}.bin"
        if not fresh and not file.is_file():
            raise ReplayError(f"{file} is missing: restore it, or start again in another folder")
        arrays[name] = np.memmap(
            file, column.kept, "w+" if fresh else "r+", shape=(slots, *column.shape)
        )
    if fresh:
        atomic_write(path, msgspec.json.encode(layout))
    return arrays


LEAST: Final = 1e-6
"""constant added to errors, so that each transition has a chance to be drawn again"""


class Priorities:
    """The column ``priority`` of a store, and a sum tree of its powers over the slots."""

    def __init__(self, store: ReplayStore, alpha: float) -> None:
        self._store, self._alpha = store, alpha
        self._tree = SumTree(store.slots)
        if len(store):
            slots = store.slots_of(store.numbers)
            self._tree.set(slots, self._powers(store.arrays["priority"][slots]))

    def added(self, numbers: Ints, left: Ints) -> None:
        """Take in new transitions, which have entered the window; ``left`` have left it."""
        store = self._store
        self._tree.set(store.slots_of(left), np.zeros(len(left)))
        slots = store.slots_of(numbers)
        others = store.slots_of(np.arange(store.first, numbers[0] if len(numbers) else store.first))
        largest = float(store.arrays["priority"][others].max()) if len(others) else 1.0
        store.arrays["priority"][slots] = largest
        self._tree.set(slots, np.full(len(slots), self._powers(np.array(largest))))

    def update(self, numbers: Ints, errors: Floats) -> None:
        """Give transitions the priorities of their last errors, unless they have left."""
        there = (numbers >= self._store.first) & (numbers < self._store.count)
        slots = self._store.slots_of(numbers[there])
        priority = np.abs(errors[there]) + np.float32(LEAST)
        self._store.arrays["priority"][slots] = priority
        self._tree.set(slots, self._powers(priority))

    def draw(self, random: np.random.Generator, size: int, beta: float) -> tuple[Ints, Floats]:
        """Draw ``size`` transitions; return their numbers and weights.

        One from each of so many equal ranges of the cumulative probability.
        """
        store, total = self._store, self._tree.total
        slots = self._tree.find((np.arange(size) + random.random(size)) * (total / size))
        probability = self._tree.get(slots) / total
        weight = (len(store) * probability) ** -beta
        newest = store.count - 1
        numbers = newest - (newest - slots) % store.slots
        return numbers, (weight / weight.max()).astype(np.float32)

    def _powers(self, priority: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        powers: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (
            priority.astype(np.float64) ** self._alpha
        )
        return powers
