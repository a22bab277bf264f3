"""Verifiers: functions that score responses, by name, and the processes that they run in.

::

    answer.py       the argument of a verifier, and `Reject`
    registry.py     the table of names            matching.py  mathematics.py  reasoning.py
    judging.py      one answer -> one typed outcome, whatever the verifier does
    pool.py         many answers at a time, each in a process with a time and a memory limit
    process.py      main of such a process        process_messages.py  what it and its owner say

A verifier of your own is a function of one `Answer`, sync or async, named by its import path::

    # my_rewards.py                                   # verifier = "my_rewards.py:brevity"
    from rlinf_async.rewards import Answer, Reject

    def brevity(answer: Answer) -> float:
        if not answer.text:
            raise Reject("nothing was answered")
        return 1.0 / len(answer.text)
"""

from rlinf_async.messages.language import Scored
from rlinf_async.rewards.answer import Answer, Reject, Verifier
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.rewards.registry import (
    VERIFIERS,
    UnknownVerifier,
    load_verifier,
    register_verifier,
)

__all__ = [
    "VERIFIERS",
    "Answer",
    "Reject",
    "Scored",
    "ScoringPool",
    "UnknownVerifier",
    "Verifier",
    "load_verifier",
    "register_verifier",
]
