"""Verifiers: functions that score responses, by name, and the processes that they run in.

::

    judging.py       `Answer`, the table of names; one answer -> one typed outcome
    matching.py  mathematics.py  reasoning.py      the built-in ones
    repeating.py     answers that are judged again, or are known
    pool.py          many answers at a time, in processes with a time and a memory limit
    scorer.py        one such process, as its owner sees it
    process.py       its main program

A verifier of your own is a function of one `Answer`, sync or async, named by its import path::

    # my_rewards.py                                   # verifier = "my_rewards.py:brevity"
    from rlinf_async.rewards import Answer, Reject

    def brevity(answer: Answer) -> float:
        if not answer.text:
            raise Reject("nothing was answered")
        return 1.0 / len(answer.text)

A `group_verifier` is a function of all answers to a prompt, and returns a verdict for each.
"""

from rlinf_async.messages.language import Scored
from rlinf_async.rewards.judging import (
    Answer,
    Reject,
    Retry,
    UnknownVerifier,
    Verifier,
    group_verifier,
    load_verifier,
    register_verifier,
)
from rlinf_async.rewards.pool import ScoringPool

__all__ = [
    "Answer",
    "Reject",
    "Retry",
    "Scored",
    "ScoringPool",
    "UnknownVerifier",
    "Verifier",
    "group_verifier",
    "load_verifier",
    "register_verifier",
]
