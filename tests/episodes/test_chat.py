"""A conversation with a model that draws what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rlinf_async.episodes import (
    Chat,
    Episode,
    EpisodeError,
    LimitReached,
    Limits,
    Parsed,
    ParserError,
    Rewrites,
    Task,
    TemplateError,
    Tool,
    ToolCall,
    ToolFailed,
    tool,
)
from rlinf_async.episodes.episode import OnRewrite
from rlinf_async.episodes.parsing import parser_of
from rlinf_async.episodes.template import ChatTemplate
from rlinf_async.messages.language import Generated, Tokens
from tests.episodes.kit import FAMILIES, ends_of, tokenizer_of

THOUGHT = "<think>\nwell\n</think>\n\n"


class Scripted:
    """Draws answers from a list, and keeps what it has read."""

    def __init__(self, family: str, answers: Sequence[str | Exception]) -> None:
        self._tokenizer: Any = tokenizer_of(family)
        self._answers = list(answers)
        self.read: list[str] = []
        self.drawn: list[list[int]] = []

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Draw the next answer; an exception is raised."""
        self.read.append(self._tokenizer.decode(context))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = self._tokenizer(answer, add_special_tokens=False)["input_ids"][:most]
        self.drawn.append(ids)
        return Generated(
            token_ids=np.array(ids, np.int32),
            log_prob=np.full(len(ids), -1, np.float32),
            version=np.zeros(len(ids), np.int32),
            finish="stop",
        )


@tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken() -> str:
    """Break."""
    raise ValueError("no good")


def episode_of(
    family: str, *answers: str | Exception, on_rewrite: OnRewrite = "fail", **limits: int
) -> tuple[Episode, Scripted]:
    model = Scripted(family, answers)
    task = Task(index=0, messages=({"role": "user", "content": "question"},), reference="5")
    template = ChatTemplate(tokenizer_of(family), ends=ends_of(family))
    parser = parser_of(FAMILIES[family].parser)
    most = Limits(turns=limits.get("turns", 8), tokens=limits.get("tokens", 4096))
    episode = Episode(task, model, template, parser, template.decode, most, on_rewrite=on_rewrite)
    return episode, model


def written(family: str, text: str, *calls: tuple[str, dict[str, Any]], end: bool = True) -> str:
    return FAMILIES[family].write(text, calls) + (FAMILIES[family].end if end else "")


async def to_the_end(chat: Chat) -> str:
    while (turn := await chat.turn()).tool_calls:
        await chat.answer(turn)
    return turn.text


def trained(episode: Episode) -> list[int]:
    """Tokens that the model drew, of all branches."""
    made = episode.transcript()
    assert made is not None
    mask = made.response.drawn
    found: list[int] = made.response.token_ids[slice(None) if mask is None else mask].tolist()
    return found


def flat(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


@pytest.mark.parametrize("family", [one for one, what in FAMILIES.items() if what.most_calls])
def test_an_episode_calls_tools_and_its_tokens_are_those_that_were_drawn(family: str) -> None:
    async def main() -> None:
        calls = [("add", {"a": 1, "b": 2}), ("add", {"a": 3})][: FAMILIES[family].most_calls]
        answers = [
            written(family, "", *calls),
            written(family, "", ("add", {"a": "x"}), end=False),  # cut, and wrong
            written(family, "the answer is 5"),
        ]
        episode, model = episode_of(family, *answers)
        chat = episode.chat(tools=[add])
        assert await to_the_end(chat) == "the answer is 5"
        assert episode.tool_calls == {"add": len(calls) + 1}
        assert episode.tool_failures == {("add", "arguments"): 1}
        assert trained(episode) == flat(model.drawn)
        assert "Expected `int`, got `str`" in model.read[-1]
        tokenizer: Any = tokenizer_of(family)
        assert tokenizer.decode(chat.tokens) == model.read[-1] + answers[-1]
        assert [one["role"] for one in chat.messages] == [
            "user", "assistant", *("tool" for _ in calls), "assistant", "tool", "assistant",
        ]  # fmt: skip

    asyncio.run(main())


def test_a_call_that_cannot_be_read_is_told() -> None:
    async def main() -> None:
        episode, model = episode_of(
            "qwen2.5", "<tool_call>{add}</tool_call><|im_end|>", "sorry<|im_end|>"
        )
        assert await to_the_end(episode.chat(tools=[add])) == "sorry"
        assert "the call cannot be read: the call is no JSON" in model.read[-1]
        assert episode.tool_failures == {("unknown", "arguments"): 1}

    asyncio.run(main())


def forgets(on_rewrite: OnRewrite) -> tuple[Episode, Scripted]:
    first = written("qwen3", THOUGHT, ("add", {"a": 1}))
    second = written("qwen3", THOUGHT + "3")
    return episode_of("qwen3", first, second, written("qwen3", "4"), on_rewrite=on_rewrite)


async def speaks_again(episode: Episode) -> Chat:
    chat = episode.chat(tools=[add])
    await to_the_end(chat)
    chat.say("and one more?")
    await chat.turn()
    return chat


def test_a_template_that_rewrites_ends_the_episode_unless_it_is_configured() -> None:
    async def main() -> None:
        episode, model = forgets("fail")
        with pytest.raises(Rewrites, match="on_rewrite"):
            await speaks_again(episode)
        assert len(model.drawn) == 2
        assert trained(episode) == flat(model.drawn)

    asyncio.run(main())


def test_a_rewritten_conversation_goes_on_in_a_branch_of_the_episode() -> None:
    async def main() -> None:
        episode, model = forgets("branch")
        chat = await speaks_again(episode)
        assert [len(turns) for _, turns in chat.lines] == [2, 1]
        made = episode.transcript()
        assert made is not None
        assert trained(episode) == flat(model.drawn)
        [branch] = made.branches
        assert made.response.token_ids[branch.start :].tolist() == model.drawn[2]
        assert "well" in model.read[1]
        assert "well" not in model.read[2]
        tokenizer: Any = tokenizer_of("qwen3")
        whole = tokenizer.apply_chat_template(
            chat.messages[:-1], tools=[add.schema], add_generation_prompt=True, tokenize=False
        )
        assert model.read[2] == whole
        assert episode.turns == 3

    asyncio.run(main())


def test_what_was_read_stays_where_it_is_to_be_kept() -> None:
    async def main() -> None:
        episode, model = forgets("keep")
        chat = await speaks_again(episode)
        assert model.read[2].startswith(model.read[1])
        assert model.read[2].count("well") == 2
        assert len(chat.lines) == 1
        assert trained(episode) == flat(model.drawn)

    asyncio.run(main())


def test_a_turn_that_fails_leaves_the_chat_as_it_was() -> None:
    async def main() -> None:
        one = written("qwen2.5", "one")
        episode, model = episode_of("qwen2.5", one, OSError("gone"), written("qwen2.5", "two"))
        chat = episode.chat()
        await chat.turn()
        chat.say("again")
        before = chat.tokens
        with pytest.raises(OSError, match="gone"):
            await chat.turn()
        assert np.array_equal(chat.tokens, before)
        await chat.turn()
        assert model.read[2] == model.read[1]
        assert trained(episode) == flat(model.drawn)

    asyncio.run(main())


def test_what_is_said_before_the_first_answer_is_read() -> None:
    async def main() -> None:
        episode, model = episode_of("qwen2.5", written("qwen2.5", "one"))
        chat = episode.chat()
        chat.say("and be brief")
        await chat.turn()
        assert model.read[0].count("<|im_start|>user") == 2
        assert len(episode.chats) == 1
        with pytest.raises(EpisodeError, match="the model spoke last"):
            await chat.turn()

    asyncio.run(main())


def test_a_fork_trains_what_it_draws_itself() -> None:
    async def main() -> None:
        texts = [written("qwen2.5", text) for text in ("one", "two", "three")]
        episode, model = episode_of("qwen2.5", *texts)
        chat = episode.chat()
        await chat.turn()
        chat.say("again")
        branch = chat.fork()
        branch.say("differently")
        await chat.turn()
        await branch.turn()
        assert trained(episode) == flat(model.drawn)
        [other] = branch.lines
        assert (
            other.conversation.response().token_ids[-len(model.drawn[2]) :].tolist()
            == (model.drawn[2])
        )
        assert model.read[2].count("differently") == 1
        assert "differently" not in model.read[1]

    asyncio.run(main())


def test_limits_of_turns_and_tokens() -> None:
    async def main() -> None:
        episode, _ = episode_of("qwen2.5", written("qwen2.5", "one"), turns=1)
        chat = episode.chat()
        await chat.turn()
        chat.say("again")
        with pytest.raises(LimitReached, match="its limit: max_turns = 1"):
            await chat.turn()
        prompt = len(episode.template.opening(episode.task.messages))
        said = written("qwen2.5", "one two three")
        episode, _ = episode_of("qwen2.5", said, tokens=prompt + 3)
        turn = await episode.chat().turn()
        assert len(turn.drawn.token_ids) == 3
        assert turn.text == "one t"

    asyncio.run(main())


def own(text: str) -> object:
    """A parser of the user's own, which does what the answer asks for."""
    if "raise" in text:
        raise KeyError("no")
    call: dict[str, Any] = {"name": "add"}
    if "number" in text:
        call["name"] = 4
    if "keys" in text:
        call["arguments"] = {1: 2}
    if "object" in text:
        call["arguments"] = {"a": object()}
    if "nothing" in text:
        return Parsed(text=None)  # type: ignore[arg-type]
    if "no calls" in text:
        return Parsed(text="", tool_calls=None)  # type: ignore[arg-type]
    return Parsed(text=text, tool_calls=(ToolCall(**call),)) if "call" in text else text


@pytest.mark.parametrize(("answer", "error"), [
    ("raise", "parser .*:own' raised KeyError: 'no' for the answer 'raise'"),
    ("text", "parser .*:own' returned 'text', not Parsed"),
    ("nothing", "returned what is no answer: .*Expected `str`, got `null` - at `[$].text`"),
    ("no calls", "Expected `array`, got `null` - at `[$].tool_calls`"),
    ("call number", "Expected `str`, got `int` - at `[$].tool_calls.*name` .it read 'call number'"),
    ("call keys", "Expected `str`, got `int` - at `key` in `[$].tool_calls.*arguments`"),
    ("call object", "TypeError: Encoding objects of type object is unsupported"),
])  # fmt: skip
def test_a_parser_of_the_users_own_that_breaks_is_named(answer: str, error: str) -> None:
    parser = parser_of("tests.episodes.test_chat:own")
    with pytest.raises(ParserError, match=error):
        parser(answer)


def test_a_tool_that_fails_ends_the_episode_where_it_is_configured() -> None:
    async def main(make: Callable[[], Sequence[Tool]], on_failure: Any) -> Episode:
        call = written("qwen2.5", "", ("broken", {}), ("sum", {}))
        episode, _ = episode_of("qwen2.5", call, written("qwen2.5", "sorry"))
        episode.on_tool_failure = on_failure
        try:
            await to_the_end(episode.chat(tools=make()))
        finally:
            assert episode.tool_failures == {("broken", "raised"): 1, ("unknown", "unknown"): 1}
        return episode

    asyncio.run(main(lambda: [broken], "tell"))
    asyncio.run(main(lambda: [Tool(broken.function, on_failure="tell")], "fail"))
    for tools, on_failure in (
        ([broken], "fail"),
        ([Tool(broken.function, on_failure="fail")], "tell"),
    ):
        with pytest.raises(ToolFailed, match=r"broken failed \(raised\): error: ValueError: no"):
            asyncio.run(main(lambda tools=tools: tools, on_failure))  # type: ignore[misc]


def test_tools_of_one_name_are_refused() -> None:
    episode, _ = episode_of("qwen2.5")
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        episode.chat(tools=[add, Tool(add.function)])
    with pytest.raises(TypeError, match="is no tool: decorate it with @tool"):
        episode.chat(tools=[add.function])  # type: ignore[list-item]
    with pytest.raises(TemplateError, match="leaves tools out"):
        episode_of("gemma")[0].chat(tools=[add])


@pytest.mark.parametrize("said", [False, True])
def test_a_prompt_is_read_once_unless_more_is_said_before_the_first_turn(
    said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode, model = episode_of("qwen2.5", "yes")
    openings: list[int] = []
    read = ChatTemplate.read

    def counted(self: ChatTemplate, messages: Any, tools: Any = ()) -> Any:
        openings.append(len(messages))
        return read(self, messages, tools)

    monkeypatch.setattr(ChatTemplate, "read", counted)
    chat = episode.chat(tools=[add])
    if said:
        chat.say("and more?")
    asyncio.run(chat.turn())
    assert openings == ([1, 2] if said else [1])
    assert ("and more?" in model.read[0]) == said
