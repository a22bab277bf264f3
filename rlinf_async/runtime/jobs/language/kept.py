"""The samples of a language run as they are kept in its folder: see `rlinf_async.observe.samples`.

Made in the thread that writes them: what is here costs the run nothing but that thread's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from rlinf_async.data import Tokenizer, load_tokenizer
from rlinf_async.messages.language import (
    EpisodeRecord,
    Failed,
    Outcome,
    Rejected,
    Sample,
    Scored,
    ScoredSample,
)
from rlinf_async.observe.samples import KeptSample, SampleWriter, Vocabulary

DIGITS = 5
"""decimal places of log-probs and values"""

Decode = Callable[[Sequence[int]], str]


class KeptTurn(msgspec.Struct, kw_only=True):
    """A part of an episode's response: an answer of the model, or what it was given before one."""

    role: Literal["assistant", "given"]
    text: str
    """text of its tokens, special ones included"""
    start: int
    """position of its first token in the response"""
    stop: int
    """position after its last token"""
    branch: int
    """number of the sequence it stands in; 0: the first one"""
    reward: float | None = None
    """reward of this turn alone, where it was given one"""


class KeptBranch(msgspec.Struct, kw_only=True):
    """A sequence of an episode after the first one."""

    prompt: str
    prompt_tokens: list[int]
    start: int
    """position of its first token in the response"""


class KeptEpisode(msgspec.Struct, kw_only=True):
    """What happened in an episode beside its tokens."""

    turns: list[KeptTurn]
    branches: list[KeptBranch]
    tool_calls: dict[str, int]
    """number of calls, by name of the tool"""
    tool_failures: dict[str, int]
    """number of calls that failed, by ``tool/kind of failure``"""
    cut: str
    """limit that ended it; empty: it ended by itself"""
    metrics: dict[str, float]
    """numbers of the user's own"""


class KeptLanguageSample(KeptSample, kw_only=True):
    """A sample of a language run. Lists are ``[R]``, of the tokens of the response; log-probs are
    rounded to `DIGITS` places."""

    prompt: str
    completion: str
    """text of the response, special tokens left out; of an episode its last answer"""
    finish: str
    """``stop``, ``length`` or ``abort``"""
    detail: str
    """reason of a rejection, error of a failure, or that its group was refused; else empty"""
    reward_parts: dict[str, float]
    verifier: str
    reference: str
    prompt_tokens: list[int]
    """``[P]``"""
    tokens: list[int]
    log_probs: list[float]
    """as sampled; 0 of tokens that were given"""
    versions: list[int]
    """of the weights that drew each; -1 of tokens that were given"""
    mask: list[int]
    """1: it counts in the loss"""
    prev_log_probs: list[float] | UnsetType = UNSET
    """recomputed by inference workers, where there are any"""
    ref_log_probs: list[float] | UnsetType = UNSET
    teacher_log_probs: list[float] | UnsetType = UNSET
    values: list[float] | UnsetType = UNSET
    episode: KeptEpisode | UnsetType = UNSET
    evaluation_set: str | UnsetType = UNSET
    """name of the evaluation set that its prompt belongs to; none of held-out prompts"""
    rollout_rank: int
    scoring_seconds: float


class SampleKeeper:
    """Gives the samples of a run to its writer.

    Args:
        writer: writes them.
        run: the run's folder.
        model: folder of the model, with its tokenizer.
    """

    def __init__(self, writer: SampleWriter, run: Path, model: Path) -> None:
        self._writer = writer
        self._model = model
        self._tokenizer: Tokenizer | None = None
        self._vocabulary = Vocabulary(run, self._decode)

    def keep(
        self,
        samples: Sequence[ScoredSample],
        *,
        step: int,
        iteration: int,
        evaluation: bool = False,
        refused: Sequence[ScoredSample] = (),
    ) -> None:
        """Keep samples that were trained on, or answers of an evaluation; waits for nothing.

        Args:
            samples: in the order in which they are kept.
            step: step of their row of the metrics.
            iteration: iteration that trained them, or version that was evaluated.
            evaluation: whether they are answers of an evaluation.
            refused: samples of groups that others were trained instead of; kept behind the others.
        """
        kind: Literal["training", "evaluation"] = "evaluation" if evaluation else "training"
        make = partial(self._records, samples, refused, step, iteration, kind)
        self._writer.put(make, len(samples) + len(refused))

    def _records(
        self,
        samples: Sequence[ScoredSample],
        refused: Sequence[ScoredSample],
        step: int,
        iteration: int,
        kind: Literal["training", "evaluation"],
    ) -> Iterator[KeptLanguageSample]:
        every = (*samples, *refused)
        if every:
            self._vocabulary.note(*(part for one in every for part in _tokens(one.sample)))
        for number, one in enumerate(every):
            kept = _kept(one, step, iteration, kind, self._decode)
            yield kept if number < len(samples) else _refused(kept)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:  # its own: tokenizers must not be used by two threads at a time
            self._tokenizer = load_tokenizer(self._model)
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text


def _tokens(sample: Sample) -> Iterator[NDArray[np.integer[Any]]]:
    yield sample.request.prompt.token_ids
    yield sample.generated.token_ids
    yield from (branch.prompt_ids for branch in sample.branches)


def _kept(
    scored: ScoredSample,
    step: int,
    iteration: int,
    kind: Literal["training", "evaluation"],
    decode: Decode,
) -> KeptLanguageSample:
    sample, outcome = scored.sample, scored.outcome
    request, generated = sample.request, sample.generated
    trains = isinstance(outcome, Scored) and kind == "training"
    mask, teacher = generated.drawn_mask & trains, sample.teacher
    return KeptLanguageSample(
        name=request.sample_name,
        kind=kind,
        step=step,
        iteration=iteration,
        trained=trains,
        outcome=_OUTCOMES[type(outcome)],
        reward=outcome.reward if isinstance(outcome, Scored) else None,
        size=len(generated.token_ids),
        prompt=request.prompt.text,
        completion=sample.text,
        finish=generated.finish,
        detail=_detail(outcome),
        reward_parts=outcome.parts if isinstance(outcome, Scored) else {},
        verifier=scored.verifier or request.prompt.verifier,
        reference=request.prompt.reference,
        prompt_tokens=request.prompt.token_ids.tolist(),
        tokens=generated.token_ids.tolist(),
        log_probs=_rounded(generated.log_prob),
        versions=generated.version.tolist(),
        mask=mask.astype(np.int8).tolist(),
        prev_log_probs=_rounded_or_unset(sample.prev_log_prob),
        ref_log_probs=_rounded_or_unset(sample.ref_log_prob),
        teacher_log_probs=_rounded_or_unset(None if teacher is None else teacher.drawn),
        values=_rounded_or_unset(sample.value),
        episode=UNSET if sample.episode is None else _episode(sample, sample.episode, decode),
        evaluation_set=request.evaluation_set or UNSET,
        rollout_rank=sample.rollout_rank,
        scoring_seconds=round(scored.seconds, DIGITS),
    )


def _refused(kept: KeptLanguageSample) -> KeptLanguageSample:
    """A sample of a group that was replaced: nothing of it was trained."""
    detail = kept.detail or "its group was refused by training.accept, and replaced"
    return msgspec.structs.replace(kept, trained=False, mask=[0] * kept.size, detail=detail)


_OUTCOMES: dict[type[Outcome], Literal["scored", "rejected", "failed"]] = {
    Scored: "scored",
    Rejected: "rejected",
    Failed: "failed",
}


def _detail(outcome: Outcome) -> str:
    match outcome:
        case Rejected():
            return outcome.reason
        case Failed():
            return outcome.error
        case Scored():
            return ""


def _rounded(values: NDArray[np.floating[Any]]) -> list[float]:
    """The numbers as short decimals; null in JSON where one is none."""
    rounded: list[float] = np.round(values.astype(np.float64), DIGITS).tolist()
    return rounded


def _rounded_or_unset(values: NDArray[np.floating[Any]] | None) -> list[float] | UnsetType:
    return UNSET if values is None else _rounded(values)


def _episode(sample: Sample, record: EpisodeRecord, decode: Decode) -> KeptEpisode:
    return KeptEpisode(
        turns=_turns(sample, decode),
        branches=[
            KeptBranch(
                prompt=decode(one.prompt_ids.tolist()),
                prompt_tokens=one.prompt_ids.tolist(),
                start=one.start,
            )
            for one in sample.branches
        ],
        tool_calls=record.tool_calls,
        tool_failures=record.tool_failures,
        cut=record.cut,
        metrics=record.metrics,
    )


def _turns(sample: Sample, decode: Decode) -> list[KeptTurn]:
    """The answers of an episode, and what was given between them, in the order of its tokens."""
    ids = sample.generated.token_ids
    starts = [0, *(one.start for one in sample.branches)]

    def turn(
        role: Literal["assistant", "given"], start: int, stop: int, reward: float | None = None
    ) -> KeptTurn:
        branch = int(np.searchsorted(starts, start, side="right")) - 1
        return KeptTurn(
            role=role,
            text=decode(ids[start:stop].tolist()),
            start=start,
            stop=stop,
            branch=branch,
            reward=reward,
        )

    found: list[KeptTurn] = []
    at = 0
    for span in sample.turns:
        if span.start > at:
            found.append(turn("given", at, span.start))
        found.append(turn("assistant", span.start, span.stop, span.reward))
        at = span.stop
    if at < len(ids):
        found.append(turn("given", at, len(ids)))
    return found
