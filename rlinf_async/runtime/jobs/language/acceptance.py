"""Dynamic sampling: groups that teach nothing are replaced by other prompts (DAPO, Yu et al. 2025).

::

    Collector --a whole group--> accepted?  yes: to the actors
                                            no: forgotten; another prompt is admitted in its place

A replacement is admitted when a group is refused, for the same iteration and the same place in it;
nothing is admitted in advance, so nothing is thrown away because it was slow, and the lengths of
accepted groups are those of groups that would be accepted, whenever they finish.

A rule sees the whole group, and of each sample the outcome of its verifier, as it was given. A name
with a colon in it is the import path of a user's function::

    # mine.py                                      # [training] accept = "mine.py:not_too_easy"
    def not_too_easy(group: Sequence[ScoredSample]) -> bool: ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from rlinf_async.config import UsageError
from rlinf_async.config.registry import Registry, raised
from rlinf_async.messages.language import Scored, ScoredSample


class AcceptanceRule(Protocol):
    """The signature of a rule: whether a group is to be trained."""

    def __call__(self, group: Sequence[ScoredSample], /) -> bool: ...


acceptance_rules: Registry[AcceptanceRule] = Registry(
    "rule that accepts groups", group="rlinf_async.acceptance", called_with=("group",)
)
register_acceptance = acceptance_rules.register


@register_acceptance("varied")
def varied(group: Sequence[ScoredSample]) -> bool:
    """Accept a group whose scored samples do not all have the same reward."""
    return len({one.outcome.reward for one in group if isinstance(one.outcome, Scored)}) > 1


class Acceptance:
    """Decides on each whole group of a run.

    Args:
        name: name of the rule.
        part: part of the reward (`Scored.parts`) that the rule is to see as the reward; empty: the
            reward itself.
        most: most groups of an iteration that are replaced; those beyond are trained as they are.
    """

    def __init__(self, name: str, part: str, most: int) -> None:
        self._name = name
        self._rule = acceptance_rules.named(name)
        self._part = part
        self.most = most
        self._warned = False

    def warn(self, iteration: int) -> None:
        """Say once in a run that refused groups are trained all the same."""
        if not self._warned:
            self._warned = True
            print(
                f"iteration {iteration}: {self.most} groups were refused by training.accept = "
                f"{self._name!r} and replaced, the most that training.max_extra allows; others are "
                "trained as they are. Are the prompts too easy, or too hard? (said once; see the "
                "column groups_refused)",
                file=sys.stderr,
            )

    def __call__(self, group: Sequence[ScoredSample], /) -> bool:
        """Whether to train the group.

        Raises:
            UsageError: the rule raised, or does not answer with True or False; a verifier did not
                name the part.
        """
        seen = [self._raw(one) for one in group] if self._part else group
        try:
            answer = self._rule(seen)
        except Exception as error:
            raise UsageError(f"training.accept: {self._name!r} raised {raised(error)}") from error
        if not isinstance(answer, bool):
            raise UsageError(
                f"training.accept: {self._name!r} returned {answer!r:.80}; it must return True or "
                "False"
            )
        return answer

    def _raw(self, scored: ScoredSample) -> ScoredSample:
        outcome = scored.outcome
        if not isinstance(outcome, Scored):
            return scored
        if self._part not in outcome.parts:
            named = ", ".join(map(repr, outcome.parts)) or "none"
            raise UsageError(
                f"training.accept_part is {self._part!r}, but the verifier "
                f"{(scored.verifier or scored.sample.request.prompt.verifier)!r} scored sample "
                f"{scored.sample.request.name} without it (parts: {named}): return "
                f"Scored(reward=..., parts={{{self._part!r}: ...}}) in every case"
            )
        raw = Scored(reward=outcome.parts[self._part], parts=outcome.parts)
        return ScoredSample(sample=scored.sample, outcome=raw)
