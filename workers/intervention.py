"""`InterventionWorker`: a person who sees what the policy is about to do, and may act instead.

::

    env worker ---Proposal: observation, the policy's action---> InterventionWorker
        ^                                                              | person(observation, a)
        +------------Intervention, by key of the stage: "I act: b" <---+ or nothing

                waits for                       unblocked by
    serve       a proposal                      an env worker
    answering   the person                      the person
    act         an intervention, for so long    the person, or the deadline

A person is asked as a rollout worker is: by a question with a number, and an answer under the key
of the stage. But nobody waits for a person beyond the deadline: then the policy acts.

Invariant: `Attention.act` takes the answer to its own question alone. One that comes after its
deadline is found when the next question is asked, or a later one; it is dropped, and counted as
late. One to a question of an earlier life of the env worker, and a second one of a person who died
after having answered, are dropped.

A person who lets `PATIENCE` questions of a stage in a row go by is away: its steps ask nothing and
wait for nothing, until one of those questions is answered after all.

A person who is gone, whose channel of answers has ended, intervenes no more; the policy acts.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_bounds
from rlinf_async.config.registry import check_arguments, load_entry_point
from rlinf_async.deadlines import timeout
from rlinf_async.messages.embodied import (
    GOES_ON,
    Actions,
    Bools,
    Choice,
    Intervention,
    Proposal,
    Verdict,
    stage_key,
)
from rlinf_async.messages.spaces import ActionSpec, ObservationArray
from rlinf_async.threads import ThreadEach
from rlinf_async.workers.base import Worker

Person = Callable[[Any, Any], Any]
"""``person(observation, proposed)``, of one environment, returns an action, a `Verdict` or None, or
an awaitable of it."""


MOST: Final = 1024
"""questions that are taken at once, of which the person sees the newest of each stage"""

PATIENCE: Final = 3
"""questions of a stage in a row whose deadline goes by, after which the person is away"""


PAGE: Final = "page"
"""person who has a browser, and acts by `rlinf_async.view.hands.Hands`"""


class PageAddress(msgspec.Struct, frozen=True):
    """Where the page of a person is served: the same in each life of the worker."""

    action: ActionSpec
    port: int
    token: str


class InterventionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person who may act in place of the policy."""

    person: str = ""
    """who is asked at each step: ``"file.py:function"`` or ``"module:function"``, see `Person`; or
    ``"page"``, somebody with a browser; nobody when left out"""
    deadline: float = 0.2
    """seconds that a step waits for the person, before the policy acts"""
    acts: bool = True
    """whether the person acts; false: they say what they would do, and the policy acts"""
    demonstrates: bool = True
    """whether what the person has done, or said, is drawn with the demonstrations, too"""

    def __post_init__(self) -> None:
        check_bounds(self, "deadline", above=0, below=math.inf)
        defaults = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        for setting, default in () if self.person else defaults:
            if getattr(self, setting) != default:
                raise ConfigError(
                    f"{getattr(self, setting)!r} was given, but nobody is asked: name who is in "
                    "intervention.person, or leave it out",
                    path=(setting,),
                )


class InterventionError(ValueError):
    """What a person answered is no action."""


def load_person(person: str) -> Person:
    """Return the function. Raises `ConfigError` where there is none with such arguments."""
    path = ("intervention", "person")
    found: Person = load_entry_point(person, path)
    check_arguments(found, person, "person", ("observation", "proposed"), path)
    return found


class InterventionReport(msgspec.Struct, kw_only=True):
    """Report of `InterventionWorker.serve`."""

    questions: int = 0
    skipped: int = 0
    """questions that were not put to the person, because the stage had gone on to its next"""
    acted: int = 0
    """actions of the person, one for each environment"""
    judged: int = 0
    """episodes that the person has ended"""


class InterventionWorker(Worker):
    """Asks a person about each proposal.

    Args:
        person: ``"file.py:function"`` or ``"module:function"``, see `Person`.
        page: where the page of ``"page"`` is served; None: the person is a function.
        acts: whether they act; False: they say what they would do.
        choices: number of choices, of which an action is one; 0: actions are numbers.
        unjudged: why the person cannot end episodes, as a sentence; empty: they can.
    """

    def __init__(
        self,
        person: str,
        page: PageAddress | None = None,
        *,
        acts: bool = True,
        choices: int = 0,
        unjudged: str = "",
    ) -> None:
        self._name, self._acts, self._choices, self._unjudged = person, acts, choices, unjudged
        self._hands: Any = None
        self._threads = ThreadEach("person")
        if page is None:
            self._person = load_person(person)
        else:
            make = load_entry_point("rlinf_async.view.hands:Hands")
            self._hands = self._person = make(
                page.action, page.port, page.token, judges=not unjudged
            )

    async def setup(self) -> None:
        """Serve the page, where the person has one."""
        if self._hands is not None:
            await self._hands.open()

    async def teardown(self) -> None:
        """Serve it no longer."""
        if self._hands is not None:
            await self._hands.close()

    async def serve(
        self, proposals: Receiver[Proposal], interventions: Sender[Intervention]
    ) -> InterventionReport:
        """Answer proposals until there are no more.

        Raises:
            InterventionError: the person returned what is no action.
        """
        report = InterventionReport()
        while True:
            try:
                async with proposals.lease(weight=MOST, at_least=1) as batch:
                    newest = _newest(batch)
                    report.skipped += len(batch) - len(newest)
                    for question in newest:
                        answer = await self._answer(question)
                        key = stage_key(question.env_rank, question.stage)
                        await interventions.put(answer, key=key)
                        report.questions += 1
                        report.acted += 0 if answer.acts is None else int(answer.acts.sum())
                        ended = answer.verdict
                        report.judged += 0 if ended is None else int((ended != GOES_ON).sum())
            except EndOfChannel:
                return report

    async def _answer(self, question: Proposal) -> Intervention:
        action, acts = question.action.copy(), np.zeros(len(question.action), np.bool_)
        verdict = np.full(len(acts), GOES_ON)
        for env, seen in enumerate(question.observation):
            said = await self._ask(seen, question.action[env])
            if isinstance(said, Verdict):
                verdict[env], said = self._judged(said), said.action
            if said is None:
                continue
            action[env], acts[env] = self._checked(said, action[env]), True
        some = bool(acts.any())
        return Intervention(
            incarnation=question.incarnation,
            sequence=question.sequence,
            action=action if some else None,
            acts=acts if some else None,
            verdict=None if (verdict == GOES_ON).all() else verdict,
            says=not self._acts,
        )

    async def _ask(self, seen: Any, proposed: Any) -> Any:
        if self._hands is not None or inspect.iscoroutinefunction(self._person):
            return await self._person(seen, proposed)
        # Nobody waits for a thread in which a person is still asked when the run has ended.
        loop = asyncio.get_running_loop()
        said = await loop.run_in_executor(self._threads, self._person, seen, proposed)
        return await said if inspect.isawaitable(said) else said

    def _judged(self, said: Verdict) -> bool:
        """What the person says of an episode. Raises `InterventionError` where it is nothing, or
        nobody could end it."""
        if self._unjudged or type(said.success) not in (bool, np.bool_):
            problem = self._unjudged or "success is True or False"
            raise InterventionError(f"{self._name!r} returned {said!r}: {problem}")
        return bool(said.success)

    def _checked(self, said: Any, like: Any) -> Any:
        """The action as one of the policy's. Raises `InterventionError` where it is none."""
        value, expected, name = np.asarray(said), np.asarray(like), self._name
        kinds = "iu" if expected.dtype.kind == "i" else "biuf"
        if value.shape != expected.shape or value.dtype.kind not in kinds:
            raise InterventionError(
                f"{name!r} returned {value.dtype} of shape {list(value.shape)}; an action here is "
                f"{expected.dtype} of shape {list(expected.shape)}, or None to leave it to the "
                "policy"
            )
        if not np.isfinite(value).all():
            raise InterventionError(f"{name!r} returned an action with NaN or infinity")
        if self._choices and not 0 <= value < self._choices:
            raise InterventionError(
                f"{name!r} returned {int(value)}; choices are 0 to {self._choices - 1}"
            )
        return value.astype(expected.dtype)


def _newest(questions: Sequence[Proposal]) -> list[Proposal]:
    """The last question of each stage: it asks the next when nobody has answered in time."""
    last: dict[tuple[int, int], Proposal] = {}
    for question in questions:
        last[question.env_rank, question.stage] = question
    return [*last.values()]


class Attention:
    """Asks a person about the steps of one stage of an env worker.

    Args:
        seconds: how long a step waits for the person.
        limit: largest absolute value of an action's numbers, to which the person's are clipped, so
            that what is recorded is what is executed; None: the environment takes any.
    """

    def __init__(
        self,
        env_rank: int,
        stage: int,
        incarnation: int,
        *,
        seconds: float,
        limit: float | None = None,
    ) -> None:
        if not 0.0 < seconds < float("inf"):
            raise ConfigError(
                f"{seconds} is no deadline: give a number of seconds above 0",
                path=("intervention", "deadline"),
            )
        self._env_rank, self._stage, self._incarnation = env_rank, stage, incarnation
        self._key = stage_key(env_rank, stage)
        self._seconds, self._limit = seconds, limit
        self._sequence = 0
        self._gone = False
        self._missed = 0
        """questions in a row whose deadline went by"""
        self._returning: asyncio.Task[Intervention] | None = None
        """while the person is away: what says that they are back"""
        self._overdue: list[int] = []
        """questions whose deadline went by, and that may still be answered"""
        self._late = 0
        self._unanswered = 0

    def take_counts(self) -> tuple[int, int]:
        """Return how many answers came after their deadline, and the deadlines of how many
        questions went by, since this was last asked."""
        counts = self._late, self._unanswered
        self._late = self._unanswered = 0
        return counts

    def close(self) -> None:
        """Wait no longer for a person who is away."""
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
            self._missed = 0

    async def act(
        self,
        proposals: Sender[Proposal],
        interventions: Receiver[Intervention],
        observation: ObservationArray,
        answer: Actions,
    ) -> Actions:
        """Return the policy's ``answer`` to ``observation [E, D]``, with the actions of the person
        in place of its own where the person acts, or beside them where they only say so."""
        if answer.action is None:
            return answer
        said = (
            None if self._gone else await self._ask(proposals, interventions, observation, answer)
        )
        acts: Bools = np.zeros(len(answer.action), np.bool_)
        action: Choice = answer.action
        verdict = None if said is None else said.verdict
        label: Choice | None = None
        if said is not None and said.action is not None and said.acts is not None:
            acts, theirs = said.acts, said.action
            if self._limit is not None:
                theirs = np.clip(theirs, -self._limit, self._limit)
            if said.says:
                label = theirs
            else:
                action = action.copy()
                action[acts] = theirs[acts]
        return msgspec.structs.replace(
            answer, action=action, intervened=acts, label=label, verdict=verdict
        )

    async def _ask(
        self,
        proposals: Sender[Proposal],
        interventions: Receiver[Intervention],
        observation: ObservationArray,
        answer: Actions,
    ) -> Intervention | None:
        """The person's answer to this step; None: there was none in time."""
        if self._returning is not None and not self._is_back(self._returning):
            return None
        self._sequence += 1
        assert answer.action is not None
        question = Proposal(
            env_rank=self._env_rank,
            stage=self._stage,
            incarnation=self._incarnation,
            sequence=self._sequence,
            observation=observation,
            action=answer.action,
        )
        put = False
        try:
            # A person who has not read the last questions holds up the step no longer than one who
            # does not answer: the deadline is that of both.
            async with timeout(self._seconds):
                await proposals.put(question)
                put = True
                while not self._fits(said := await interventions.get(key=self._key)):
                    self._count(said)
                self._missed = 0
                return said
        except TimeoutError:
            self._unanswered += 1
            self._missed += 1
            self._overdue.append(self._sequence)
        except EndOfChannel:
            self._gone = True
        if self._missed == PATIENCE:
            waiting = _answer_to(proposals, interventions, None if put else question, self._key)
            self._returning = asyncio.get_running_loop().create_task(waiting)
        return None

    def _is_back(self, returning: asyncio.Task[Intervention]) -> bool:
        """Whether a person who was away has answered an earlier question."""
        if not returning.done():
            return False
        self._returning = None
        self._missed = 0
        try:
            self._count(returning.result())
        except EndOfChannel:
            self._gone = True
            return False
        return True

    def _count(self, said: Intervention) -> None:
        """Count an answer that is dropped as late, if it is one: a person who died after having
        answered says the same again, and an earlier life of the env worker had questions, too."""
        if said.incarnation == self._incarnation:
            self._late += said.sequence in self._overdue
            self._overdue = [one for one in self._overdue if one > said.sequence]

    def _fits(self, said: Intervention) -> bool:
        return said.sequence == self._sequence and said.incarnation == self._incarnation


async def _answer_to(
    proposals: Sender[Proposal],
    interventions: Receiver[Intervention],
    question: Proposal | None,
    key: str,
) -> Intervention:
    """Wait for any answer, to one more question where the last was not put in time."""
    if question is not None:
        await proposals.put(question)
    return await interventions.get(key=key)
