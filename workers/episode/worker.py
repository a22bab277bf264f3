"""`EpisodeWorker`: runs the coroutines in which a language model acts in several turns.

::

    Request, a task ---lease---> [ coroutine, up to `concurrent` of them ] ---Sample---> inference,
                                     |                        ^                          reward
                                 Request, a turn           its Sample
                                     v                        |
                                 rollout workers -------------+

                waits for                             unblocked by
    an episode  a task                                the source
                the answer of its turn                rollout workers
                a tool, or whatever its agent awaits  the agent's own; its `seconds`
                room for the finished episode         inference or reward workers

Task and answers stay leased until the episode was sent on: if this worker dies before, another one
gets them, runs the coroutine again, and takes up the answers that there are. Between sending on and
the last lease lies a moment in which a death has the episode run twice; its name tells.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from rlinf_async.channels import EndOfChannel, Lease, Receiver, Sender, WrongItemType
from rlinf_async.data.prompts import SLOW_IMPORTS
from rlinf_async.episodes import Episode, Task
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.endpoint import Endpoint
from rlinf_async.episodes.parsing import Parser, parser_of
from rlinf_async.episodes.running import allow_files
from rlinf_async.episodes.template import ChatTemplate, load_template
from rlinf_async.messages.language import Failed, Request, Sample, Tokens
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.episode.clock import AgentClock
from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.episode.ending import finished, run_to_end, unsendable
from rlinf_async.workers.episode.turns import EpisodeReport, TurnEnds, Turns

NAMED: Final = 3
"""number of waiting episodes that reports name, the longest ones"""
FILES: Final = 16
"""files that an episode may have open: pipes of its program or server, connections of its agent"""
QUICK: Final = 1.0
"""seconds from which on reports name an episode whose agent does something else than call tools"""


EPISODES: Final = "episodes"
"""name of the open episodes in the sums of a worker's work"""


class Language(NamedTuple):
    """How messages become tokens, and tokens an answer."""

    template: ChatTemplate
    parser: Parser
    decode: Callable[[Tokens], str]


class EpisodeWorker(Worker):
    """One rank of the episode group.

    Args:
        config: which coroutine it runs, and the limits.
        model: the model's folder, of which it reads the tokenizer.
        chat_options: variables of the chat template.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        model: str,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._chat_options = chat_options
        self._endpoint = Endpoint(config.endpoint)
        self._slots = self._idle = 0
        self._waits: dict[object, tuple[float, str, str]] = {}
        """since when which episode waits for what, beside the model"""
        self._clocks: dict[str, AgentClock] = {}
        """clock of each open episode, by its name"""

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return SLOW_IMPORTS

    async def setup(self) -> None:
        """Import the coroutine, load the tokenizer.

        Raises:
            ConfigError: there is no such coroutine, or no such format of tool calls.
            TemplateError: the tokenizer has no chat template.
        """
        allow_files(1024 + FILES * self.config.concurrent)
        # A user's module may import what takes seconds: not in the event loop.
        self._agent = await self.compute(
            load_agent, self.config.run, environment=self.config.environment
        )
        self._language = await self.compute(self.make_language)

    async def teardown(self) -> None:
        """Serve agents no more."""
        await self._endpoint.aclose()

    def make_language(self) -> Language:
        """Load tokenizer, template and parser. Override it to bring your own."""
        template = load_template(self._model, self._chat_options)
        parser = parser_of(self.config.tools, ("episode", "tools"))
        return Language(template, parser, template.decode)

    async def run(
        self,
        tasks: Receiver[Request],
        requests: Sender[Request],
        turns: Receiver[Sample],
        episodes: Sender[Sample],
        sticky: bool = False,
    ) -> EpisodeReport:
        """Run an episode for each task until there are no more.

        What a coroutine returns or raises is no error here but an outcome.

        Args:
            tasks: the first request of each sample.
            requests: channel to the rollout workers.
            turns: answers of the rollout workers, by key of the turn's name.
            episodes: gets the finished episodes.
            sticky: a turn goes to the rollout worker that drew the one before, if it has room:
                under its rank as key of ``requests``, which is `stealing`.

        Raises:
            NoReceivers: nobody takes finished episodes any more.
        """
        report = EpisodeReport()
        self.meter.serves(EPISODES, self.config.concurrent)
        ends = TurnEnds(requests, turns, sticky)
        # A lease is known to its holder by the context of its task: each episode begins with one
        # in which there is none.
        context = contextvars.copy_context()
        self._slots = self._idle = 0

        async with task_group() as group:

            def grow() -> None:
                """See that somebody waits for the next task, if one more episode may be open."""
                if not self._idle and self._slots < self.config.concurrent:
                    self._slots, self._idle = self._slots + 1, 1
                    slot = self._slot(tasks, ends, episodes, report, grow)
                    group.create_task(slot, context=context.copy())

            grow()
        return report

    async def _slot(
        self,
        tasks: Receiver[Request],
        ends: TurnEnds,
        episodes: Sender[Sample],
        report: EpisodeReport,
        grow: Callable[[], None],
    ) -> None:
        """Run one episode after the other, until another slot waits for the next task already."""
        with suppress(EndOfChannel):
            while True:
                async with tasks.lease() as lease:
                    self._idle -= 1
                    grow()
                    await self._play(lease, ends, episodes, report)
                if self._idle:
                    break
                self._idle += 1
        self._slots -= 1

    async def _play(
        self, lease: Lease[Request], ends: TurnEnds, episodes: Sender[Sample], report: EpisodeReport
    ) -> None:
        """Run one episode, and send it on; the leases of its answers are held until then."""
        [task] = lease
        with self.meter.beside(EPISODES) as piece:
            sample = await self._played(lease, task, ends, episodes, report)
            piece.size = 1.0
        _count(report, sample)

    async def _played(
        self,
        lease: Lease[Request],
        task: Request,
        ends: TurnEnds,
        episodes: Sender[Sample],
        report: EpisodeReport,
    ) -> Sample:
        """Run one episode to its end, and send it on."""
        config, name = self.config, self.config.run
        clock = self._clocks[task.name] = AgentClock(config.seconds)
        async with AsyncExitStack() as held:
            held.callback(self._clocks.pop, task.name, None)
            turns = Turns(task, ends, held, clock, report)
            if lease.deliveries[0] > 1 or task.replay:
                await turns.recall(config.max_turns)
            episode = self._episode(task, turns)
            turns.saved = episode.saved
            episode.restore(turns.recorded)
            try:
                ending = await run_to_end(name, self._agent, episode, clock, config.on_timeout)
            finally:
                episode.close()
                try:
                    await self._endpoint.end(episode)
                finally:  # also where this is cancelled: what is drawn would outlive its leases
                    await turns.close()
            if turns.broken is not None:  # not the agent's error, whatever it made of it
                raise turns.broken
            sample = finished(name, task, episode, ending, turns.rollout_rank)
            if sample.episode is not None:
                sample.episode = msgspec.structs.replace(sample.episode, engines=turns.engines)
            try:
                await episodes.put(sample)
            except (WrongItemType, UnicodeError) as error:  # text of a parser of the user's own
                sample = unsendable(name, task, error, ending)
                await episodes.put(sample)
        return sample

    def _episode(self, task: Request, turns: Turns) -> Episode:
        prompt, config = task.prompt, self.config
        return Episode(
            # Copied: agents change messages, and samples of one group may share them.
            Task(
                index=prompt.index,
                messages=copy.deepcopy(prompt.messages),
                reference=prompt.reference,
            ),
            turns,
            *self._language,
            config.limits(task.sampling.max_tokens),
            watch=partial(self._watch, task.name),
            on_tool_failure=config.on_tool_failure,
            on_rewrite=config.on_rewrite,
            endpoint=self._endpoint,
            sampling=task.sampling,
        )

    @contextmanager
    def _watch(self, episode: str, what: str) -> Iterator[None]:
        """Note in the block that an episode waits for something, such as a tool."""
        wait = object()
        self._waits[wait] = asyncio.get_running_loop().time(), episode, what
        try:
            with self.span(what, sample=episode):
                yield
        finally:
            del self._waits[wait]

    def doing(self) -> tuple[str, ...]:
        """Name the episodes that have waited longest for anything but the model."""
        now = asyncio.get_running_loop().time()
        named = {episode for _, episode, _ in self._waits.values()}
        agents = [
            (clock.since, episode, "its agent")
            for episode, clock in self._clocks.items()
            if episode not in named and clock.since is not None and now - clock.since >= QUICK
        ]
        longest = sorted([*self._waits.values(), *agents])[:NAMED]
        return tuple(
            f"episode {episode} has waited {now - since:.0f} s for {what}"
            for since, episode, what in longest
        )


def _count(report: EpisodeReport, sample: Sample) -> None:
    report.episodes += 1
    if isinstance(sample.outcome, Failed):
        report.failed += 1
        report.last_failure = sample.outcome.error
