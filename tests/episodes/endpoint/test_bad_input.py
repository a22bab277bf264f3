"""What an agent may do wrong: it is told in the words of its interface, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rlinf_async.episodes import Episode, EpisodeError
from rlinf_async.episodes.endpoint import Endpoint, EndpointConfig
from rlinf_async.episodes.parsing import Parsed
from tests.episodes.endpoint.kit import ADD, CALL, QUESTION, Scripted, episode_of, served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [QUESTION]},
    RESPONSES: {"model": "m", "input": [QUESTION]},
    MESSAGES: {"model": "m", "messages": [QUESTION], "max_tokens": 5},
}


def client_of(episode: Episode) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=episode.base_url,
        headers={"authorization": f"Bearer {episode.key}"},
        trust_env=False,
        timeout=60,
    )


def error_of(path: str, response: httpx.Response) -> tuple[str, str]:
    """Type and text of an error, which has the form of its interface."""
    body = response.json()
    assert response.headers["x-should-retry"] == "false"
    if path == MESSAGES:
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["message"]


def image(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, **fields}]}]


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "messages: Expected `array`, got `null`"),
    (CHAT, {"messages": "hello"}, "messages: Expected `array`, got `str`"),
    (CHAT, {"messages": [{"content": "x"}]}, r"messages\[0\]: Object missing required field `ro"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: it must be t"),
    (CHAT, {"messages": []}, "nothing to answer"),
    (CHAT, {"messages": [QUESTION, {"role": "assistant", "content": "I"}]}, "its answer begins"),
    (CHAT, {"messages": [{"role": "tool", "content": "3", "tool_call_id": "x"}]}, "the call 'x'"),
    (CHAT, {"messages": image("image_url", image_url={"url": "x"})}, "of type 'image_url'"),
    (CHAT, {"messages": image("input_audio")}, "of type 'input_audio'"),
    (RESPONSES, {"input": image("input_image", image_url="x")}, "of type 'input_image'"),
    (RESPONSES, {"input": image("input_file")}, "of type 'input_file'"),
    (MESSAGES, {"messages": image("image", source={})}, "of type 'image'"),
    (MESSAGES, {"messages": image("document", source={})}, "of type 'document'"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference'"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "'x'"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tool of type 'web_search'"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "of type 'bash_20250124'"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tool of type 'custom'"),
    (CHAT, {"tools": [ADD], "tool_choice": "required"}, "tool_choice: 'required'"),
    (CHAT, {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
     "tool_choice: {'type'"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice: {'type': 'any'}"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice: {"),
    (CHAT, {"n": 0}, "n is 0"),
    (CHAT, {"n": "two"}, "n: Expected `int | null`, got `str`"),
    (CHAT, {"max_tokens": -1}, "max_tokens is -1"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens is 0"),
    (CHAT, {"stop": ["a", ""]}, "stop: a stop sequence is empty"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences: a stop sequence is empty"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty: it is not known here, or cannot"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias: {'5': 1.0} is asked for, and the run has none"),
    (CHAT, {"stop_token_ids": [5]}, r"stop_token_ids: \[5\] is asked for, and the run has none"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs: "),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format: "),
    (CHAT, {"wishes": 3}, "wishes: it is not known here"),
    (RESPONSES, {"background": True}, "background: "),
    (RESPONSES, {"conversation": "c"}, "conversation: "),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format: "),
    (RESPONSES, {"include": ["file_search_call.results"]}, "include: 'file_search_call.results'"),
    (MESSAGES, {"container": "c"}, "container: "),
    (MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}, "is 'robot'"),
    (CHAT, {"model": 5}, "model: Expected `str`, got `int`"),
    (CHAT, {"messages": [QUESTION] * 500}, "maximum context length is 2000 tokens"),
    (MESSAGES, {"messages": [QUESTION] * 500}, "maximum context length is 2000 tokens"),
]  # fmt: skip


async def test_what_a_request_has_wrong_is_named() -> None:
    async with served([], tokens=2000) as (episode, _), client_of(episode) as client:
        for path, fields, words in BAD:
            answer = await client.post(path, json=ASKED[path] | fields)
            assert answer.status_code == 400, (path, fields, answer.text)
            kind, text = error_of(path, answer)
            assert kind == "invalid_request_error"
            assert re.search(words, text), (path, fields, text)
        assert not [chat for chat in episode.chats if chat.turns]


@pytest.mark.parametrize("path", sorted(ASKED))
async def test_what_cannot_be_honoured_is_left_out_with_a_warning_where_configured(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"wishes": 1, "tool_choice": {"type": "any"}, "temperature": 0.2}
    async with (
        served(["a", "b"], unknown="warn") as (episode, _),
        client_of(episode) as client,
    ):
        with caplog.at_level(logging.WARNING, "rlinf_async.episodes.endpoint"):
            for _ in range(2):
                answer = await client.post(path, json=ASKED[path] | fields)
                assert answer.status_code == 200, answer.text
        text = caplog.text
        for words in ("wishes: it is not known", "tool_choice: ", "temperature = 0.2 is asked for"):
            assert text.count(words) == 1


WARNED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{**ADD, "input_examples": [1]}]}, "tools[].input_examples: it is not known"),
    (CHAT, {"tools": [{"type": "function", "function": {**ADD["function"], "limit": 1}}]},
     "tools[].function.limit: it is not known"),
    (CHAT, {"tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}]},
     "tools[].function.strict = True is asked for, and changes nothing"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls = False is asked for"),
    (CHAT, {"messages": [{**QUESTION, "weight": 2}]}, "messages[].weight: it is not known"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "at": 1}]}]},
     "messages[].content[].at: it is not known"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "strict": True}]},
     "tools[].strict = True"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
     "tools[].defer_loading: it is not known"),
    (RESPONSES, {"parallel_tool_calls": False}, "parallel_tool_calls = False is asked for"),
    (RESPONSES, {"input": [{**QUESTION, "weight": 2}]}, "input[].weight: it is not known"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]},
     "tools[].input_examples: it is not known"),
    (MESSAGES, {"tools": [{"name": "f", "strict": True}]}, "tools[].strict = True"),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     "tool_choice.disable_parallel_tool_use = True"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort = 'low'"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "at": 1}]}]},
     "messages[].content[].at: it is not known"),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "at": 1}]}, "system[].at: it is not"),
]  # fmt: skip


async def test_what_is_left_out_of_tools_and_messages_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for path, fields, words in WARNED:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rlinf_async.episodes.endpoint"):
            async with served(["a", "b"]) as (episode, _), client_of(episode) as client:
                for _ in range(2):
                    answer = await client.post(path, json=ASKED[path] | fields)
                    assert answer.status_code == 200, answer.text
        assert caplog.text.count(words) == 1, (path, fields, words)


async def test_what_changes_no_answer_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    text = [{"type": "text", "text": "x", **cached}]
    fields: dict[str, dict[str, Any]] = {
        CHAT: {"parallel_tool_calls": True, "user": "u", "metadata": {"a": "b"}, "tools": [ADD]},
        RESPONSES: {"parallel_tool_calls": True, "store": False, "metadata": {}},
        MESSAGES: {
            "system": text,
            "messages": [{"role": "user", "content": text}],
            "tools": [{"name": "f", "input_schema": {}, **cached}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        },
    }
    async with served(lambda _: "a") as (episode, _), client_of(episode) as client:
        with caplog.at_level(logging.WARNING, "rlinf_async.episodes.endpoint"):
            for path, more in fields.items():
                answer = await client.post(path, json=ASKED[path] | more)
                assert answer.status_code == 200, answer.text
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": "no such file"}, "no such file"),
        ({"content": "no such file", "is_error": False}, "no such file"),
        ({"content": "no such file", "is_error": True}, "error: no such file"),
        ({"content": "error: no file", "is_error": True}, "error: no file"),
        ({"is_error": True}, "error: "),
        ({"content": [{"type": "text", "text": "none"}], "is_error": True}, "error: none"),
    ],
)
async def test_a_tool_that_has_failed_reads_as_one_that_has(
    fields: dict[str, Any], said: str
) -> None:
    async with served([CALL, "3"]) as (episode, model), client_of(episode) as client:
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        body = ASKED[MESSAGES] | {"tools": tools, "max_tokens": 500}
        first = (await client.post(MESSAGES, json=body)).json()
        (call,) = first["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], **fields}
        body["messages"] = [
            QUESTION,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        assert (await client.post(MESSAGES, json=body)).status_code == 200
        written = model.tokenizer.decode(model.draws[1].context)
        assert f"<tool_response>\n{said}\n</tool_response>" in written


KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "foreign": {"authorization": "Bearer sk-other"},
    "foreign of Anthropic's": {"x-api-key": "sk-other"},
    "no scheme": {"authorization": "sk-other"},
    "another scheme": {"authorization": "Basic KEY"},
    "empty": {"authorization": "Bearer", "x-api-key": ""},
}


@pytest.mark.parametrize("path", [*sorted(ASKED), "/v1/messages/count_tokens"])
async def test_a_key_that_opens_nothing_is_refused(path: str) -> None:
    async with served([]) as (episode, _), httpx.AsyncClient(trust_env=False) as client:
        for headers in KEYS.values():
            given = {name: text.replace("KEY", episode.key) for name, text in headers.items()}
            answer = await client.post(episode.base_url + path, json=ASKED[CHAT], headers=given)
            assert answer.status_code == 401
            kind, text = error_of(MESSAGES if "messages" in path else path, answer)
            assert kind == "authentication_error"
            assert "opens no episode" in text


async def test_a_key_opens_its_own_episode_and_ends_with_it() -> None:
    endpoint = Endpoint(EndpointConfig())
    first, second = (episode_of(Scripted(lambda _: "well"), endpoint=endpoint) for _ in range(2))
    try:
        assert first.key == first.key != second.key
        assert first.base_url == second.base_url
        async with client_of(first) as client, client_of(second) as other:
            assert (await client.post(CHAT, json=ASKED[CHAT])).status_code == 200
            assert (first.turns, second.turns) == (1, 0)
            await endpoint.end(first)
            with pytest.raises(EpisodeError, match="the episode is over"):
                assert first.key  # a task that was left running asks for it
            assert (await client.post(CHAT, json=ASKED[CHAT])).status_code == 401
            assert (await other.post(MESSAGES, json=ASKED[MESSAGES])).status_code == 200
            assert (first.turns, second.turns) == (1, 1)
    finally:
        await endpoint.aclose()


def refuses(text: str) -> Parsed:
    """A parser that does not read what it is given."""
    raise EpisodeError(f"{text} is no move")


@pytest.mark.parametrize("path", sorted(ASKED))
async def test_of_what_ends_a_question_only_the_end_of_the_episode_is_the_keys(path: str) -> None:
    endpoint = Endpoint(EndpointConfig())
    episode = episode_of(Scripted(lambda _: "well"), endpoint=endpoint, parser=refuses)
    kinds: list[tuple[int, str, str]] = []
    try:
        async with client_of(episode) as client:
            for _ in range(2):
                answer = await client.post(path, json=ASKED[path])
                kinds.append((answer.status_code, *error_of(path, answer)))
                episode.close()
    finally:
        await endpoint.aclose()
    over = "the episode is over: its coroutine has returned, or was cancelled"
    assert kinds == [
        (400, "invalid_request_error", "well is no move"),
        (401, "authentication_error", over),
    ]


async def test_what_is_asked_when_the_episode_ends_is_given_up() -> None:
    model = Scripted(["a"])
    endpoint = Endpoint(EndpointConfig())
    episode = episode_of(model, endpoint=endpoint)
    model.open.clear()
    try:
        async with client_of(episode) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json=ASKED[CHAT]))
            await model.asked.acquire()
            await endpoint.end(episode)
            answer = await asking
        assert answer.status_code == 401
        assert "has ended" in error_of(CHAT, answer)[1]
        assert model.given_up == 1
    finally:
        await endpoint.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_gives_its_answer_up(stream: bool) -> None:
    async with served(["a", "b"]) as (episode, model), client_of(episode) as client:
        model.open.clear()
        body = ASKED[CHAT] | {"stream": stream}
        asking = asyncio.ensure_future(client.post(CHAT, json=body))
        await model.asked.acquire()
        asking.cancel()
        await asyncio.wait([asking])
        await model.dropped.acquire()  # the server sees it when the connection is closed
        model.open.set()
        answer = await client.post(CHAT, json=ASKED[CHAT])
        assert answer.json()["choices"][0]["message"]["content"] == "b"
        assert [len(chat.turns) for chat in episode.chats if chat.turns] == [1]


class Lossy(httpx.AsyncHTTPTransport):
    """A network that loses the first answers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its answer may be lost."""
        response = await super().handle_async_request(request)
        if not self._left:
            return response
        self._left -= 1
        await response.aread()
        raise httpx.ReadError("lost", request=request)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_lost_is_told_again_and_costs_no_turn(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai.AsyncOpenAI, "_calculate_retry_timeout", lambda *_, **__: 0.0)
    messages: Any = [QUESTION]
    async with served(["a", "b", "c", "d"]) as (episode, model):
        options: Any = {"base_url": episode.base_url, "api_key": episode.key, "max_retries": 2}
        network: Any = httpx.AsyncClient(transport=Lossy(2))
        async with openai.AsyncOpenAI(**options, http_client=network) as client:
            create: Any = client.chat.completions.create
            found = await create(model="m", messages=messages, stream=stream)
            texts = [one.choices[0].delta.content async for one in found] if stream else []
            text = "".join(filter(None, texts)) or found.choices[0].message.content
            assert text == "a"
            assert (await create(model="m", messages=messages)).choices[0].message.content == "b"
        async with client_of(episode) as other:
            told = [
                (await other.post(MESSAGES, json=ASKED[MESSAGES], headers=headers)).json()
                for headers in ({}, {"x-stainless-retry-count": "1"})
            ]
            assert told[0] == told[1]
        assert (episode.turns, len(model.draws)) == (3, 3)


RAW: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'model': 5}", "the body is no JSON"),
    "nothing": (b"", "the body is no JSON"),
    "no object": (b"[1, 2]", "must be a JSON object"),
    "no UTF-8": (b'{"model": "\xff"}', "the body is no JSON"),
    "cut": (b'{"model": "m", "messages": [', "the body is no JSON"),
    "deep": (b"[" * 100_000, "the body is no JSON"),
    "half a character": (
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RAW))
async def test_a_body_that_is_no_json_is_refused(name: str) -> None:
    body, words = RAW[name]
    async with served([]) as (episode, _), client_of(episode) as client:
        for path in ASKED:
            answer = await client.post(path, content=body)
            assert answer.status_code == 400, answer.text
            assert words in error_of(path, answer)[1]


@pytest.mark.parametrize("path", sorted(ASKED))
async def test_ten_megabytes_are_refused_and_nobody_waits(path: str) -> None:
    large = ASKED[path] | {"model": "m" * 10_000_000}
    async with served(["well"]) as (episode, _), client_of(episode) as client:
        answer = await client.post(path, json=large)
        assert answer.status_code == 413
        assert "cannot hold it" in error_of(path, answer)[1]
        assert (await client.post(path, json=ASKED[path])).status_code == 200


async def test_a_model_that_is_not_there_is_named() -> None:
    async with (
        served(["a"], models=("small",)) as (episode, _),
        client_of(episode) as client,
    ):
        for path in ASKED:
            answer = await client.post(path, json=ASKED[path])
            assert answer.status_code == 404
            assert "there is no model 'm' (there are: small)" in error_of(path, answer)[1]
        assert (await client.post(CHAT, json=ASKED[CHAT] | {"model": "small"})).status_code == 200


async def test_paths_and_methods_that_are_not_there_are_named() -> None:
    async with served([]) as (episode, _), client_of(episode) as client:
        answer = await client.post("/v1/embeddings", json={})
        assert answer.status_code == 404
        assert "there is no POST /v1/embeddings: /v1/chat/completions" in error_of(CHAT, answer)[1]
        answer = await client.get(MESSAGES)
        assert answer.status_code == 405
        assert "there is no GET /v1/messages" in error_of(MESSAGES, answer)[1]


async def test_clients_do_not_ask_again_once_a_limit_is_reached() -> None:
    async with served(["a"], turns=1) as (episode, model):
        options: Any = {"base_url": episode.base_url, "api_key": episode.key, "max_retries": 5}
        messages: Any = [QUESTION]
        async with openai.AsyncOpenAI(**options) as client:
            await client.chat.completions.create(model="m", messages=messages)
            with pytest.raises(openai.PermissionDeniedError, match="1 of its 1 turns"):
                await client.chat.completions.create(model="m", messages=messages)
        async with anthropic.AsyncAnthropic(**options) as other:
            with pytest.raises(anthropic.PermissionDeniedError, match="1 of its 1 turns"):
                await other.messages.create(model="m", messages=messages, max_tokens=5)
        assert len(model.draws) == 1
        assert episode.reached is not None


async def test_what_the_template_refuses_is_said() -> None:
    async with served([]) as (episode, _), client_of(episode) as client:
        strict = "{{ raise_exception('roles must alternate') }}"
        episode.template._template = strict
        for path in ASKED:
            answer = await client.post(path, json=ASKED[path])
            assert answer.status_code == 400
            assert "roles must alternate" in error_of(path, answer)[1]


async def test_an_engine_that_fails_is_an_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served([]) as (episode, _), client_of(episode) as client:  # its script is over
        for path in ASKED:
            answer = await client.post(path, json=ASKED[path])
            assert answer.status_code == 500
            assert "IndexError" in answer.text
    assert "an agent's request has failed" in caplog.text


async def test_where_it_cannot_listen_is_named() -> None:
    taken = Endpoint(EndpointConfig())
    port = int(taken.base_url.rpartition(":")[2])
    try:
        with pytest.raises(EpisodeError, match=f"port {port}: .*in use"):
            assert Endpoint(EndpointConfig(port=port)).base_url
        with pytest.raises(EpisodeError, match="cannot listen on eth99"):
            assert Endpoint(EndpointConfig(interface="eth99")).base_url
        named = Endpoint(EndpointConfig(interface="lo"))
        assert named.base_url.startswith("http://127.0.0.1:")
        await named.aclose()
    finally:
        await taken.aclose()


async def test_an_episode_without_an_endpoint_says_so() -> None:
    episode = episode_of(Scripted([CALL]))
    with pytest.raises(EpisodeError, match="has no endpoint"):
        assert episode.base_url


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"port": 70_000}, "port"), ({"interface": ""}, "interface is empty")],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EndpointConfig(**fields)
