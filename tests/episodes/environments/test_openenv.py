"""Servers of OpenEnv: one of openenv-core, in a virtualenv of its own, on loopback."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.environments import Asked
from rlinf_async.messages.language import Failed, Scored
from tests.episodes.endpoint.programs import PACKAGES
from tests.episodes.environments.kit import agent, attempt, ended, played, rewards, said

SERVER = Path(__file__).with_name("openenv_server.py")
SESSIONS = 40
"""sessions that the server has at a time, at most"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server."""
    try:
        python = default_store().python(PACKAGES["openenv"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    command = [str(python), str(SERVER), str(SESSIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def right(number: int) -> str:
    return str(random.Random(number).randrange(10))


def wrong(number: int) -> str:
    return "0" if right(number) != "0" else "1"


@pytest.mark.usefixtures("loop_kind")
async def test_the_model_plays_and_each_step_has_its_reward(url: str) -> None:
    run = agent("openenv", url=url, action="text", observation="says")
    ending, episode = await played(run, [wrong(5), right(5)], 5)
    assert ending.outcome == Scored(reward=1.0)
    assert rewards(episode) == [-0.25, None]
    hint = "larger" if wrong(5) < right(5) else "smaller"
    assert said(episode) == ["Guess my number, 0 to 9.", wrong(5), hint, right(5)]
    assert episode.metrics == {"unfinished": 0.0, "return": 0.75}


async def test_the_model_writes_and_reads_json_where_no_field_is_named(url: str) -> None:
    answers = ["3", '{"word": "3"}', json.dumps({"text": right(2)})]
    ending, episode = await played(agent("openenv", url=url), answers, 2)
    assert ending.outcome == Scored(reward=1.0)
    first, _, no_object, _, no_action, _ = said(episode)
    assert json.loads(first) == {"says": "Guess my number, 0 to 9.", "steps": 0}
    assert "an action is one JSON object" in no_object
    assert "this is no action of the environment" in no_action
    assert rewards(episode) == [None, None, None]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("raise", "failed in step: 'board' (EXECUTION_ERROR)"),
        ("nothing", "(nothing)"),
        ("flood", "has gone during step: ConnectionClosedError"),
        ("hang", "took longer than seconds = 0.5"),
    ],
)
async def test_what_goes_wrong_fails_the_episode_by_name(url: str, answer: str, words: str) -> None:
    run = agent("openenv", url=url, action="text", observation="says", largest_mib=1)
    episode, _ = attempt([answer, right(3)])
    ending = await ended(run, episode, seconds=0.5 if answer == "hang" else 60.0)
    if answer == "nothing":  # null, as JSON has it
        assert said(episode)[2] == "null"
        assert ending.outcome == Scored(reward=1.0)
    else:
        assert isinstance(ending.outcome, Failed)
        assert words in ending.outcome.error


async def test_a_truth_value_is_a_reward_of_1(url: str) -> None:
    ending, _ = await played(agent("openenv", url=url, action="text", observation="says"), ["true"])
    assert ending.outcome == Scored(reward=1.0)


async def test_episodes_share_nothing(url: str) -> None:
    run = agent("openenv", url=url, action="text", observation="says")
    scripts = [[str(one % 10) for one in range(at, at + 20)] for at in range(12)]
    attempts = [attempt(script, at)[0] for at, script in enumerate(scripts)]
    await asyncio.gather(*(ended(run, episode) for episode in attempts))
    alone = [(await played(run, script, at))[1] for at, script in enumerate(scripts)]
    assert [said(episode) for episode in attempts] == [said(episode) for episode in alone]


async def test_more_sessions_than_the_server_has_fail_by_name(url: str) -> None:
    run = agent("openenv", url=url, action="text", observation="says")
    attempts = [attempt([wrong(1)] * 20, 1, turns=9)[0] for _ in range(SESSIONS + 20)]
    endings = await asyncio.gather(*(ended(run, episode) for episode in attempts))
    refused = [one.outcome for one in endings if isinstance(one.outcome, Failed)]
    assert refused
    assert all("reset" in one.error for one in refused)
    scored = [one.outcome for one in endings if isinstance(one.outcome, Scored)]
    assert len(scored) + len(refused) == SESSIONS + 20


def test_more_episodes_than_the_server_has_sessions_are_refused() -> None:
    settings = {"url": "http://127.0.0.1:9", "sessions": 8}
    load_agent("openenv", ("episode", "run"), settings, Asked(at_once=8))
    with pytest.raises(ConfigError, match=r"has 8 session\(s\), but 9 episodes") as caught:
        load_agent("openenv", ("episode", "run"), settings, Asked(at_once=9))
    assert caught.value.path == ("episode", "environment", "sessions")


async def test_a_server_that_is_not_there_is_named() -> None:
    url = "http://me:secret@127.0.0.1:9"
    ending, _ = await played(agent("openenv", url=url, action="text"), [])
    assert isinstance(ending.outcome, Failed)
    assert "environment at 127.0.0.1:9 cannot be reached: " in ending.outcome.error
    assert "secret" not in ending.outcome.error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "url"),
        ({"url": "127.0.0.1:8000"}, "it must be an address, http://host:8000"),
        ({"url": "ftp://host"}, "it must be an address"),
        (
            {"url": "http://host", "connect_seconds": 0},
            "connect_seconds is 0.0; it must be above 0",
        ),
        (
            {"url": "http://host", "connect_seconds": 3600},
            "connect_seconds is 3600.0; it must be below 3600",
        ),
        ({"url": "http://host", "largest_mib": 0}, "largest_mib is 0; it must be at least 1"),
        ({"url": "http://host", "actions": "text"}, "did you mean 'action'"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        agent("openenv", **settings)
    assert caught.value.path[:2] == ("episode", "environment")


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'rlinf-async\[openenv\]'"):
        agent("openenv", url="http://host:8000")
