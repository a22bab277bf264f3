"""`Responses`: those that are finished, and how long others are expected to be.

Within an iteration the short ones are finished first. So the lengths by which others are expected
are those of whole iterations: of the newest so many responses, once there are more of them in an
iteration, all would be long ones at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlinf_async.scheduling.predictor import Predictor
from rlinf_async.workers.scheduler.messages import EndedCount, RequestCount

UNKNOWN_TOKENS = 256.0
"""mean length of a response before one is finished"""
KNOWN_LENGTHS = 8192
"""lengths that are remembered at least, where there were so many: as many whole iterations"""


class Finished:
    """The responses of one iteration that are finished."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        """tokens of each, by the name of its request"""
        self.tokens = 0
        """of all"""
        self.groups: dict[int, list[int]] = {}
        """tokens of each, by group"""
        self.whole = 0
        """groups of which all are finished"""

    def add(self, one: EndedCount, group_size: int) -> None:
        """Take a response; one that is finished twice counts once."""
        if one.name in self.lengths:
            return
        self.lengths[one.name] = one.tokens
        self.tokens += one.tokens
        group = self.groups.setdefault(one.group, [])
        group.append(one.tokens)
        self.whole += len(group) == group_size


class Responses:
    """See the module.

    Args:
        samples: of an iteration.
        group: samples of a prompt.
        lengths: of responses of an earlier run, in tokens.
    """

    def __init__(self, samples: int, group: int, lengths: Sequence[float] = ()) -> None:
        self._samples = samples
        self._group = group
        self._past: list[Sequence[float]] = [lengths] if len(lengths) else []
        """lengths by which others are expected, by iteration"""
        self._predictor = Predictor(lengths) if len(lengths) else None
        self._finished: dict[int, Finished] = {}
        """by iteration: the present one, and those ahead of it"""
        self.longest = float(max(lengths, default=0.0))
        """tokens of the longest that was seen; 0: none was"""

    def note(self, ended: Iterable[EndedCount]) -> None:
        """Take responses that are finished; an evaluation's tell nothing of an iteration."""
        for one in ended:
            self.longest = max(self.longest, float(one.tokens))
            if one.iteration >= 0:
                self._finished.setdefault(one.iteration, Finished()).add(one, self._group)

    def begin(self, iteration: int) -> None:
        """An iteration begins: lengths are expected by those of the iterations before.

        One of which less than half was seen, since nobody listened, has told of its long ones only:
        it counts where nothing better is known.
        """
        past = self._past
        for older in sorted(one for one in self._finished if one < iteration):
            lengths = list(self._finished.pop(older).lengths.values())
            if not past or 2 * len(lengths) >= self._samples:
                past.append(lengths)
        while sum(len(one) for one in past[1:]) >= KNOWN_LENGTHS:
            del past[0]
        if past:
            self._predictor = Predictor([tokens for one in past for tokens in one])

    def finished(self, iteration: int) -> int:
        """Return the samples of an iteration that are generated, as far as is known."""
        here = self._finished.get(iteration)
        return 0 if here is None else len(here.lengths)

    def in_whole_groups(self, iteration: int) -> int:
        """Return those of them whose groups are finished."""
        here = self._finished.get(iteration)
        return 0 if here is None else here.whole * self._group

    @property
    def mean(self) -> float:
        """Mean tokens of a response: of the iterations before, or, while there is none, of those
        that are finished; 0: there is none."""
        if self._predictor is not None:
            return self._predictor.mean
        count = sum(len(one.lengths) for one in self._finished.values())
        return sum(one.tokens for one in self._finished.values()) / count if count else 0.0

    def expected(self, request: RequestCount) -> float:
        """Guess the tokens that are still to come.

        Of a request that has none yet and others of its group are finished: their mean, for prompts
        differ. Else by the lengths of earlier iterations, of those that are longer than it. While
        there are none, the rest of the mean; of a request that is longer already, half as many
        again as it has: lengths have a long tail.
        """
        known = (one.groups.get(request.group) for one in self._finished.values())
        group = next((one for one in known if one), None)
        if self._predictor is not None and not (group and not request.made):
            return min(float(request.most), self._predictor.left(request.made))
        mean = sum(group) / len(group) if group else self.mean or UNKNOWN_TOKENS
        return min(float(request.most), max(mean - request.made, request.made / 2, 1.0))
