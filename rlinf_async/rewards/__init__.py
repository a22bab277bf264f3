"""Verifiers: functions that score responses, by name, and the processes that they run in.

::

    judging.py       `Answer`, `Reject`, the table of names; one answer -> one typed outcome
    matching.py  mathematics.py  reasoning.py      the built-in ones
    pool.py          many answers at a time, each in a process with a time and a memory limit
    process.py       main of such a process

A verifier of your own is a function of one `Answer`, sync or async, named by its import path::

    # my_rewards.py                                   # verifier = "my_rewards.py:brevity"
    from rlinf_async.rewards import Answer, Reject

    def brevity(answer: Answer) -> float:
        if not answer.text:
            raise Reject("nothing was answered")
        return 1.0 / len(answer.text)
"""

from rlinf_async.messages.language import Scored
from rlinf_async.rewards.judging import (
    Answer,
    Reject,
    UnknownVerifier,
    Verifier,
    load_verifier,
    register_verifier,
)
from rlinf_async.rewards.pool import ScoringPool

__all__ = [
    "Answer",
    "Reject",
    "Scored",
    "ScoringPool",
    "UnknownVerifier",
    "Verifier",
    "load_verifier",
    "register_verifier",
]
