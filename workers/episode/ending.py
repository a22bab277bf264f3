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
from typing import Literal, NamedTuple

import msgspec

from rlinf_async.episodes import Episode, LimitReached
from rlinf_async.episodes.conversation import joined
from rlinf_async.episodes.episode import RunEpisode
from rlinf_async.messages.language import Failed, Outcome, Rejected, Request, Sample
from rlinf_async.rewards.judging import Reject, cut_text, described, outcome_of
from rlinf_async.workers.episode.clock import AgentClock


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

    Args:
        name: name of the coroutine, for errors.
        agent: the coroutine function.
        episode: the episode.
        clock: limit on its time.
        on_timeout: what it comes to when that has run out.

    Raises:
        CancelledError: the task was cancelled by somebody else.
    """
    try:
        async with clock.running():
            verdict = await agent(episode)
    except Reject as reason:
        return Ending(Rejected(reason=cut_text(str(reason)) or "no reason was given"))
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return Ending(_failed(name, error))
    except (Exception, SystemExit) as error:
        if clock.expired and isinstance(error, TimeoutError):
            return _timed_out(name, clock, on_timeout)
        if (reached := _limit(error) or episode.reached) is not None:
            return Ending(None, reached.limit)
        return Ending(_failed(name, error))
    return Ending(None if verdict is None else outcome_of(name, verdict, "episode"))


def finished(name: str, task: Request, episode: Episode, ending: Ending, rank: int) -> Sample:
    """Return an episode that has ended as a sample.

    Args:
        name: name of its coroutine, for errors.
        task: its task.
        episode: the episode.
        ending: how it ended.
        rank: the rollout worker that drew its last answer.
    """
    found, outcome = episode.transcript(), ending.outcome
    if found is None and (outcome is None or not isinstance(outcome, Failed | Rejected)):
        limit = f": max_{ending.cut} is reached before" if ending.cut else ""
        outcome = Failed(error=f"episode {name!r} ended without an answer of the model{limit}")
    replace = msgspec.structs.replace
    prompt = task.prompt.token_ids if found is None else found.prompt
    return Sample(
        request=replace(
            task, replay=False, prompt=replace(task.prompt, token_ids=prompt, messages=())
        ),
        generated=joined([]) if found is None else found.response,
        text="" if episode.last is None else episode.last.text,
        rollout_rank=rank,
        outcome=outcome,
        branches=() if found is None else found.branches,
        turns=() if found is None else found.turns,
        episode=episode.record(ending.cut),
    )


def _timed_out(name: str, clock: AgentClock, on_timeout: Literal["fail", "score"]) -> Ending:
    if on_timeout == "score":
        return Ending(None, "seconds")
    text = (
        f"episode {name!r} took longer than seconds = {clock.seconds:g}, the time of the model not "
        "counted"
    )
    return Ending(Failed(error=text), "seconds")


def _failed(name: str, error: BaseException) -> Failed:
    return Failed(error=f"episode {name!r} raised {described(error)}")


def _limit(error: BaseException) -> LimitReached | None:
    """Return the limit that ended an episode, also one in which several tasks ran into it."""
    if isinstance(error, LimitReached):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [_limit(one) for one in error.exceptions]
    return None if None in found else found[0]
