"""Many questions, one forward pass.

Rows of a sampled batch, in this order; ``E`` and ``K`` differ from question to question::

    observation [E, D] of each question      -> action, log_prob, value
    final_observation [K, D] of each          -> value alone

A recurrent policy gets the memory of each row with it, and answers with that after it.

Deterministic questions (evaluation) get a pass of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np

from rlinf_async.backends.base import (
    PolicyAnswer,
    PolicyBackend,
    PolicyOutputError,
    RecurrentPolicyBackend,
)
from rlinf_async.messages.embodied import Actions, Floats, Observations
from rlinf_async.messages.spaces import Seen, all_finite

Answered = list[tuple[Observations, Actions]]
"""Each question with its answer."""


def answer_all(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    """Answer every question under the weights that are loaded now.

    Raises:
        PolicyOutputError: the policy returned NaN or infinity.
        ValueError: observations of the questions have different sizes.
    """
    sampled = [question for question in questions if not question.deterministic]
    likely = [question for question in questions if question.deterministic]
    answered = _sampled(policy, sampled) if sampled else []
    return answered + _most_likely(policy, likely) if likely else answered


def _sampled(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    finals = [q.final_observation for q in questions if q.final_observation is not None]
    rows = _rows([*(question.observation for question in questions), *finals])
    version = policy.version
    if all(question.value_only for question in questions):
        nothing = np.empty(0, np.float32)
        answer = PolicyAnswer(nothing, nothing, _value(policy, rows, questions))
    elif _recurrent(policy):
        answer = policy.act_from(rows, _memory(policy, questions))
    else:
        answer = policy.act(rows)
    _check(version, action=answer.action, log_prob=answer.log_prob, value=answer.value)
    return list(_shares(questions, answer, version))


def _shares(
    questions: Sequence[Observations], answer: PolicyAnswer, version: int
) -> Iterator[tuple[Observations, Actions]]:
    start = 0
    final = sum(len(question.observation) for question in questions)
    for question in questions:
        end = start + len(question.observation)
        final_value = None
        if question.final_observation is not None:
            final_end = final + len(question.final_observation)
            final_value = answer.value[final:final_end]
            final = final_end
        yield (
            question,
            Actions(
                incarnation=question.incarnation,
                sequence=question.sequence,
                action=None if question.value_only else answer.action[start:end],
                log_prob=None if question.value_only else answer.log_prob[start:end],
                value=answer.value[start:end],
                final_value=final_value,
                version=version,
                memory=None if answer.memory is None else answer.memory[start:end],
            ),
        )
        start = end


def _recurrent(policy: PolicyBackend) -> TypeGuard[RecurrentPolicyBackend]:
    # `isinstance` looks at every member of the protocol, and takes as long as a small layer.
    return hasattr(policy, "act_from")


def _memory(policy: RecurrentPolicyBackend, questions: Sequence[Observations]) -> Floats:
    """What the policy remembers of each row, ``[N, H]``."""
    parts = [
        *((question.memory, question.observation) for question in questions),
        *(
            (question.final_memory, question.final_observation)
            for question in questions
            if question.final_observation is not None and not question.deterministic
        ),
    ]
    each = [
        np.zeros((len(seen), policy.memory_size), np.float32) if memory is None else memory
        for memory, seen in parts
    ]
    return each[0] if len(each) == 1 else np.concatenate(each)


def _value(policy: PolicyBackend, rows: Seen, questions: Sequence[Observations]) -> Floats:
    if _recurrent(policy):
        return policy.value_from(rows, _memory(policy, questions))
    return policy.value(rows)


def _most_likely(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    rows = _rows([question.observation for question in questions])
    version, value, after = policy.version, _value(policy, rows, questions), None
    if _recurrent(policy):
        action, after = policy.mode_from(rows, _memory(policy, questions))
    else:
        action = policy.mode(rows)
    _check(version, action=action, value=value)
    answered: Answered = []
    start = 0
    for question in questions:
        end = start + len(question.observation)
        answer = Actions(
            incarnation=question.incarnation,
            sequence=question.sequence,
            action=action[start:end],
            log_prob=None,
            value=value[start:end],
            final_value=None,
            version=version,
            memory=None if after is None else after[start:end],
        )
        answered.append((question, answer))
        start = end
    return answered


def _rows(parts: Sequence[Seen]) -> Seen:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check(version: int, **outputs: np.ndarray[tuple[int, ...], np.dtype[np.number]]) -> None:
    """Refuse NaN and infinity, whatever the backend let through."""
    for name, output in outputs.items():
        if not all_finite(output):
            bad = int((~np.isfinite(output)).sum())
            raise PolicyOutputError(
                f"the policy, weights version {version}, returned {name!r} with {bad} of "
                f"{output.size} values NaN or infinite; look at the observations first, then at "
                "the learning rate"
            )
