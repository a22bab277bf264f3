"""Goals in hindsight: what an episode did reach is a goal that it could have had.

Source: Andrychowicz et al. 2017, "Hindsight Experience Replay". Of the transitions of a batch some
get another goal, which their episode reached at their own end or later::

    an episode in the store    t ... t+m-1 ......... q ......... the last step that is known
                               |___ n steps ___|     |           |
    the transition at t        its n rewards are     goal: "future", any q; or "final"
                               computed anew

Only what is drawn is changed, never what is stored: the store has each step once, and a batch still
depends on the seed, the iteration and its number alone. Which transition belongs to which episode
is a column of the store; which episodes go on is part of what is booked with it.

An episode may go on over several trajectories. Of one whose environment has died, or that was under
way when the run ended, what had come of it is what it has reached.

The reward under another goal is what the environment's own ``compute_reward`` says, of what the
numbers show after the step. Whether the episode ends with the step, its ``compute_terminated`` says
where it has one; an end that this does not explain, or that no such function says, stays.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from rlinf_async.messages.embodied import Bools, Floats, Ints, Trajectory, stage_key
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.workers.env.goals import GoalRewards, Goals
from rlinf_async.workers.replay.columns import ReplayError
from rlinf_async.workers.replay.store import ReplayStore, following_of

Strategy = Literal["future", "final"]

AS_PAID = 1e-4
"""how far a reward may be from what was paid, absolutely and relatively: goals are float32 here"""


class GoingOn(msgspec.Struct, frozen=True):
    """Episodes of the environments of a stage that go on."""

    incarnation: int
    """of the env worker"""
    episodes: list[int]
    """``[E]``: -1 where none does"""


class Hindsight:
    """The episodes of a store, and other goals for transitions that are drawn from it.

    Args:
        store: one that has the column ``episode``.
        going_on: episodes that go on, by `stage_key`; it is kept up to date.
        goals: where goals stand.
        rewards: what they pay.
        strategy: which goals are taken.
        gamma: discount of a step.
        n_step: steps of which a transition has the rewards.
    """

    def __init__(
        self,
        store: ReplayStore,
        going_on: dict[str, GoingOn],
        goals: Goals,
        rewards: GoalRewards,
        *,
        strategy: Strategy,
        gamma: float,
        n_step: int,
    ) -> None:
        self._store, self._going_on = store, going_on
        self._goals, self._rewards = goals, rewards
        self._strategy, self._gamma, self._n_step = strategy, gamma, n_step
        self._episodes: dict[int, array[int]] = {}
        """numbers of the steps of each episode, in their order"""
        self._compared = self._differing = 0
        """steps of this life whose rewards were compared, and those that were paid otherwise"""
        self._places = np.zeros(store.slots, np.int64)
        """of each slot, the place of its step among these"""
        numbers = store.numbers
        self._index(numbers, store.arrays["episode"][store.slots_of(numbers)])

    def close(self) -> None:
        """Close the environment."""
        self._rewards.close()

    # ---- what comes

    def episodes_of(self, trajectory: Trajectory) -> Ints:
        """Return the episode ``[T * E]`` of each step of a trajectory that is to be written next.

        Raises `ReplayError` where the environment pays something else than it computes.
        """
        self._check_paid(trajectory)
        ended = trajectory.terminated | trajectory.truncated
        numbers = self._store.count + np.arange(ended.size).reshape(ended.shape)
        episodes = np.empty_like(numbers)
        now = self._begun(trajectory)
        for step, number in enumerate(numbers):
            episodes[step] = np.where(now < 0, number, now)
            now = np.where(ended[step], -1, episodes[step])
        key = stage_key(trajectory.env_rank, trajectory.stage)
        self._going_on[key] = GoingOn(trajectory.incarnation, now.tolist())
        return episodes.reshape(-1)

    def added(self, numbers: Ints, episodes: Ints) -> None:
        """Take in transitions that have entered the window; forget episodes that have left it."""
        self._index(numbers, episodes)
        while self._episodes:
            oldest = next(iter(self._episodes))
            if self._episodes[oldest][-1] >= self._store.first:
                return
            del self._episodes[oldest]

    def _index(self, numbers: Ints, episodes: Ints) -> None:
        slots = self._store.slots_of(numbers)
        for number, slot, episode in zip(
            numbers.tolist(), slots.tolist(), episodes.tolist(), strict=True
        ):
            steps = self._episodes.setdefault(episode, array("q"))
            self._places[slot] = len(steps)
            steps.append(number)

    def _begun(self, trajectory: Trajectory) -> Ints:
        """The episodes ``[E]`` that the first step of a trajectory goes on with; -1: none."""
        store, first = self._store, trajectory.observation[0]
        begun = np.full(len(first), -1)
        before = self._going_on.get(stage_key(trajectory.env_rank, trajectory.stage))
        if before is None or before.incarnation != trajectory.incarnation:
            return begun
        for env, episode in enumerate(before.episodes):
            steps = self._episodes.get(episode)
            if steps is None:
                continue
            # A ticket that was given up may have left steps out.
            left_at = store.column("next_observation", np.array([steps[-1]]))
            if left_at.tobytes() == first[env].tobytes():
                begun[env] = episode
        return begun

    def _check_paid(self, trajectory: Trajectory) -> None:
        """Compare what was paid with what is computed; a few may differ, by rounding."""
        goals, paid = self._goals, trajectory.reward.reshape(-1)
        after = following_of(trajectory).reshape(len(paid), *trajectory.observation.shape[2:])
        said = self._rewards.rewards(goals.achieved_in(after), goals.desired_in(after))
        differs = ~np.isclose(said, paid, rtol=AS_PAID, atol=AS_PAID)
        self._compared += len(paid)
        self._differing += int(differs.sum())
        if differs.any() and self._differing > max(1, self._compared // 100):
            first = int(np.argmax(differs))
            raise ReplayError(
                f"the environment paid {paid[first]:g} for a step of which its compute_reward says "
                f"{said[first] + 0.0:g}, and other rewards than that in {self._differing} of "
                f"{self._compared} steps: what another goal would have paid is not known. Have "
                "compute_reward say what a step pays (a wrapper that changes rewards has to change "
                "it, too), or leave replay.hindsight out"
            )

    # ---- what is drawn

    def exchange(
        self, random: np.random.Generator, which: Ints, numbers: Ints, rows: Mapping[str, Any]
    ) -> None:
        """Give the rows ``which`` of transitions that were drawn other goals, in place."""
        chosen = [self._chosen(int(number)) for number in numbers[which]]
        drawn = random.random(len(which))
        at = [len(one.steps) - 1 for one in chosen]
        if self._strategy == "future":
            at = [
                one.place + int(part * (len(one.steps) - one.place))
                for one, part in zip(chosen, drawn, strict=True)
            ]
        goal = self._goals.achieved_in(self._after(chosen, at)).copy()
        reward, discount, last = self._returns(chosen, goal)
        rows["next_observation"][which] = self._after(chosen, last, images=True)
        for name in ("observation", "next_observation"):
            self._goals.desired_in(rows[name])[which] = goal
        rows["reward"][which], rows["discount"][which] = reward, discount

    def _chosen(self, number: int) -> _Chosen:
        store = self._store
        slot = number % store.slots
        steps = self._episodes[int(store.arrays["episode"][slot])]
        return _Chosen(steps, int(self._places[slot]))

    def _after(
        self, chosen: list[_Chosen], at: list[int], *, images: bool = False
    ) -> ObservationArray:
        """Copies of what is shown after these steps: by the next one, where there is one. Without
        ``images``, only the numbers count."""
        store = self._store
        last = [place + 1 == len(one.steps) for one, place in zip(chosen, at, strict=True)]
        number = [
            one.steps[place if ends else place + 1]
            for one, place, ends in zip(chosen, at, last, strict=True)
        ]
        numbers, ends = np.array(number), np.array(last)
        shown: ObservationArray = store.column("observation", numbers, images=images)
        shown[ends] = store.column("next_observation", numbers[ends], images=images)
        return shown

    def _returns(self, chosen: list[_Chosen], goal: Floats) -> tuple[Floats, Floats, list[int]]:
        """Rewards and discounts ``[K]`` under these goals, and the last step of each transition."""
        places = np.array([one.place for one in chosen])
        left = np.array([len(one.steps) for one in chosen]) - places
        reward, discount = np.zeros((2, len(chosen)), np.float32)
        discount[:] = 1.0
        last, going = places.copy(), np.ones(len(chosen), np.bool_)
        for step in range(self._n_step):
            going &= left > step
            on = np.flatnonzero(going)
            if not on.size:
                break
            here, at = [chosen[one] for one in on], (places[on] + step).tolist()
            after = self._after(here, at)
            achieved = self._goals.achieved_in(after)
            reward[on] += discount[on] * self._rewards.rewards(achieved, goal[on])
            ends = self._ends(here, at, after, goal[on])
            discount[on] = np.where(ends, np.float32(0.0), discount[on] * np.float32(self._gamma))
            last[on] = at
            going[on] = ~ends
        return reward, discount, last.tolist()

    def _ends(
        self, chosen: list[_Chosen], at: list[int], after: ObservationArray, goal: Floats
    ) -> Bools:
        """Whether episodes end with these steps, under other goals."""
        store, goals = self._store, self._goals
        slots = store.slots_of(np.array([one.steps[-1] for one in chosen]))
        last = np.array([len(one.steps) - 1 for one in chosen]) == np.array(at)
        # The last step that is known is a transition of one step: nothing follows it.
        did: Bools = last & (store.arrays["discount"][slots] == 0.0)
        achieved = goals.achieved_in(after)
        says = self._rewards.terminated(achieved, goal)
        if says is None:
            return did
        if did.any():
            explained = self._rewards.terminated(achieved[did], goals.desired_in(after)[did])
            did[did] = ~explained if explained is not None else True
        return np.logical_or(says, did)


class _Chosen(NamedTuple):
    """A transition that was drawn."""

    steps: array[int]
    """steps of its episode"""
    place: int
    """which of them it is"""
