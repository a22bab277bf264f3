"""`ReplayWorker`: keeps transitions, and draws batches from them.

::

    env workers --Trajectory, leased--> +--- ReplayWorker ---+ <--BatchRequest, leased-- actor
                                        |       store        |
       this process <--Collected------- +--------------------+ ---ReplayBatch, bounded--> actor

                 waits for                                   unblocked by
    serve        trajectories, and requests for batches      env workers, the actor
    collect      all trajectories of an iteration            env workers

A batch is drawn once for all data ranks of the actor: rank 0 asks, and each gets its share under
its rank as the key.

While the actor computes, the next batches are drawn and the next trajectories arrive. These enter
the store at the step boundary, in `collect`: what a batch is drawn from depends on its iteration
alone, and its random numbers on the seed, the iteration and the number of the batch. So there is no
random state to save, and a request that is delivered again has the same answer.

Demonstrations are a store of their own, which is read from their folder at each start and never
written afterwards. A share of each batch is drawn from it, by random numbers of its own, and spread
evenly over the batch: own experience is drawn as it would be by itself, in a smaller batch, and
which demonstrations a batch has depends on the seed, the iteration and its number alone. What a
person has done in the run is a further ring, written and booked as own experience is, and drawn as
if it stood behind the demonstrations.

Goals in hindsight change what is drawn of own experience, and nothing that is stored: see
`rlinf_async.workers.replay.hindsight`.

Exactly once, with ``storage = "disk"``: a trajectory's lease ends when its transitions and their
count are written. A worker that is killed before gets it again, and writes it to the same place;
one that is killed afterwards leaves it out the second time. A request's lease ends when its batch
is in the channel; the actor leaves out a batch that comes twice. With ``storage = "memory"`` the
store dies with the process, and the run has to go on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.channels.statistics import WaitFuture
from rlinf_async.config.counts import check_between, check_bounds
from rlinf_async.data.demonstrations import count_steps, read_episodes
from rlinf_async.messages.embodied import (
    BatchRequest,
    Bools,
    Collected,
    ReplayBatch,
    Trajectory,
    all_counts,
    interventions_in,
    samples_of,
)
from rlinf_async.messages.spaces import ActionSpec, ObservationSpec
from rlinf_async.observe.files import atomic_write
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.goals import GoalRewards, Goals
from rlinf_async.workers.host import Pace
from rlinf_async.workers.replay.columns import Column, ReplayError, columns_of
from rlinf_async.workers.replay.hindsight import GoingOn, Hindsight, Strategy
from rlinf_async.workers.replay.store import (
    Priorities,
    ReplayStore,
    Shown,
    shown_in,
    trajectory_of,
    transitions_of,
)


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches of transitions, and where these are kept."""

    batch_size: int = 256
    """transitions of one gradient step"""
    n_step: int = 1
    """steps of which a transition has the rewards; fewer where an episode or an iteration ends"""
    storage: Literal["disk", "memory"] = "disk"
    """``disk``: memory-mapped files, which outlive a killed worker"""
    folder: str = ""
    """folder of the store's files; ``replay`` in the run folder when left out"""
    images: Literal["raw", "compressed"] = "raw"
    """``compressed``: they take less room, and drawing them takes longer"""
    prefetch: int = 4
    """batches that are drawn ahead of the gradient step that needs them"""
    demonstrations: str = ""
    """folder of demonstrations, which are drawn beside own experience; none when left out"""
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "batch_size", "n_step", "prefetch", least=1)
        check_bounds(self, "seed", least=0)
        if self.folder and self.storage == "memory":
            raise ValueError(
                f"folder is {self.folder!r}, but storage = 'memory' has no files: leave it out, or "
                "set storage = 'disk'"
            )

    @property
    def compressed(self) -> bool:
        """Whether images are compressed."""
        return self.images == "compressed"


class ReplayConfig(BatchesConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of transitions, and how batches are drawn."""

    capacity: int = 1_000_000
    """transitions; the oldest make room for new ones"""
    sampling: Literal["uniform", "prioritized"] = "uniform"
    """``prioritized``: in proportion to the last temporal-difference error"""
    priority_alpha: float = 0.6
    """exponent of priorities"""
    priority_beta: float = 0.4
    """exponent of the importance-sampling weights at first; it grows to 1 over the run"""
    demonstrated_share: float = 0.5
    """share of demonstrations in each batch, where there are some"""
    hindsight: Literal["none", Strategy] = "none"
    """goals that transitions get in hindsight: ``future``, what their episode reached with them or
    later; ``final``, what it reached last"""
    hindsight_share: float = 0.8
    """share of own experience in each batch that gets another goal, with ``hindsight``"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "capacity", least=1)
        check_between(self, "priority_beta")
        check_bounds(self, "demonstrated_share", above=0, below=1)
        check_bounds(self, "hindsight_share", above=0, most=1)
        if self.batch_size > self.capacity:
            raise ValueError(
                f"batch_size is {self.batch_size}, which is more than the capacity of "
                f"{self.capacity} transitions: make the store larger, or the batch smaller"
            )
        if not 0.0 < self.priority_alpha <= 1.0:
            raise ValueError(
                f"priority_alpha is {self.priority_alpha}; it must be above 0 and at most 1 "
                "(sampling = 'uniform' is what 0 would be)"
            )

    @property
    def prioritized(self) -> bool:
        """Whether transitions have priorities."""
        return self.sampling == "prioritized"

    @property
    def demonstrated(self) -> int:
        """Demonstrations in each batch, where there are some: the nearest whole number."""
        return round(self.demonstrated_share * self.batch_size)

    def exchanged(self, own: int) -> int:
        """Of ``own`` transitions of a batch, those that get another goal in hindsight."""
        return round(self.hindsight_share * own) if self.hindsight != "none" else 0


STATE: Final = "state.json"
SHOWN: Final = "demonstrations"
"""folder of the demonstrations' transitions, beside the store's files"""
INTERVENED: Final = "intervened"
"""folder of what a person has done, beside them too"""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that its replay worker needs."""

    observation: ObservationSpec
    action: ActionSpec
    gamma: float
    seed: int
    iterations: int
    """iterations of the whole run: over these the exponent of the weights grows to 1"""
    iteration_steps: int
    """transitions of one iteration, at most"""
    ranks: int = 1
    """data ranks of the actor, which share each batch equally"""
    spare: int = 0
    """slots beyond the capacity, so that a checkpoint's transitions outlive the next ones"""
    folder: str = ""
    """folder of the store's files, with ``storage = "disk"``"""
    start: str = ""
    """name of this start of the run: a store that an earlier start left is taken back to the
    checkpoint"""
    resume: str = ""
    """folder in the checkpoint to go on from; empty: the run begins"""
    intervened: bool = False
    """whether what a person has done is drawn as demonstrations, too"""
    acts: bool = True
    """whether that person acts; False: they say what they would do"""
    goals: Goals | None = None
    """where the environment shows goals, with ``hindsight``"""
    env: EnvConfig | None = None
    """the environment that says what they pay"""
    experience: bool = True
    """whether there is own experience; False: batches are of demonstrations alone"""


class ReplayState(msgspec.Struct, kw_only=True):
    """Counts of a store that are saved with it."""

    start: str
    iteration: int = -1
    """the newest whose trajectories are in the store"""
    count: int = 0
    oldest: int = 0
    intervened: int = 0
    """transitions of a person that ever came"""
    oldest_intervened: int = 0
    collected: Collected | None = None
    """the report of that iteration"""
    going_on: dict[str, GoingOn] = {}
    """episodes that go on, by stage, with ``hindsight``"""


class ReplayReport(msgspec.Struct, kw_only=True):
    """The counts of `ReplayWorker.serve`."""

    batches: int = 0
    duplicates: int = 0
    """trajectories that had come before"""


class _Held(NamedTuple):
    """A trajectory that is not in the store yet, and its lease."""

    trajectory: Trajectory
    lease: AsyncExitStack


class ReplayWorker(Worker):
    """The store of a run; there is one."""

    def __init__(self, config: ReplayConfig, plan: ReplayPlan) -> None:
        self.config, self.plan = config, plan
        self._folder = Path(plan.folder) if config.storage == "disk" else None
        self._shown: Shown | None = None
        """what is drawn as demonstrations"""
        self._intervened: ReplayStore | None = None
        """the part of it that a person has done in the run"""
        self._hindsight: Hindsight | None = None
        self._pace = Pace(self)
        self._held: dict[int, dict[tuple[int, int], _Held]] = {}
        """trajectories not stored yet: by iteration, then by env rank and stage"""
        self._waiting: list[WaitFuture] = []
        self._duplicates = 0
        self._reported_duplicates = 0

    async def setup(self) -> None:
        """Open the store: as it is after a restart of this worker, or as in the checkpoint."""
        await self.compute(self._open)

    async def teardown(self) -> None:
        """Close the environment that says what goals pay."""
        if self._hindsight is not None:
            await self.compute(self._hindsight.close)

    # ---- what others call

    async def serve(
        self,
        trajectories: Receiver[Trajectory],
        requests: Receiver[BatchRequest],
        batches: Sender[ReplayBatch],
    ) -> ReplayReport:
        """Take trajectories and answer requests until these end."""
        report = ReplayReport()
        async with task_group() as group:
            taking = group.create_task(self._take(trajectories))
            with contextlib.suppress(EndOfChannel):
                while True:
                    async with requests.lease() as [request]:
                        shares = await self._pace.run("draw", self._draw, request)
                        for rank, share in enumerate(shares):
                            await batches.put(share, key=rank)
                    report.batches += 1
            taking.cancel()
        report.duplicates = self._duplicates
        return report

    async def collect(self, iteration: int, trajectories: int) -> Collected:
        """Wait until ``trajectories`` of the iteration are there, and put them into the store.

        Called again after a restart, it does what is not done yet.
        """
        done = self._state.collected
        if done is not None and self._state.iteration >= iteration:
            return done
        with self.span("wait trajectories", iteration=iteration):
            while len(self._held.get(iteration, {})) < trajectories:
                waiting = WaitFuture()
                self._waiting.append(waiting)
                await waiting
        held = self._held.pop(iteration)
        ordered = [held[place].trajectory for place in sorted(held)]
        with self.span("store", iteration=iteration):
            collected = await self.compute(self._store_all, iteration, ordered)
        for one in held.values():
            await one.lease.aclose()
        return collected

    async def begin_checkpoint(self, path: str) -> None:
        """Write the folder of a checkpoint, between two iterations."""
        with self.span("checkpoint"):
            await self.compute(self._save, Path(path))

    # ---- trajectories

    async def _take(self, trajectories: Receiver[Trajectory]) -> None:
        """Take trajectories as they come; each stays leased until it is in the store."""
        try:
            while True:
                async with AsyncExitStack() as lease:
                    try:
                        batch = await lease.enter_async_context(trajectories.lease(key=0))
                    except EndOfChannel:
                        return
                    self._keep(batch[0], lease)
        finally:
            left, self._held = self._held, {}
            for one in left.values():
                for held in one.values():
                    await held.lease.aclose()

    def _keep(self, one: Trajectory, lease: AsyncExitStack) -> None:
        place, iteration = (one.env_rank, one.stage), one.iteration
        if iteration <= self._state.iteration or place in self._held.get(iteration, {}):
            self._duplicates += 1
            self.log.warning(
                "iteration %d of env worker %d, stage %d came twice and is stored once",
                iteration,
                *place,
            )
            return
        self._held.setdefault(iteration, {})[place] = _Held(one, lease.pop_all())
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _store_all(self, iteration: int, ordered: Sequence[Trajectory]) -> Collected:
        """Write the transitions of an iteration, then their count."""
        store, config = self._store, self.config
        for one in ordered:
            made = transitions_of(one, n_step=config.n_step, gamma=self.plan.gamma)
            before, hindsight, rows = store.first, self._hindsight, made._asdict()
            if hindsight is not None:
                rows["episode"] = hindsight.episodes_of(one)
            numbers = store.write(rows)
            store.count += len(numbers)
            if hindsight is not None:
                hindsight.added(numbers, rows["episode"])
            if self._priorities is not None:
                self._priorities.added(numbers, np.arange(before, store.first))
            if self._intervened is not None:
                self._intervened.count += len(self._intervened.write(shown_in(one, made)))
        collected = self._report(iteration, ordered)
        self._book(iteration, collected)
        return collected

    def _report(self, iteration: int, ordered: Sequence[Trajectory]) -> Collected:
        duplicates = self._duplicates - self._reported_duplicates
        self._reported_duplicates = self._duplicates
        ages = iteration - self._store.arrays["version"][self._store.slots_of(self._store.numbers)]
        lags = iteration - np.concatenate([one.version for one in ordered])
        intervention = interventions_in(ordered)
        if intervention is not None and self._intervened is not None:
            intervention.demonstrations = len(self._intervened)
        return Collected(
            iteration=iteration,
            intervention=intervention,
            control=all_counts(one.control for one in ordered),
            env_steps=sum(samples_of(one) for one in ordered),
            size=len(self._store),
            age_mean=float(ages.mean()),
            age_max=int(ages.max()),
            lag_mean=float(lags.mean()),
            lag_max=int(lags.max()),
            duplicates=duplicates,
            episode_return=[value for one in ordered for value in one.episode_return],
            episode_length=[value for one in ordered for value in one.episode_length],
            episode_success=[value for one in ordered for value in one.episode_success],
            episode_level=[value for one in ordered for value in one.episode_level],
        )

    # ---- batches

    def _draw(self, request: BatchRequest) -> list[ReplayBatch]:
        """Draw a batch; return the share of each rank."""
        seed = (self.plan.seed, request.iteration, request.number)
        if self.plan.experience:
            rows = self._experienced(request, seed)
        else:
            rows = _demonstrations(self._shown, self.config.batch_size, seed)
        index = rows.pop("index")
        del rows["priority"]
        parts = {name: np.split(array, self.plan.ranks) for name, array in rows.items()}
        return [
            ReplayBatch(
                iteration=request.iteration,
                number=request.number,
                index=index,
                **{name: shares[rank] for name, shares in parts.items()},
            )
            for rank in range(self.plan.ranks)
        ]

    def _experienced(
        self, request: BatchRequest, seed: tuple[int, int, int]
    ) -> dict[str, NDArray[Any]]:
        """A whole batch, by column: own experience, and a share of demonstrations."""
        store, size = self._store, self.config.batch_size
        if not len(store):
            raise ReplayError("a batch was asked for, but the store is empty")
        demonstrated = self.config.demonstrated if self._shown else 0
        size -= demonstrated
        random = np.random.default_rng(seed)
        if self._priorities is None:
            numbers = random.integers(store.first, store.count, size)
            weight = np.ones(size, np.float32)
        else:
            if request.index is not None and request.priority is not None:
                self._priorities.update(request.index, request.priority)
            share = min(request.iteration / max(self.plan.iterations, 1), 1.0)
            beta = self.config.priority_beta + share * (1.0 - self.config.priority_beta)
            numbers, weight = self._priorities.draw(random, size, beta)
        rows: dict[str, NDArray[Any]] = {"index": numbers, "weight": weight, **store.take(numbers)}
        if self._hindsight is not None:
            which = np.flatnonzero(spread(self.config.exchanged(size), size))
            self._hindsight.exchange(np.random.default_rng((*seed, 2)), which, numbers, rows)
            del rows["episode"]
        if self._shown is None:
            return rows
        theirs = self._intervened
        said = 0 if theirs is None or self.plan.acts else len(theirs)
        shown = _demonstrations(self._shown, demonstrated, seed, said)
        places = spread(demonstrated, self.config.batch_size)
        if demonstrated:
            rows = {name: merged(places, shown[name], array) for name, array in rows.items()}
        return {**rows, "demonstrated": places}

    # ---- files

    def _open(self) -> None:
        config, plan, folder = self.config, self.plan, self._folder
        found = None if folder is None else read_state(folder / STATE)
        restarted = found is not None and found.start == plan.start
        if found is not None and restarted:
            self._state = found
        elif plan.resume:
            saved = read_state(Path(plan.resume) / STATE)
            if saved is None:
                raise ReplayError(f"{plan.resume} has no {STATE}: the checkpoint is damaged")
            self._state = saved
            self._state.start, self._state.going_on = plan.start, {}
        else:
            self._state = ReplayState(start=plan.start)
        again = bool(restarted or plan.resume)
        goals = plan.goals is not None
        self._store = self._ring(folder, fresh=not again, episodes=goals)
        self._store.count, self._store.oldest = self._state.count, self._state.oldest
        shown = [self._read(Path(config.demonstrations))] if config.demonstrations else []
        if plan.intervened or self._state.intervened:  # of a person who has left, too
            there = self._state.intervened
            own = None if folder is None else folder / INTERVENED
            self._intervened = self._ring(own, fresh=not there)
            self._intervened.count = there
            self._intervened.oldest = self._state.oldest_intervened
            shown.append(self._intervened)
        if shown:
            self._shown = Shown(*shown)
        if plan.resume and not restarted:
            self._load(Path(plan.resume), found)
        for store in (self._store, self._intervened):
            if store is not None:
                store.check_images()
        self._priorities = None
        if config.prioritized:
            self._priorities = Priorities(self._store, config.priority_alpha)
        self._hindsight = self._with_goals()
        self._book(self._state.iteration, self._state.collected)

    def _ring(self, folder: Path | None, *, fresh: bool, episodes: bool = False) -> ReplayStore:
        """A store that transitions of the run are added to."""
        return ReplayStore(
            self._columns(episodes=episodes),
            self.config.capacity,
            spare=self.plan.spare if folder is not None else 0,
            folder=folder,
            fresh=fresh,
        )

    def _columns(self, *, episodes: bool = False) -> dict[str, Column]:
        seen, acted = self.plan.observation, self.plan.action
        return columns_of(seen, acted, episodes=episodes, compressed=self.config.compressed)

    def _with_goals(self) -> Hindsight | None:
        """Return what gives transitions of the store other goals, where that is asked for."""
        config, plan = self.config, self.plan
        if config.hindsight == "none" or plan.goals is None or plan.env is None:
            return None
        return Hindsight(
            self._store,
            self._state.going_on,
            plan.goals,
            GoalRewards(plan.env, plan.goals),
            strategy=config.hindsight,
            gamma=plan.gamma,
            n_step=config.n_step,
        )

    def _read(self, demonstrations: Path) -> ReplayStore:
        """Return a store of all demonstrations, in the order of their episodes.

        It is made anew at each start, of the same files: neither checkpoints nor `_book` know it.
        """
        plan, folder = self.plan, self._folder
        shown = ReplayStore(
            self._columns(),
            count_steps(demonstrations),
            folder=None if folder is None else folder / SHOWN,
        )
        for episode in read_episodes(demonstrations, plan.observation, transitions=True):
            made = transitions_of(
                trajectory_of(episode), n_step=self.config.n_step, gamma=plan.gamma
            )
            shown.count += len(shown.write(made._asdict()))
        return shown

    def _load(self, checkpoint: Path, found: ReplayState | None) -> None:
        """Take the stores back to a checkpoint.

        ``found``: the counts that the files were left with. Another iteration may have been written
        behind them, and not have been booked.
        """
        there = found or ReplayState(start="")
        for store, newest, saved in (
            (self._store, there.count, checkpoint),
            (self._intervened, there.intervened, checkpoint / INTERVENED),
        ):
            if store is None or not len(store):
                continue
            store.load(saved, self._copied(store))
            if self._folder is not None and found is not None:
                written = newest + self.plan.iteration_steps
                store.oldest = max(store.oldest, written - store.slots)

    def _copied(self, store: ReplayStore) -> Sequence[str]:
        """Columns of which a checkpoint has copies: all in memory; else those that change."""
        if self._folder is None:
            return [*store.arrays]
        return ["priority"] if store is self._store else []

    def _save(self, path: Path) -> None:
        for store, folder in ((self._store, path), (self._intervened, path / INTERVENED)):
            if store is None:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            store.save(folder, self._copied(store))
        atomic_write(path / STATE, msgspec.json.encode(self._state))

    def _book(self, iteration: int, collected: Collected | None) -> None:
        store, theirs = self._store, self._intervened
        self._state = ReplayState(
            start=self.plan.start,
            iteration=iteration,
            count=store.count,
            oldest=store.first,
            intervened=0 if theirs is None else theirs.count,
            oldest_intervened=0 if theirs is None else theirs.first,
            collected=collected,
            going_on=self._state.going_on,
        )
        if self._folder is not None:
            atomic_write(self._folder / STATE, msgspec.json.encode(self._state))


def _demonstrations(
    shown: Shown | None, count: int, seed: tuple[int, int, int], said: int = 0
) -> dict[str, NDArray[Any]]:
    """So many demonstrations, by column. The last ``said`` of all were only said: what followed is
    not of their action, so they have no weight in the losses of values."""
    if not (shown or count == 0):
        raise ReplayError("a batch was asked for, but there are no demonstrations")
    if shown is None or not count:
        return {}
    places = np.random.default_rng((*seed, 1)).integers(0, len(shown), count)
    return {
        "index": np.full(count, -1),
        "weight": (places < len(shown) - said).astype(np.float32),
        **shown.take(places),
    }


def spread(some: int, size: int) -> Bools:
    """Return which of ``size`` places are those of ``some``: evenly, so that each share of a batch
    has as many of them as any other, or one more or less."""
    before = np.arange(size + 1) * some // size
    return np.diff(before) > 0


def merged(which: Bools, some: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return an array with the rows ``some`` at the places ``which``, and the others elsewhere."""
    rows = np.empty((len(which), *others.shape[1:]), others.dtype)
    rows[which], rows[~which] = some, others
    return rows


def read_state(path: Path) -> ReplayState | None:
    """Read what is booked of a store; None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"{path} cannot be read: {error}") from error
