"""What an iteration would take with other workers: the pipeline of a job, played forward with the
times that were measured.

::

    language   source -> [episodes] -> rollout -> [inference] -> reward -> actor -> version + 1
    embodied   ticket -> env <-> rollout;  env -> trajectories -> actor -> version + 1

Each role is a queue with its workers as servers. An engine works on all of its requests together: a
step of it takes ``alone + beside * requests``, as it was measured, and makes a token for each. The
source admits iteration ``i`` once version ``i - max_staleness`` is trained, as in a run. Nothing is
drawn but the order of the samples, always the same way.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from rlinf_async.observe.waits import Shape

Event = tuple[float, int, Callable[[float], None]]
LARGE = 512
"""samples of an iteration that are played at most, about: of more, each stands for several"""


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a role, as a model knows them."""

    workers: int
    capacity: int = 1
    """pieces that each works on at a time"""
    alone: float = 0.0
    """seconds of a piece, of a batch, or of an engine's step, whatever is done beside; of episodes
    the factor of what their tools take"""
    beside: float = 0.0
    """seconds that each item of a batch, or each request beside, adds"""

    def faster(self, factor: float) -> Crew:
        """Return the same workers with another speed."""
        return msgspec.structs.replace(self, alone=self.alone / factor, beside=self.beside / factor)

    def more(self, workers: int) -> Crew:
        """Return a crew with so many more of the same workers."""
        return msgspec.structs.replace(self, workers=self.workers + workers)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a model knows it."""

    embodied: bool = False
    samples: int
    """samples, or trajectories, of an iteration"""
    group_size: int = 1
    max_staleness: int
    units: int = 1
    shapes: tuple[tuple[Shape, ...], ...] = ()
    """samples of each iteration that was measured, by their tokens; they are played in turn"""
    steps: int = 0
    stages: int = 1
    rows: float = 1.0
    """embodied: observations of a question"""
    load: float = 0.0
    """seconds for which an engine stands still for new weights"""
    publish: float = 0.0
    """seconds from the last optimizer step to the next version, whoever takes them"""
    crews: dict[str, Crew]
    """by role; the actor's ``alone`` is that of an iteration, all of its workers together"""

    def changed(self, role: str, crew: Crew) -> Pipeline:
        """Return the same job with other workers of a role. Actors share an iteration out."""
        old = self.crews[role]
        if role == "actor" and crew.workers != old.workers:
            share = old.workers / crew.workers
            crew = msgspec.structs.replace(crew, alone=crew.alone * share)
        samples = self.samples
        if role == "env" and crew.workers != old.workers:
            # As many steps in all: each worker takes its share of them.
            steps = self.steps * old.workers / crew.workers
            samples = crew.workers * self.stages
            return msgspec.structs.replace(
                self,
                crews={**self.crews, role: crew},
                steps=max(1, round(steps)),
                samples=samples,
            )
        return msgspec.structs.replace(self, crews={**self.crews, role: crew})


def iteration_seconds(pipeline: Pipeline) -> float:
    """Return the seconds of an iteration, once the pipeline is full."""
    if pipeline.embodied:
        return _Embodied(pipeline).seconds()
    return _Language(_thinned(pipeline)).seconds()


def _thinned(pipeline: Pipeline) -> Pipeline:
    """Return a large job with fewer samples, of which each stands for several."""
    groups = pipeline.samples // pipeline.group_size
    each = -(-pipeline.samples // LARGE)
    if each < 2 or groups < 2 * each:
        return pipeline

    def crew(role: str, one: Crew) -> Crew:
        if role == "actor":
            return one
        factor = each if role == "reward" else 1
        return msgspec.structs.replace(
            one,
            capacity=one.capacity if role == "reward" else max(1, round(one.capacity / each)),
            alone=one.alone * factor,
            beside=one.beside * each,
        )

    return msgspec.structs.replace(
        pipeline,
        samples=groups // each * pipeline.group_size,
        crews={role: crew(role, one) for role, one in pipeline.crews.items()},
    )


class _Play:
    """Events in the order of their time, and the actor at the end of the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._events: list[Event] = []
        self._numbers = itertools.count()
        self.version = self.admitted = 0
        self.arrived: dict[int, int] = {}
        """samples of each iteration that are there for the actor"""
        self._trained_units = 0
        self._training = False
        self._ends: list[float] = []
        """time at which each version was there"""
        self._wanted = 11 + pipeline.max_staleness

    def seconds(self) -> float:
        """Play it; the mean seconds of the iterations at the end."""
        self._admit(0.0)
        while self._events and len(self._ends) < self._wanted:
            now, _, event = heapq.heappop(self._events)
            event(now)
        first = 1 + self.pipeline.max_staleness
        if len(self._ends) <= first + 1:
            return 0.0
        return (self._ends[-1] - self._ends[first]) / (len(self._ends) - 1 - first)

    def at(self, when: float, event: Callable[[float], None]) -> None:
        """Have this happen then."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def begin(self, iteration: int, now: float) -> None:
        """An iteration is admitted."""
        raise NotImplementedError

    def loaded(self, now: float) -> None:
        """New weights are there."""

    def arrive(self, iteration: int, now: float, samples: int = 1) -> None:
        """Samples are there for the actor."""
        self.arrived[iteration] = self.arrived.get(iteration, 0) + samples
        self._train(now)

    def _admit(self, now: float) -> None:
        while self.admitted <= self.version + self.pipeline.max_staleness:
            self.admitted += 1
            self.begin(self.admitted - 1, now)

    def _train(self, now: float) -> None:
        one = self.pipeline
        needed = (self._trained_units + 1) * one.samples / one.units
        if self._training or self.arrived.get(self.version, 0) < needed - 1e-9:
            return
        self._training = True
        self.at(now + one.crews["actor"].alone / one.units, self._unit_done)

    def _unit_done(self, now: float) -> None:
        self._trained_units += 1
        if self._trained_units < self.pipeline.units:
            self._training = False
            self._train(now)
        else:
            self.at(now + self.pipeline.publish, self._published)

    def _published(self, now: float) -> None:
        self._training, self._trained_units = False, 0
        self.arrived.pop(self.version, None)
        self.version += 1
        self._ends.append(now)
        self.loaded(now)
        self._admit(now)
        self._train(now)


class _Servers:
    """Servers of one role with one queue. Each takes a piece, or a batch of what is there."""

    def __init__(
        self, play: _Play, crew: Crew, done: Callable[[_Item, float], None], most: int = 0
    ) -> None:
        """``most``: items of a batch, of which each worker makes one at a time; 0: single ones."""
        self._play, self._crew, self._done, self._most = play, crew, done, most or 1
        self._free = crew.workers * (1 if most else max(1, crew.capacity))
        self._queue: deque[_Item] = deque()

    def put(self, item: _Item, now: float) -> None:
        """Queue an item; a server that waits takes it at once, as a get that waits does."""
        self._queue.append(item)
        self._take(now)

    def _take(self, now: float) -> None:
        while self._free and self._queue:
            batch = [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))]
            self._free -= 1
            size = sum(item.size for item in batch)
            seconds = self._crew.alone + self._crew.beside * size
            self._play.at(now + seconds, partial(self._end, batch))

    def _end(self, batch: list[_Item], now: float) -> None:
        self._free += 1
        for item in batch:
            self._done(item, now)
        self._take(now)


class _Item:
    """A sample, or a question of an environment."""

    __slots__ = ("group", "iteration", "shape", "size", "turns_left", "worker")

    def __init__(self, iteration: int, shape: Shape, group: int = 0, worker: int = 0) -> None:
        self.iteration, self.shape, self.group, self.worker = iteration, shape, group, worker
        self.turns_left = shape.turns
        self.size = 1.0


class _Engine:
    """One rollout worker: its requests advance together, a token a step."""

    def __init__(self, play: _Language, crew: Crew) -> None:
        self._play, self._crew = play, crew
        self._position = self._since = 0.0
        self._ends: list[tuple[float, int, _Item]] = []
        self._waiting: deque[_Item] = deque()
        self._plan = 0
        slots = max(1, crew.capacity)
        self._slots, self._most = slots, slots + slots // 16

    @property
    def room(self) -> bool:
        """Whether it takes one more request."""
        return len(self._ends) + len(self._waiting) < self._most

    def take(self, item: _Item, now: float) -> None:
        """Begin with a request."""
        self._advance(now)
        self._waiting.append(item)
        self._start(now)

    def stall(self, seconds: float, now: float) -> None:
        """Stand still."""
        self._advance(now)
        self._since = max(self._since, now) + seconds
        self._start(now)

    @property
    def _step(self) -> float:
        return max(1e-9, self._crew.alone + self._crew.beside * len(self._ends))

    def _advance(self, now: float) -> None:
        if now > self._since:
            if self._ends:
                self._position += (now - self._since) / self._step
            self._since = now

    def _start(self, now: float) -> None:
        while self._waiting and len(self._ends) < self._slots:
            item = self._waiting.popleft()
            tokens = max(1.0, item.shape.tokens / item.shape.turns)
            heapq.heappush(self._ends, (self._position + tokens, next(self._play.order), item))
        self._plan += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._position) * self._step
            plan = self._plan
            self._play.at(max(now, self._since) + left, lambda then: self._done(plan, then))

    def _done(self, plan: int, now: float) -> None:
        if plan != self._plan:
            return
        self._advance(now)
        self._position = max(self._position, self._ends[0][0])
        done = []
        while self._ends and self._ends[0][0] <= self._position + 1e-9:
            done.append(heapq.heappop(self._ends)[2])
        self._start(now)
        for item in done:
            self._play.answered(item, now)


class _Language(_Play):
    """The pipeline of a language job."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        crews = pipeline.crews
        self.order = itertools.count()
        rollout = crews["rollout"]
        self._engines = [_Engine(self, rollout) for _ in range(rollout.workers)]
        self._turn = 0
        self._requests: list[tuple[int, int, _Item]] = []
        episode = crews.get("episode")
        self._episodes = episode is not None
        self._slots = episode.workers * episode.capacity if episode else 0
        self._tasks: deque[_Item] = deque()
        self._last = _Servers(self, crews["reward"], self._scored) if "reward" in crews else None
        self._inference = (
            _Servers(self, crews["inference"], self._inferred, max(1, crews["inference"].capacity))
            if "inference" in crews
            else None
        )
        self._groups: dict[tuple[int, int], int] = {}

    def begin(self, iteration: int, now: float) -> None:
        """Put the requests of an iteration."""
        one = self.pipeline
        order, shapes = random.Random(iteration), one.shapes[iteration % len(one.shapes)]
        places = list(range(one.samples))
        order.shuffle(places)
        last = max(1, one.samples - 1)
        for number, place in enumerate(places):
            shape = shapes[round(place * (len(shapes) - 1) / last)]
            item = _Item(iteration, shape, number // one.group_size)
            if self._episodes:
                self._tasks.append(item)
            else:
                self._request(item)
        self._open()
        self.at(now, self._hand_out)

    def loaded(self, now: float) -> None:
        """Every engine loads the new weights."""
        if self.pipeline.load > 0.0:
            for engine in self._engines:
                engine.stall(self.pipeline.load, now)

    def _open(self) -> None:
        while self._slots and self._tasks:
            self._slots -= 1
            self._request(self._tasks.popleft())

    def _request(self, item: _Item) -> None:
        heapq.heappush(self._requests, (item.iteration, next(self.order), item))

    def _hand_out(self, now: float) -> None:
        count = len(self._engines)
        passed = 0
        while self._requests and passed < count:
            engine = self._engines[self._turn % count]
            self._turn += 1
            if engine.room:
                passed = 0
                engine.take(heapq.heappop(self._requests)[2], now)
            else:
                passed += 1

    def answered(self, item: _Item, now: float) -> None:
        """A turn of a sample is generated."""
        item.turns_left -= 1
        if item.turns_left > 0:
            tools = self.pipeline.crews["episode"].alone if self._episodes else 1.0
            wait = tools * item.shape.tool_seconds / (item.shape.turns - 1)
            self.at(now + wait, lambda then: self._again(item, then))
        else:
            if self._episodes:
                self._slots += 1
                self._open()
            if self._inference is not None:
                self._inference.put(item, now)
            else:
                self._inferred(item, now)
        self.at(now, self._hand_out)

    def _again(self, item: _Item, now: float) -> None:
        self._request(item)
        self._hand_out(now)

    def _inferred(self, item: _Item, now: float) -> None:
        if self._last is None:
            self._scored(item, now)
        else:
            self._last.put(item, now)

    def _scored(self, item: _Item, now: float) -> None:
        key = item.iteration, item.group
        there = self._groups.pop(key, 0) + 1
        if there == self.pipeline.group_size:
            self.arrive(item.iteration, now, there)
        else:
            self._groups[key] = there


class _Embodied(_Play):
    """The pipeline of a job in environments."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        env, rollout = pipeline.crews["env"], pipeline.crews.get("rollout")
        self._steps = [_Servers(self, _one(env), self._stepped) for _ in range(env.workers)]
        self._forward = None if rollout is None else _Servers(self, rollout, self._acted, 10**9)
        self._tickets = [deque[int]() for _ in range(env.workers)]
        self._open = [0] * env.workers
        """stages of each worker that are under way"""

    def begin(self, iteration: int, now: float) -> None:
        """Give every env worker a ticket."""
        for worker, tickets in enumerate(self._tickets):
            tickets.append(iteration)
            self._next(worker, now)

    def _next(self, worker: int, now: float) -> None:
        if self._open[worker] or not self._tickets[worker]:
            return
        iteration = self._tickets[worker].popleft()
        self._open[worker] = self.pipeline.stages
        for _ in range(self.pipeline.stages):
            # Its turns are its steps, and the question for the value at the end.
            item = _Item(iteration, Shape(0, self.pipeline.steps + 1), worker=worker)
            item.size = self.pipeline.rows
            self._ask(item, now)

    def _ask(self, item: _Item, now: float) -> None:
        if self._forward is None:
            self._acted(item, now)
        else:
            self._forward.put(item, now)

    def _acted(self, item: _Item, now: float) -> None:
        item.turns_left -= 1
        if item.turns_left > 0:
            self._steps[item.worker].put(item, now)
            return
        worker = item.worker
        self._open[worker] -= 1
        if not self._open[worker]:
            self.arrive(item.iteration, now, self.pipeline.stages)
            self._next(worker, now)

    def _stepped(self, item: _Item, now: float) -> None:
        self._ask(item, now)


def _one(env: Crew) -> Crew:
    """Return a single worker, whose stages take turns."""
    return Crew(workers=1, capacity=env.capacity, alone=env.alone)
