"""The page by which a person acts: what hands do is an action for as long as they are held."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.messages.embodied import Intervention, Proposal, Verdict
from rlinf_async.messages.spaces import ActionSpec, ObservationPart, ObservationSpec, choices
from rlinf_async.messages.spaces import continuous as numbers
from rlinf_async.view.hands import HELD, Hands
from rlinf_async.workers.intervention import InterventionWorker, PageAddress
from tests.jobs.processes import until
from tests.view.browser import Browser

SEEN = np.array([0.5, -1.0], np.float32)
PROPOSED = np.array([0.1, 0.2], np.float32)
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(
    spec: ActionSpec, clock: Clock, *, judges: bool = True
) -> AsyncIterator[tuple[Hands, httpx.AsyncClient]]:
    """A page without a limit of steps in a second, and a client that has entered it."""
    hands = Hands(spec, 0, "token", clock=clock, hz=math.inf, judges=judges)
    await hands.open()
    url = httpx.URL(hands.address)
    try:
        base = url.copy_with(path="/", query=None)
        async with httpx.AsyncClient(base_url=base, verify=False) as client:
            assert (await client.get(url)).status_code == 200
            yield hands, client
    finally:
        await hands.close()


async def test_hands_act_while_they_are_held_and_let_go_when_nothing_is_heard_of_them() -> None:
    clock = Clock()
    async with opened(numbers(2), clock) as (hands, client):
        assert await hands(SEEN, PROPOSED) is None
        for held in ([0.5, -1.0], [0.0, 0.0]):
            assert (await client.post("/api/hands", json={"action": held})).status_code == 200
            np.testing.assert_array_equal(
                await hands(SEEN, PROPOSED), np.array(held, dtype="float32")
            )
        clock.now = 0.9 * HELD
        assert await hands(SEEN, PROPOSED) is not None
        clock.now = HELD
        assert await hands(SEEN, PROPOSED) is None
        await client.post("/api/hands", json={"action": [1.0, 1.0]})
        await client.post("/api/hands", json={"action": None})
        assert await hands(SEEN, PROPOSED) is None
        told = (await client.get("/api/seen")).json()
        assert told["proposed"] == pytest.approx(PROPOSED.tolist())
        assert (told["asked"], told["acts"], told["numbers"], told["choices"]) == (6, False, 2, 0)
        assert told["shown"] == {"state": SEEN.tolist()}


async def test_choices_and_images() -> None:
    spec = ObservationSpec((ObservationPart(name="front", kind="image", shape=(4, 4, 3)),))
    seen = spec.empty(1)[0]
    seen["front"] = PIXELS
    async with opened(choices(3), Clock()) as (hands, client):
        await client.post("/api/hands", json={"action": 2})
        assert await hands(seen, np.int64(1)) == 2
        told = (await client.get("/api/seen")).json()
        assert (told["images"], told["choices"], told["proposed"]) == ({"front": [4, 4, 3]}, 3, 1)
        assert (await client.get("/api/image?name=front")).content == PIXELS.tobytes()
        assert (await client.get("/api/image?name=back")).status_code == 400


@pytest.mark.parametrize(
    ("spec", "body"),
    [
        (numbers(2), '{"action": [1.0]}'),
        (numbers(2), '{"action": [1.0, 1.5]}'),
        (numbers(2), '{"action": [1.0, "a"]}'),
        (numbers(2), '{"action": [NaN, 0]}'),
        (numbers(2), f'{{"action": [0, {"9" * 400}]}}'),
        (numbers(2), "[]"),
        (numbers(2), "{}"),
        (choices(3), '{"action": 3}'),
        (choices(3), '{"action": true}'),
        (choices(3), '{"action": 1.0}'),
    ],
)
async def test_what_is_no_action_is_refused(spec: ActionSpec, body: str) -> None:
    async with opened(spec, Clock()) as (hands, client):
        assert (await client.post("/api/hands", content=body)).status_code == 400
        assert await hands(SEEN, PROPOSED) is None


async def test_a_verdict_that_no_question_follows_is_dropped() -> None:
    """While an evaluation plays, say: the next question is of an episode that nobody has seen."""
    clock = Clock()
    async with opened(numbers(2), clock) as (hands, client):
        assert await hands(SEEN, PROPOSED) is None
        await client.post("/api/verdict", json={"success": True})
        clock.now += 2.1
        assert await hands(SEEN, PROPOSED) is None
        assert await hands(SEEN, PROPOSED) is None


async def test_a_verdict_counts_once_beside_what_hands_do() -> None:
    async with opened(numbers(2), Clock()) as (hands, client):
        early = await client.post("/api/verdict", json={"success": True})
        assert early.status_code == 400
        assert "no episode has begun" in early.text
        assert await hands(SEEN, PROPOSED) is None
        for success in (True, False):
            assert (await client.post("/api/verdict", json={"success": success})).status_code == 200
            assert await hands(SEEN, PROPOSED) == Verdict(success)
            assert await hands(SEEN, PROPOSED) is None
        await client.post("/api/hands", json={"action": [0.5, -1.0]})
        await client.post("/api/verdict", json={"success": True})
        said = await hands(SEEN, PROPOSED)
        assert said.success is True
        np.testing.assert_array_equal(said.action, np.array([0.5, -1.0], np.float32))
        for body in ("", "[]", "{}", '{"success": 1}', '{"success": null}'):
            assert (await client.post("/api/verdict", content=body)).status_code == 400
        assert isinstance(await hands(SEEN, PROPOSED), np.ndarray)
    async with opened(numbers(2), Clock(), judges=False) as (hands, client):
        await hands(SEEN, PROPOSED)
        refused = await client.post("/api/verdict", json={"success": True})
        assert refused.status_code == 400
        assert "no episode can be ended here" in refused.text


async def test_nobody_else_acts() -> None:
    async with opened(numbers(2), Clock()) as (hands, client):
        elsewhere = {"origin": "http://127.0.0.1:1"}
        act = {"action": [1.0, 1.0]}
        answer = await client.post("/api/hands", json=act, headers=elsewhere)
        assert answer.status_code == 403
        async with httpx.AsyncClient(base_url=client.base_url, verify=False) as stranger:
            assert (await stranger.post("/api/hands", json=act)).status_code == 401
            assert (await stranger.get("/api/seen")).status_code == 401
        assert (await client.put("/api/hands", json=act)).status_code == 405
        assert await hands(SEEN, PROPOSED) is None


async def test_the_worker_of_a_person_serves_the_page_and_asks_it() -> None:
    async with ra.Cluster.local() as cluster:
        proposals = cluster.channel(Proposal, name="proposals")
        interventions = cluster.channel(Intervention, name="interventions")
        place = PageAddress(numbers(2), 0, "token")
        people = await cluster.launch(InterventionWorker, "page", place)
        asked = Proposal(
            env_rank=0, stage=0, incarnation=0, sequence=1, observation=SEEN[None],
            action=PROPOSED[None],
        )  # fmt: skip
        with proposals.sender as sender:
            await sender.put(asked)
        [report] = await people.call(
            InterventionWorker.serve, proposals.receiver, interventions.sender
        )
        assert (report.questions, report.acted) == (1, 0)
        said = await interventions.receiver.get(key="0/0")
        assert (said.sequence, said.action) == (1, None)


@contextlib.contextmanager
def asked_again_and_again(
    spec: ActionSpec, proposed: Any, seen: Any = SEEN
) -> Iterator[tuple[str, list[Any]]]:
    """A page whose person is asked without end, its address, and what was said last."""
    said: list[Any] = [None]
    ready, done = threading.Event(), threading.Event()
    hands = Hands(spec, 0, "token", hz=200.0, judges=True)

    async def main() -> None:
        await hands.open()
        ready.set()
        while not done.is_set():
            said[0] = await hands(seen, proposed)
            if isinstance(said[0], Verdict):
                said.append(said[0].success)
            await asyncio.sleep(0.005)
        await hands.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(60)
        yield hands.address, said
    finally:
        done.set()
        thread.join()


def key(browser: Browser, kind: str, name: str) -> None:
    browser.do("dispatchEvent(new KeyboardEvent(arguments[0], {key: arguments[1]}))", kind, name)


def test_keys_and_buttons_of_the_page_are_actions_while_they_are_down(browser: Browser) -> None:
    who = "return document.getElementById('who').textContent === arguments[0]"
    with asked_again_and_again(numbers(2), PROPOSED) as (address, said):
        browser.open(address)
        browser.until(who, "the policy acts")
        assert said == [None]
        key(browser, "keydown", "ArrowRight")
        key(browser, "keydown", "ArrowDown")
        until(lambda: np.array_equal(said[0], [0.5, -0.5]), "both keys")
        browser.until(who, "you act")
        key(browser, "keyup", "ArrowDown")
        key(browser, "keyup", "ArrowRight")
        until(lambda: said[0] is None, "no key")
        browser.do(
            "document.querySelector('[data-key=\" \"]').dispatchEvent(new Event('pointerdown'))"
        )
        until(lambda: np.array_equal(said[0], [0.0, 0.0]), "the button")
        browser.do("dispatchEvent(new Event('blur'))")
        until(lambda: said[0] is None, "nothing, in another window")
        assert "0.100 0.200" in browser.text("#proposed")
        assert len(said) == 1
        key(browser, "keydown", "Enter")
        until(lambda: said[1:] == [True], "a success")
        browser.do("document.querySelector('[data-verdict=false]').click()")
        until(lambda: said[1:] == [True, False], "a failure")
    with asked_again_and_again(choices(3), np.int64(0)) as (address, said):
        browser.open(address)
        browser.until(who, "the policy acts")
        key(browser, "keydown", "2")
        until(lambda: np.array_equal(said[0], 2), "a choice")


def test_hands_are_held_while_images_do_not_come(browser: Browser) -> None:
    parts = ObservationPart(name="camera", kind="image", shape=PIXELS.shape)
    seen = ObservationSpec((parts,)).empty(1)
    seen["camera"] = PIXELS
    slow = """
        const quick = window.fetch;
        window.words = 0;
        window.fetch = (address, how) => {
          if (String(address).startsWith("/api/image")) return new Promise(() => {});
          if (how?.method === "POST") window.words += 1;
          return quick(address, how);
        };
    """
    with asked_again_and_again(numbers(2), PROPOSED, seen[0]) as (address, said):
        browser.open(address)
        browser.until("return document.getElementById('image-camera') !== null")
        browser.do(slow)
        key(browser, "keydown", "ArrowRight")
        browser.until("return window.words > 8")  # one is of the key, the others of time
        until(lambda: np.array_equal(said[0], [0.5, 0.0]), "the key")
