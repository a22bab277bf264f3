"""Random episodes over real rollout workers, while everything dies and moves, and the oracle: an
episode comes once, whole, with what was drawn for it and nothing else.

::

    agents      turns, forks, answers cut by stop, turns that are given up, rewards of turns; tools
                that work, raise, hang, cling, flood and are not there; the same over the endpoint;
                a game that is restored by its state
    disturbed   episode workers, engines and rollout workers die, join, leave, are interrupted,
                and hand back what they have begun; new weights come
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.toy.engine import response_length, response_tokens, token_log_probs
from rlinf_async.channels.queue import statistics_of
from rlinf_async.episodes import Chat, Episode, Parsed, ToolCall, Turn, tool
from rlinf_async.messages.language import Failed, Generated, Request, Sample, Sampling, Scored
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from rlinf_async.workers.episode.worker import Language
from rlinf_async.workers.rollout.language import LanguageRolloutConfig
from tests.workers.episode.kit import Acting, language, replaced, task, wait
from tests.workers.rollout import language_kit
from tests.workers.rollout.language_kit import Rollout, update

ENGINE: Final = ToyEngineConfig(
    slots=3, seconds_per_step=0.1, mean_tokens=8, tail=0.5, vocabulary=16
)
MOST: Final = 24
"""tokens of an answer"""
ACTING, SERVING, SPARE = 2, 2, 1
"""episode workers; rollout workers; further ones that join and leave"""


@tool(seconds=1)
async def break_down() -> str:
    """Fail."""
    raise OSError("out of order")


@tool(seconds=1)
async def hang() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


@tool(seconds=1)
async def cling() -> str:
    """End some time after it was told to."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(3)
    return ""


@tool(output=10)
async def flood() -> str:
    """Say too much."""
    return "1" * 1000


TOOLS: Final = [wait, break_down, hang, cling, flood]
CALLS: Final = [
    ToolCall(name="wait", arguments={"seconds": 0.5}),
    ToolCall(name="wait", arguments={"seconds": "long"}),
    *(ToolCall(name=one.name, arguments={}) for one in TOOLS[1:]),
    ToolCall(name="nobody", arguments={}),
]


def parse(text: str) -> Parsed:
    """None, one or two calls, which follow from the letters."""
    chance = random.Random(text)
    return Parsed(text=text, tool_calls=tuple(chance.choices(CALLS, k=chance.randrange(3))))


class Told(NamedTuple):
    """What an agent has seen of its episode, when it ended."""

    turns: Counter[tuple[tuple[int, ...], float | None]]
    """tokens and reward of each turn"""
    score: float | None
    """None: it raised"""


def told(episode: Episode, score: float | None) -> Told:
    """What the agent's own turns say."""
    turns = [turn for chat in episode.chats for turn in chat.turns]
    seen = ((tuple(turn.drawn.token_ids.tolist()), turn.reward) for turn in turns)
    return Told(Counter(seen), score)


async def drawn(chat: Chat, chance: random.Random) -> Turn:
    """A turn; it may be given up first, and cut."""
    stop = [chance.choice("0123456789")] if chance.random() < 0.3 else []
    patience = chance.uniform(0.0, 2.0)
    if chance.random() < 0.2:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await chat.turn(stop=stop)
    return await chat.turn(stop=stop)


async def wanders(episode: Episode, chance: random.Random) -> float:
    """Turns, tools, forks and errors."""
    chats = [episode.chat(tools=TOOLS)]
    for _ in range(chance.randrange(1, 7)):
        chat = chance.choice(chats)
        turn = await drawn(chat, chance)
        turn.reward = 0.5 if chance.random() < 0.2 else None
        await asyncio.sleep(chance.choice([0.0, chance.uniform(0.0, 3.0)]))
        if turn.tool_calls and chance.random() < 0.8:
            await chat.answer(turn)
        else:
            chat.say(str(chance.randrange(100)))
        if chance.random() < 0.3:
            chats.append(chat.fork())
        if chance.random() < 0.2:
            chats.append(chat.fork())
            await asyncio.gather(chat.turn(), chats[-1].turn())
            chat.say("5")
            chats[-1].say("6")
    if chance.random() < 0.1:
        raise LookupError("lost the thread")
    return float(episode.turns)


async def plays(episode: Episode, chance: random.Random) -> float:
    """A game that counts its moves, and is restored."""
    chat = await episode.resume()
    most, moves = chance.randrange(1, 7), int(episode.state or b"0")
    turn = chat.turns[-1] if chat.turns else None
    assert moves == max(0, len(chat.turns) - 1), "the state is not that of the conversation"
    while moves < most:
        if turn is None:
            episode.state = str(moves).encode()
            turn = await chat.turn()
        moves += 1
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        chat.say(f"{moves}")
        turn = None
    return float(episode.turns)


class Http:
    """A client of the endpoint of an episode, without a network between them."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key

    async def ask(self, leaves_after: float | None, **body: Any) -> list[dict[str, Any]]:
        """The messages of the choices; none where it has gone away before.

        ``leaves_after``: seconds after which it does.
        """
        whole = json.dumps({"model": "m"} | body).encode()
        left = [{"type": "http.request", "body": whole, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if left:
                return left.pop()
            if leaves_after is None:
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(leaves_after)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path = "/v1/chat/completions"
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"authorization", b"Bearer " + self._key.encode())],
            "client": ("agent", 1), "server": ("episode", 80),
        }  # fmt: skip
        await self._app(scope, receive, send)
        answer = json.loads(b"".join(one.get("body", b"") for one in sent[1:]))
        if leaves_after is not None and "gone away" in str(answer):
            return []
        assert sent[0]["status"] == 200, answer
        return [one["message"] for one in answer["choices"]]


async def asks(episode: Episode, chance: random.Random) -> float:
    """The same over the endpoint: choices, two calls at once, an edited context."""
    http = Http(episode._endpoint._app(), episode.key)  # type: ignore[union-attr]
    messages: list[Any] = list(episode.task.messages)
    for _ in range(chance.randrange(1, 6)):
        body: dict[str, Any] = {"messages": messages}
        if chance.random() < 0.3:
            body["stop"] = [chance.choice("0123456789")]
        if chance.random() < 0.3:
            body["n"] = 2
        patience = chance.uniform(0.0, 2.0)
        if chance.random() < 0.2:
            await http.ask(patience, **body)
        calls = [http.ask(None, **body) for _ in range(1 + (chance.random() < 0.2))]
        answers = [one for found in await asyncio.gather(*calls) for one in found]
        assert len(answers) == len(calls) * body.get("n", 1)
        answer = chance.choice(answers) | {"content": answers[0]["content"] or ""}
        said = {"role": "user", "content": str(chance.randrange(100))}
        messages = [*messages, answer, said]
        if chance.random() < 0.2:
            messages = [messages[0], said]
        await asyncio.sleep(chance.uniform(0.0, 1.0))
    return float(episode.turns)


class Drawing(Rollout):
    """Notes what each turn was drawn from."""

    def __init__(self, asked: dict[int, dict[str, list[Request]]]) -> None:
        super().__init__(ENGINE, LanguageRolloutConfig(engine_restarts=1_000_000))
        self._asked = asked

    async def generate(self, request: Request) -> Generated | None:
        self._asked[request.group].setdefault(request.name, []).append(request)
        return await super().generate(request)


class Wandering(Acting):
    """Its model's answers may be calls of tools."""

    async def setup(self) -> None:
        template, _, decode = language()
        self._language = Language(template, parse, decode)


class World:
    """Episode workers and rollout workers, and what befalls them."""

    def __init__(self, cluster: ra.Cluster, chance: random.Random, *, sticky: bool) -> None:
        self.chance = chance
        self.sticky = sticky
        """whether a turn goes to the rollout worker that drew the one before, if it has room"""
        self.tasks = cluster.channel(Request, name="tasks", capacity=1000, max_deliveries=1000)
        self.episodes = cluster.channel(Sample, name="episodes", capacity=1000)
        self.around = language_kit.Channels(cluster, stealing=sticky)
        for one in (self.around.requests, self.around.samples):
            one.queue.max_deliveries = 1000
        self.acting: list[Any] = []
        self.serving: dict[int, Any] = {}
        self.version = self.deaths = 0
        self.asked: dict[int, dict[str, list[Request]]] = defaultdict(dict)
        """requests by episode and name: in however many lives and pieces"""
        self.told: dict[int, Told] = {}
        """what the last life of each agent has seen"""

    async def start(self, cluster: ra.Cluster) -> None:
        """Start all of them, with weights of version 0."""
        config = EpisodeConfig(run="agent", concurrent=5, max_turns=99, max_tokens=4000)
        self.workers = await cluster.launch(Wandering, self.agent, config, count=ACTING)
        self.rollouts = await cluster.launch(Drawing, self.asked, count=SERVING + SPARE)
        self.acting = [self._act(rank) for rank in range(ACTING)]
        self.serving = {rank: self._serve(rank) for rank in range(SERVING)}
        await self.around.weights.sender.publish(update(0))

    async def agent(self, episode: Episode) -> float:
        """One of the agents, by the number of the task."""
        index = episode.task.index
        chance = random.Random(index)
        agent = [wanders, wanders, plays, asks][index % 4]
        score = None
        try:
            score = await agent(episode, chance)
            return score
        finally:
            self.told[index] = told(episode, score)

    def _act(self, rank: int) -> Any:
        ends = (
            self.tasks.receiver,
            self.around.requests.sender,
            self.around.samples.receiver,
            self.episodes.sender,
        )
        return self.workers.call_on([rank], EpisodeWorker.run, *ends, sticky=self.sticky)

    def _serve(self, rank: int) -> Any:
        return self.around.serve(self.rollouts, [rank], sticky=self.sticky)

    async def disturb(self) -> None:
        """Let something befall one of them."""
        chance, rank = self.chance, self.chance.randrange(SERVING)
        rollout = self.rollouts[rank]
        match chance.randrange(7):
            case 0:
                self.deaths += 1
                dying = chance.randrange(ACTING)
                self.acting[dying].cancel()
                await self.acting[dying].finished(within=10)
                self.acting[dying] = self._act(dying)
            case 1:
                await rollout.call(Rollout.interrupt, share=chance.choice([0.5, 1.0]))
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                await rollout.call(Rollout.resume)
            case 2:
                await self._leave(rank)
                self.serving[rank] = self._serve(rank)
            case 3:
                await rollout.call(Rollout.stop, hand_back=True)
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                await rollout.call(Rollout.resume)
            case 4:
                await rollout.call(Rollout.kill_engine)
            case 5:
                self.version += 1
                await self.around.weights.sender.publish(update(self.version))
            case _:
                spare = SERVING + chance.randrange(SPARE)
                if spare in self.serving:
                    await self._leave(spare)
                else:
                    self.serving[spare] = self._serve(spare)

    async def _leave(self, rank: int) -> None:
        leaving = self.serving.pop(rank)
        leaving.cancel()
        await leaving.finished(within=1)

    def check(self, sample: Sample) -> None:
        """The episode is whole, and has what was drawn for it, and nothing else."""
        made, record = sample.generated, sample.episode
        assert record is not None
        seen = self.told[sample.request.group]
        spans = [made.token_ids[one.start : one.stop] for one in sample.turns]
        rewards = [one.reward for one in sample.turns]
        tokens = [tuple(one.tolist()) for one in spans]
        assert Counter(zip(tokens, rewards, strict=True)) == seen.turns
        mask = np.zeros(len(made.token_ids), np.bool_)
        for one in sample.turns:
            assert not mask[one.start : one.stop].any()
            mask[one.start : one.stop] = True
        np.testing.assert_array_equal(made.drawn_mask, mask)
        own = token_log_probs(made.token_ids, made.version)
        np.testing.assert_array_equal(made.log_prob, np.where(mask, own, 0.0))
        assert set(made.version[~mask].tolist()) <= {-1}
        assert made.version[mask].min() >= sample.request.min_version
        assert made.version.max() <= self.version
        if seen.score is None:
            assert isinstance(sample.outcome, Failed)
            assert "lost the thread" in sample.outcome.error
        else:
            assert sample.outcome == Scored(reward=seen.score)
        self._check_drawn(sample)

    def _check_drawn(self, sample: Sample) -> None:
        """Each turn is what an engine drew for a request of this episode, after what stands before
        it in its branch; none is there more often than it was drawn."""
        made = sample.generated
        asked = dict(self.asked[sample.request.group])
        branches = [(0, sample.request.prompt.token_ids)]
        branches += [(one.start, one.prompt_ids) for one in sample.branches]
        # The longest first: the beginning of an answer may be that of another one, too.
        for span in sorted(sample.turns, key=lambda one: one.start - one.stop):
            start, prompt = max((one for one in branches if one[0] <= span.start), key=first)
            context = np.concatenate([prompt, made.token_ids[start : span.start]])
            tokens = made.token_ids[span.start : span.stop]
            matching = [
                name
                for name, pieces in asked.items()
                if any(drew(one, context, tokens) for one in pieces)
            ]
            assert matching, f"{sample.request.name}: nobody drew {tokens} after {context}"
            del asked[matching[0]]


def first(branch: tuple[int, Any]) -> int:
    """Where a branch begins."""
    return branch[0]


def drew(asked: Request, context: Any, tokens: Any) -> bool:
    """Whether this is what the toy engine draws for a request, or its beginning: an answer that was
    stopped."""
    length = min(response_length(ENGINE, asked.seed), asked.sampling.max_tokens)
    return (
        len(tokens) <= length
        and np.array_equal(asked.prompt.token_ids, context)
        and np.array_equal(response_tokens(ENGINE, asked, length)[: len(tokens)], tokens)
    )


async def wander(seed: int, count: int) -> None:
    """Run so many random episodes, and check each of them; `sticky` ones for every other seed."""
    chance = random.Random(seed)
    tasks = {}
    for number in range(seed * count, (seed + 1) * count):
        one = replaced(task(number, f"{number}?"), sampling=Sampling(max_tokens=MOST))
        tasks[one.name] = one
    async with ra.Cluster.local() as cluster:
        world = World(cluster, chance, sticky=bool(seed % 2))
        await world.start(cluster)
        around = world.around
        with (
            world.tasks.receiver, around.requests.sender, around.requests.receiver,
            around.samples.sender, around.samples.receiver, world.episodes.sender,
            around.taken.sender,
        ):  # fmt: skip
            for one in tasks.values():
                await world.tasks.sender.put(one)
            found: dict[str, Sample] = {}
            twice = 0

            async def collect() -> None:
                async for _ in around.taken.receiver:
                    pass

            async def take() -> None:
                nonlocal twice
                while len(found) < count:
                    sample = await world.episodes.receiver.get()
                    world.check(sample)
                    twice += sample.request.name in found
                    found[sample.request.name] = sample

            noticing, collecting = asyncio.create_task(collect()), asyncio.create_task(take())
            while not collecting.done():
                await asyncio.wait([collecting], timeout=chance.uniform(0.0, 4.0))
                if not collecting.done():
                    await world.disturb()
            await collecting
            world.tasks.sender.close()
            for acting in world.acting:
                await acting
            around.requests.close()
            for serving in world.serving.values():
                await serving
            noticing.cancel()
        assert found.keys() == tasks.keys()
        assert twice <= world.deaths * 5
        left = [statistics_of(one.queue) for one in (world.tasks, around.requests)]
        assert [one.depth + one.leases_out for one in left] == [0, 0]
        assert statistics_of(around.samples.queue).leases_out == 0
