"""How an episode ended: what its coroutine returned or raised, as an outcome.

::

    returns a finite number, or `Scored`    -> Scored
    returns None                            -> the verifier of the data judges the last answer
    raises `LimitReached`                   -> as it stands, by the verifier; counted as cut
    takes too long                          -> Failed, or as it stands; counted as cut
    raises `Reject`                         -> Rejected
    anything else                           -> Failed, with what was wrong; never a silent 0
    ends before the model has drawn a token -> Failed
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from rlinf_async.episodes import Episode, LimitReached
from rlinf_async.episodes.conversation import joined
from rlinf_async.episodes.environments import EnvironmentFailed
from rlinf_async.episodes.episode import RunEpisode
from rlinf_async.messages.language import (
    EpisodeRecord,
    Failed,
    Outcome,
    Rejected,
    Request,
    Sample,
    Tokens,
)
from rlinf_async.rewards.judging import Reject, cut_text, described, outcome_of
from rlinf_async.workers.episode.clock import AgentClock

E = TypeVar("E", bound=BaseException)

GRACE: Final = 5.0
"""seconds that a coroutine has to end once it is cancelled"""


class Ending(NamedTuple):
    """The end of an episode."""

    outcome: Outcome | None
    """None: the verifier judges it"""
    cut: str = ""
    """limit that ended it: ``turns``, ``tokens``, ``seconds``"""


async def run_to_end(
    name: str,
    agent: RunEpisode,
    episode: Episode,
    clock: AgentClock,
    on_timeout: Literal["fail", "score"],
) -> Ending:
    """Run the coroutine of an episode, whatever becomes of it.

    Once its time is over, and where this is cancelled, it is cancelled, and left alone if it has
    not ended `GRACE` later: `Episode.watch` is told of it as long as it goes on.

    Args:
        name: name of the coroutine, for errors.
        agent: the coroutine function.
        episode: the episode.
        clock: limit on its time.
        on_timeout: what it comes to when that has run out.

    Raises:
        CancelledError: this was cancelled.
    """
    # A task of its own: whatever it does with a cancellation is not done to this one.
    running = asyncio.create_task(_ending(name, agent, episode), name=f"agent {name}")
    try:
        if await clock.wait(running):
            if running.cancelled():
                return Ending(Failed(error=f"episode {name!r} has cancelled its own task"))
            return running.result()
    finally:
        if not running.done():
            episode.close()
            stopping = ExitStack()
            stopping.enter_context(episode.watch("its agent, which was cancelled, to end"))
            running.add_done_callback(lambda _: stopping.close())
            running.cancel()
            await asyncio.wait({running}, timeout=GRACE)
    return _timed_out(name, clock, on_timeout, goes_on=not running.done())


async def _ending(name: str, agent: RunEpisode, episode: Episode) -> Ending:
    """Run the coroutine; raises nothing."""
    try:
        verdict = await agent(episode)
        cut = "" if episode.short is None else episode.short.limit
        return Ending(None if verdict is None else outcome_of(name, verdict, "episode"), cut)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    # Also one that exits, and a panic of a library in Rust: they would end the worker, and with it
    # all its episodes. Of one that was cancelled from outside nobody asks.
    except BaseException as error:
        if (reason := _common(error, Reject)) is not None:
            return Ending(Rejected(reason=cut_text(str(reason)) or "no reason was given"))
        reached = _common(error, LimitReached) or episode.reached
        # What an environment has not scored the verifier of the data cannot score, either.
        if reached is not None and not isinstance(error, EnvironmentFailed):
            return Ending(None, reached.limit)
        return Ending(_failed(name, error))


def finished(name: str, task: Request, episode: Episode, ending: Ending, rank: int) -> Sample:
    """Return an episode that has ended as a sample.

    Args:
        name: name of its coroutine, for errors.
        task: its task.
        episode: the episode.
        ending: how it ended.
        rank: the rollout worker that drew its last answer.
    """
    try:
        found, record = episode.transcript(), episode.record(ending.cut)
    except Exception as error:  # what the agent has left in the episode may be anything
        return unsendable(name, task, error, ending)
    outcome = ending.outcome
    if found is None and (outcome is None or not isinstance(outcome, Failed | Rejected)):
        limit = f": max_{ending.cut} is reached before" if ending.cut else ""
        outcome = Failed(error=f"episode {name!r} ended without an answer of the model{limit}")
    prompt = task.prompt.token_ids if found is None else found.prompt
    return Sample(
        request=_asked(task, prompt),
        generated=joined([]) if found is None else found.response,
        text="" if episode.last is None else episode.last.text,
        rollout_rank=rank,
        outcome=outcome,
        branches=() if found is None else found.branches,
        turns=() if found is None else found.turns,
        episode=record,
    )


def unsendable(name: str, task: Request, error: Exception, ending: Ending) -> Sample:
    """Return the sample of an episode in which is what cannot be sent on: it has failed."""
    outcome = ending.outcome
    if not isinstance(outcome, Failed):
        outcome = Failed(error=cut_text(f"episode {name!r} cannot be sent on: {error}"))
    return Sample(
        request=_asked(task, task.prompt.token_ids),
        generated=joined([]),
        text="",
        rollout_rank=-1,
        outcome=outcome,
        episode=EpisodeRecord(turns=0, cut=ending.cut),
    )


def _asked(task: Request, prompt: Tokens) -> Request:
    replace = msgspec.structs.replace
    return replace(task, replay=False, prompt=replace(task.prompt, token_ids=prompt, messages=()))


def _timed_out(
    name: str, clock: AgentClock, on_timeout: Literal["fail", "score"], *, goes_on: bool
) -> Ending:
    if on_timeout == "score":
        return Ending(None, "seconds")
    text = (
        f"episode {name!r} took longer than seconds = {clock.seconds:g}, the time of the model not "
        "counted"
    )
    if goes_on:
        text += f"; {GRACE:g} s after it was cancelled it still runs: let CancelledError through"
    return Ending(Failed(error=text), "seconds")


def _failed(name: str, error: BaseException) -> Failed:
    return Failed(error=f"episode {name!r} raised {described(error)}")


def _common(error: BaseException, kind: type[E]) -> E | None:
    """Return the error of this kind that ended an episode, also where several of its tasks raised
    one, and nothing else."""
    if isinstance(error, kind):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [_common(one, kind) for one in error.exceptions]
    return None if None in found else found[0]
