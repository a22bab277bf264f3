"""What a policy and a critic learn from the samples of a micro-batch.

::

    samples --prepare--> Forward: packed tokens --model--> statistics, or values --answer--> Part
                  \\---- nothing has a gradient: `NothingToDo`

    Part -> loss, undivided -> backward     (again and again)         sums added up: `Totals`
    ... the last one -> units of all ranks added up -> gradient / units -> clip -> optimizer

Invariant: gradient, loss and metrics are sums over samples divided once by sums over samples, so
they do not depend on micro-batches, on ranks, or on the order of arrival, but for rounding.

Samples are packed into one row of tokens without padding::

    sample 0   p p p | r r r        row   p p p r r  p p r r r r     the last token of a sample is
    sample 1   p p | r r r r r      pos   0 1 2 3 4  0 1 2 3 4 5     only ever a target
                                    rows      * * *    * * * * *     where responses are predicted

Positions begin at 0 in every sample, and attention does not cross samples (`packed_attention`):
results are those of the samples one by one. Each branch of an episode is a sequence like a sample's
only one. Tokens that the model was given between its turns are in the row, and never a target.

A token that was drawn under top-k, top-p or min-p has the log-prob of the distribution over the
tokens that were kept (`KeptTokens`), and logits have the biases with which it was drawn
(`LogitBias`). Both are constants: no gradient goes through which ones these are. So are the experts
that tokens go through, where samples have those of their engine (``routes``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig, share_of
from rlinf_async.algorithms.language.losses import (
    TokenLossInputs,
    token_loss,
    token_value_loss,
)
from rlinf_async.backends.base import TrainingDiverged
from rlinf_async.backends.language import EngineDisagrees
from rlinf_async.backends.language_training.config import LanguageTrainingConfig
from rlinf_async.backends.transformers.images import (
    ImageInputs,
    SeeingPrompt,
    image_inputs,
    prompt_positions,
    with_answer,
)
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Biases, Kept, TrainingSample

ENGINE_DIFFERENCE: Final = "engine_actor_difference"
"""mean absolute difference between the engine's log-probs and the actor's, over the tokens that the
engine has generated under the weights of the actor's forward pass"""
Number = TypeVar("Number", bound=np.generic)
ROUTING_CHANGED: Final = "routing_changed"
"""name of the metric: share of the layers with experts, in the mean over trained tokens, in which
the router would have chosen others than it was given"""
ENGINE_TOKENS: Final = "engine_actor_tokens"
"""name of the metric: number of tokens whose log-probs are compared with the engine's"""


class MicroBatchSums(NamedTuple):
    """Contribution of one micro-batch; scalars."""

    loss: Tensor
    """weighted sum over its tokens, with its gradient"""
    units: float
    """share of the denominator (`Share`)"""
    tokens: int
    """number of tokens that the metrics are sums over"""
    metrics: Mapping[str, Tensor]
    """sums over tokens"""
    averaged: Mapping[str, Tensor] = {}
    """weighted sums over tokens, as the loss is one"""


class NothingToDo(NamedTuple):
    """A micro-batch without any gradient that was not computed; it still counts."""

    units: float


class Totals:
    """Sums over the micro-batches of this rank, then of all."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.units = 0.0
        self.tokens = 0.0
        self.micro_batches = 0
        self._as_loss = {"loss"}
        """names of what is divided by units"""

    def add(self, part: MicroBatchSums | NothingToDo) -> None:
        self.micro_batches += 1
        self.units += part.units
        if isinstance(part, NothingToDo):
            return
        self.tokens += part.tokens
        self._as_loss |= part.averaged.keys()
        numbers = {"loss": part.loss.detach(), **part.metrics, **part.averaged}
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.double()

    def row(self, device: torch.device) -> Tensor:
        """Return what is to be added up over the ranks that train on other samples, float64. Their
        order of metrics is the same."""
        counts = torch.tensor([self.units, self.tokens], dtype=torch.float64, device=device)
        if not self.sums:
            return counts
        return torch.cat([counts, torch.stack([self.sums[name] for name in sorted(self.sums)])])

    def take(self, row: Tensor) -> None:
        """Take the sums of all ranks."""
        self.units, self.tokens = row[:2].tolist()
        self.sums = dict(zip(sorted(self.sums), row[2:], strict=True))

    def metrics(self) -> dict[str, float]:
        """Means: of the loss, and of what is averaged like it, over units, of the difference to the
        engine over the tokens that were compared, of the others over tokens."""
        over = {name: self.units if name in self._as_loss else self.tokens for name in self.sums}
        means = {name: float(one) / max(over[name], 1.0) for name, one in self.sums.items()}
        means.setdefault("loss", 0.0)
        if ENGINE_TOKENS in self.sums:
            compared = means[ENGINE_TOKENS] = float(self.sums[ENGINE_TOKENS])
            means[ENGINE_DIFFERENCE] = float(self.sums[ENGINE_DIFFERENCE]) / max(compared, 1.0)
            if not compared:
                del means[ENGINE_DIFFERENCE]
        return means | {"tokens": self.tokens, "micro_batches": float(self.micro_batches)}


def check_finite(metrics: Mapping[str, float], steps: int) -> None:
    """Raise `TrainingDiverged` for a loss that is not finite, after ``steps`` optimizer steps."""
    if math.isfinite(metrics["loss"]):
        return
    broken = [name for name, number in metrics.items() if not math.isfinite(number)]
    raise TrainingDiverged(
        f"the loss is {metrics['loss']} after {steps} optimizer steps (not finite: "
        f"{', '.join(broken)}); the weights are those of before. Look for NaN in rewards and "
        "log-probs, lower the learning rate, and go on from the last checkpoint"
    )


def check_engine(metrics: Mapping[str, float], tolerance: float | None, version: int) -> None:
    """Raise `EngineDisagrees` where the engine's log-probs of the tokens that it generated under
    this version differ from the actor's by more than the tolerance; None: by any number.

    The mean ratio alone would not do: under another policy of the same support it is 1, too.
    """
    difference = metrics.get(ENGINE_DIFFERENCE)
    if tolerance is None or difference is None or difference <= tolerance:
        return
    raise EngineDisagrees(
        f"version {version}: the engine's log-probs of the {metrics[ENGINE_TOKENS]:.0f} tokens "
        f"that it generated under these weights differ from the actor's by {difference:.2e} in the "
        f"mean (allowed {tolerance:.0e}), so another distribution would be trained than was "
        "sampled; the weights are those of before. The engine draws from other tokens than it "
        "tells, does not serve the weights that were published, or computes in another precision "
        "(then raise training.check_weights_tolerance)"
    )


class KeptTokens(NamedTuple):
    """Tokens from which each of ``N`` tokens was drawn."""

    bounds: Tensor
    """``[N + 1]``, int64: of each one's part of ``ids``; an empty part is the whole vocabulary"""
    ids: Tensor
    """kept token ids of all tokens, one after the other, int64"""

    def restrict(self, logits: Tensor, first: int = 0, start: int = 0) -> None:
        """Make logits ``[n, V]`` minus infinity outside of what was kept, in place.

        Args:
            logits: logits of ``n`` of the tokens, for a part of the vocabulary.
            first: number of the first of these tokens.
            start: first token of this part of the vocabulary.
        """
        bounds = self.bounds[first : first + len(logits) + 1]
        ids = self.ids[int(bounds[0]) : int(bounds[-1])] - start
        sizes = bounds.diff()
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(sizes)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        outside = (sizes > 0)[:, None].expand_as(logits).contiguous()
        outside[rows[inside], ids[inside]] = False
        logits.masked_fill_(outside, -torch.inf)


class BiasedTokens(NamedTuple):
    """Tokens one after the other that were drawn with the same ``K`` biases."""

    first: int
    """number of the first of them"""
    end: int
    """number behind the last of them"""
    ids: Tensor
    """``[K]``, int64: the tokens whose logits have a bias"""
    values: Tensor
    """``[K]``, float32"""


class LogitBias(NamedTuple):
    """What was added to logits, before the temperature, when ``N`` tokens were drawn."""

    parts: Sequence[BiasedTokens]
    inverse_temperature: Tensor
    """``[N]``, float32"""

    def add(self, logits: Tensor, first: int = 0, start: int = 0, *, sign: float = 1.0) -> None:
        """Add it to logits ``[n, V]`` that are divided by the temperature, in place.

        Args:
            logits: logits of ``n`` of the tokens, for a part of the vocabulary.
            first: number of the first of these tokens.
            start: first token of this part of the vocabulary.
            sign: -1 takes it away again.
        """
        for part in self.parts:
            begin, end = max(part.first - first, 0), min(part.end - first, len(logits))
            ids = part.ids - start
            inside = (ids >= 0) & (ids < logits.shape[-1])
            if begin < end:
                scale = sign * self.inverse_temperature[first + begin : first + end, None]
                logits[begin:end, ids[inside]] += scale * part.values[inside]


def pack_bias(
    samples: Sequence[TrainingSample], counts: Sequence[int], inverse_temperature: Tensor
) -> LogitBias | None:
    """Return the biases of so many tokens of each sample; None: there are none.

    Samples that are trained have those of their run; others may be beside them (evaluations).
    """
    device = inverse_temperature.device
    parts: list[BiasedTokens] = []
    before: Biases | None = None
    end = 0
    for sample, count in zip(samples, counts, strict=True):
        first, end = end, end + count
        if not any(bias for _, bias in sample.logit_bias):
            pass
        elif sample.logit_bias == before:
            parts[-1] = parts[-1]._replace(end=end)
        else:
            ids = torch.tensor([token for token, _ in sample.logit_bias], device=device)
            values = torch.tensor([bias for _, bias in sample.logit_bias], device=device)
            parts.append(BiasedTokens(first, end, ids, values.float()))
        before = sample.logit_bias
    return LogitBias(parts, inverse_temperature) if parts else None


def pack_kept(
    samples: Sequence[TrainingSample], chosen: Sequence[NDArray[np.int64]], device: torch.device
) -> KeptTokens | None:
    """Return what the chosen tokens of each sample ``[R]`` were drawn from; None: all of them from
    the whole vocabulary.

    Raises `ValueError`, naming sample and token, where one is not among those that were kept.
    """
    if all(sample.kept is None for sample in samples):
        return None
    sizes: list[NDArray[np.int64]] = []
    ids: list[NDArray[Any]] = []
    for sample, places in zip(samples, chosen, strict=True):
        if sample.kept is None:
            sizes.append(np.zeros(len(places), np.int64))
            continue
        kept = sample.kept
        _check_kept(sample, kept)
        counts = kept.counts.astype(np.int64)
        wanted = np.zeros(len(counts), np.bool_)
        wanted[places] = True
        sizes.append(counts[places])
        ids.append(kept.token_ids[np.repeat(wanted, counts)].astype(np.int64))
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    all_ids = np.concatenate([np.empty(0, np.int64), *ids])
    return KeptTokens(torch.from_numpy(bounds).to(device), torch.from_numpy(all_ids).to(device))


def _check_kept(sample: TrainingSample, kept: Kept) -> None:
    """Refuse a token that was not kept: its log-prob would be minus infinity."""
    name, tokens = f"sample {sample.group}/{sample.index}", sample.response_ids
    if len(kept.counts) != len(tokens):
        raise ValueError(
            f"{name} has {len(tokens)} response tokens, but says of {len(kept.counts)} what they "
            "were drawn from"
        )
    counts = kept.counts.astype(np.int64)
    drawn = kept.token_ids == np.repeat(tokens, counts)
    found = np.bincount(np.repeat(np.arange(len(tokens)), counts)[drawn], minlength=len(tokens))
    for at in np.flatnonzero((found != 1) & (counts > 0))[:1]:
        raise ValueError(
            f"{name}: token {at} ({tokens[at]}) is {found[at]} times among the {counts[at]} that "
            "it was drawn from: the engine told another set than it drew from"
        )


class AskedTokens(NamedTuple):
    """Tokens whose log-probs a model tells beside those of each of ``N`` targets: of its whole
    distribution, or of a part."""

    number: int
    """``k``: number of tokens of each target"""
    ids: Tensor | None = None
    """``[N, k]``, int64; None: the first ones of the vocabulary"""
    likely_of: int = 0
    """number of first tokens of the vocabulary of which the most likely ones are asked for,
    instead; 0: none are"""

    def of(self, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the logits of what is asked for ``[n, k]``, and which tokens these are.

        Args:
            logits: ``[n, V]``: logits of ``n`` of the targets.
            first: number of the first of these targets.
        """
        if self.likely_of:
            found = logits[:, : self.likely_of].topk(self.number, -1)
            return found.values, found.indices
        if self.ids is None:
            return logits[:, : self.number], None
        ids = self.ids[first : first + len(logits)]
        return logits.gather(-1, ids), ids

    def ids_of(self, targets: int, device: torch.device) -> Tensor:
        """Return which tokens these are ``[N, k]``; not the most likely ones."""
        if self.ids is not None:
            return self.ids
        return torch.arange(self.number, device=device).expand(targets, -1)


def pack_asked(
    samples: Sequence[TrainingSample],
    masks: Sequence[NDArray[np.bool_]],
    device: torch.device,
) -> AskedTokens | None:
    """Return the tokens of which a teacher has told the log-probs; None where it told of drawn ones
    alone, or there is none.

    Raises `ValueError` where it was asked for another number of tokens at some samples.
    """
    told = [one.teacher for one in samples if one.teacher is not None]
    counts = {one.count for one in told}
    if not counts - {0}:
        return None
    if len(told) < len(samples) or len(counts) > 1:
        raise ValueError(
            f"a teacher has told the log-probs of {sorted(counts)} tokens at {len(told)} of "
            f"{len(samples)} samples: it has to be asked for as many at each"
        )
    [count] = counts
    if not any(one.token_ids.size for one in told):
        return AskedTokens(count)
    ids = [one.token_ids[mask].astype(np.int64) for one, mask in zip(told, masks, strict=True)]
    return AskedTokens(count, torch.from_numpy(np.concatenate(ids)).to(device))


class PackedTokens(NamedTuple):
    """``T`` tokens of a micro-batch, ``N`` of them predict a response token."""

    input_ids: Tensor
    """``[1, T]``"""
    position_ids: Tensor
    """``[1, T]``; of a model whose images are grids ``[4, 1, T]``: in the order of the tokens, and
    along time, height and width"""
    lengths: list[int]
    """tokens of each sequence in the row; their sum is ``T``"""
    rows: Tensor
    """``[N]``: positions in the row"""
    targets: Tensor
    """``[N]``: the response token that is predicted there"""
    inverse_temperature: Tensor
    """``[N]``, float32"""
    kept: KeptTokens | None = None
    """what each target was drawn from; None: the whole vocabulary"""
    asked: AskedTokens | None = None
    """other tokens whose log-probs are asked for"""
    bias: LogitBias | None = None
    """biases with which the targets were drawn"""
    routes: Tensor | None = None
    """``[T, layers, k]``, int32: experts that the tokens go through; below 0, and None: those that
    the routers choose"""
    images: ImageInputs | None = None
    """images of the prompts; None: there are none"""


def pack_samples(
    samples: Sequence[TrainingSample],
    masks: Sequence[NDArray[np.bool_]],
    device: torch.device,
    processor: ImageProcessor | None = None,
) -> PackedTokens:
    """Pack samples; of each response, the tokens in its mask ``[R]`` are predicted.

    ``processor``: of a model that sees images. Raises `ValueError`, naming the sample, for a prompt
    without tokens, and for images that the model does not see.
    """
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    inverse: list[NDArray[np.float32]] = []
    predicted: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    prompts: list[SeeingPrompt] = []
    start = 0
    for sample, mask in zip(samples, masks, strict=True):
        prompts.append(SeeingPrompt(start, sample.prompt_ids, sample.images))
        grid = prompt_positions(prompts[-1], processor)
        for prompt_ids, part in sample.sequences:
            if len(prompt_ids) == 0:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has a prompt without tokens: there is "
                    "nothing to predict its first token from"
                )
            # With an empty response the row is the prompt, whose last token then stays.
            whole = np.concatenate([prompt_ids, sample.response_ids[part]]).astype(np.int64)
            length = max(len(whole) - 1, 1)
            ids.append(whole[:length])
            order = np.arange(length)
            if grid is not None and prompt_ids is sample.prompt_ids:
                order = np.concatenate([order[None], with_answer(grid, length)])
            elif grid is not None:
                order = np.broadcast_to(order, (4, length))
            positions.append(order)
            rows.append(start + len(prompt_ids) - 1 + np.flatnonzero(mask[part]))
            lengths.append(length)
            start += length
        chosen = np.flatnonzero(mask)
        targets.append(sample.response_ids[chosen].astype(np.int64))
        inverse.append(np.full(len(chosen), 1.0 / (sample.temperature or 1.0), np.float32))
        predicted.append(chosen)

    def tensor(parts: list[NDArray[np.int64]] | list[NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    inverse_temperature = tensor(inverse)
    return PackedTokens(
        tensor(ids)[None],
        torch.from_numpy(np.concatenate(positions, -1)).to(device).unsqueeze(-2),
        lengths,
        tensor(rows),
        tensor(targets),
        inverse_temperature,
        pack_kept(samples, predicted, device),
        bias=pack_bias(samples, [len(one) for one in predicted], inverse_temperature),
        routes=pack_routes(samples, device),
        images=image_inputs(prompts, processor, device),
    )


def pack_routes(samples: Sequence[TrainingSample], device: torch.device) -> Tensor | None:
    """Return the experts of all tokens in the row; None where no sample has any.

    Raises `ValueError`, naming the sample, where they are not of its tokens.
    """
    shapes = {one.routes.shape[1:] for one in samples if one.routes is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"samples have experts of {len(shapes)} different models: {shapes}")
    rows: list[NDArray[np.int32]] = []
    for sample in samples:
        given, start = sample.routes, 0
        for prompt_ids, part in sample.sequences:
            known = len(prompt_ids) + part.stop - part.start - 1
            row = np.full((max(known, 1), *next(iter(shapes))), -1, np.int32)
            if given is not None:
                own = given[start : start + known]
                row[: len(own)] = own
            rows.append(row)
            start += known
        if given is not None and len(given) != start:
            raise ValueError(
                f"sample {sample.group}/{sample.index} has experts of {len(given)} tokens, but "
                f"{start} go through the model"
            )
    return torch.from_numpy(np.concatenate(rows)).to(device)


def single_token(device: torch.device) -> PackedTokens:
    """Return a row of one token, for a rank that computes only because others do."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedTokens(token[None], token[None], [1], token, token, torch.ones(1, device=device))


def pack_responses(
    samples: Sequence[TrainingSample],
    device: torch.device,
    processor: ImageProcessor | None = None,
) -> PackedTokens:
    """Pack samples; every token that the model drew is predicted."""
    return pack_samples(samples, [one.drawn_mask for one in samples], device, processor)


def by_sample(
    samples: Sequence[TrainingSample],
    parts: Sequence[Sequence[int]],
    answers: Iterable[NDArray[Number]],
) -> list[NDArray[Number]]:
    """Return ``[R, ...]`` of each sample, in order, from ``[N, ...]`` of each part that `by_tokens`
    made and `pack_responses` packed; 0 of tokens that the model was given."""
    found: dict[int, NDArray[Number]] = {}
    for part, numbers in zip(parts, answers, strict=True):
        masks = [samples[at].drawn_mask for at in part]
        ends = np.cumsum([mask.sum() for mask in masks])[:-1]
        for at, mask, drawn in zip(part, masks, np.split(numbers, ends), strict=True):
            found[at] = np.zeros((len(mask), *numbers.shape[1:]), numbers.dtype)
            found[at][mask] = drawn
    return [found[at] for at in range(len(samples))]


def by_tokens(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return indices in parts of at most ``limit`` tokens each (or a single sample), longest first.

    First fit on decreasing lengths, which needs at most 11/9 of the fewest parts (Johnson 1973).
    """
    parts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        fitting = next((at for at, left in enumerate(room) if lengths[index] <= left), None)
        if fitting is None:
            parts.append([index])
            room.append(limit - lengths[index])
        else:
            parts[fitting].append(index)
            room[fitting] -= lengths[index]
    return parts


class TokenStatistics(NamedTuple):
    """Log-prob and entropy of tokens, both ``[N]``, float32."""

    log_prob: Tensor
    entropy: Tensor
    asked: Tensor | None = None
    """``[N, k]``: log-probs of `AskedTokens`"""
    asked_ids: Tensor | None = None
    """``[N, k]``: which tokens these are, where the most likely ones were asked for"""
    vocabulary: int = 0
    """number of tokens of the vocabulary, where any were asked for"""
    rerouted: Tensor | None = None
    """``[N]``: share of the layers in which the routers would have chosen other experts than they
    were given; None from a model that replays none"""


SUPERVISED = LanguageLossConfig(name="supervised")

SILENT_AT_ZERO = frozenset({"ppo", "gspo", "cispo", "sapo", "reinforce"})
"""losses without a gradient where the advantage is 0"""


class Forward(NamedTuple):
    """Samples that go through the model, and what becomes of the model's answer."""

    packed: PackedTokens
    units: float
    """share of the denominator of all samples of the micro-batch (`Share`)"""
    objective: Objective
    samples: Sequence[TrainingSample]
    masks: Sequence[NDArray[np.bool_]]
    """tokens in the loss, of each sample ``[R]``"""
    loss: LanguageLossConfig
    counts: bool
    """whether a sample has a gradient; else metrics are means over other samples"""
    version: int | None
    """version of the weights whose tokens are compared with the engine's; None: no tokens are"""

    def answer(self, found: Any) -> MicroBatchSums:
        """Return the loss; ``found``: what the model computes for ``packed``."""
        part = self.objective.part(self, found)
        if self.counts:
            return part

        def nothing(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.zeros_like(number) for name, number in numbers.items()}

        return part._replace(
            tokens=0, metrics=nothing(part.metrics), averaged=nothing(part.averaged)
        )

    def column(self, name: str, fallback: str | None = None) -> Tensor:
        """Return a field of the samples at the tokens in the loss, ``[N]``."""
        parts = []
        for sample, mask in zip(self.samples, self.masks, strict=True):
            found = getattr(sample, name)
            if found is None and fallback is not None:
                found = getattr(sample, fallback)
            assert found is not None, name  # checked before, or asked for only where it is
            parts.append(found[mask])
        return torch.from_numpy(np.concatenate(parts)).to(self.packed.targets.device)


class Objective(ABC):
    """Losses of micro-batches."""

    def __init__(
        self, config: LanguageTrainingConfig, processor: ImageProcessor | None = None
    ) -> None:
        self.config = config
        self.processor = processor
        """of a model that sees images; None: it does not"""

    def prepare(
        self,
        samples: Sequence[TrainingSample],
        device: torch.device,
        *,
        loss: LanguageLossConfig | None = None,
        always: bool,
        version: int | None = None,
    ) -> Forward | NothingToDo:
        """Pack the samples that have a gradient.

        ``always``: one sample even if none has, because other ranks compute at the same time.
        ``loss``: instead of the configured one. ``version``: that the weights are of. Raises
        `ValueError` for samples that are not ready.
        """
        loss = loss or self.config.loss
        self.check_ready(samples, loss)
        masks = [trained_tokens(sample) for sample in samples]
        units = sum(share_of(int(mask.sum()), loss).units for mask in masks)
        forwarded = [
            sample
            for sample, mask in zip(samples, masks, strict=True)
            if mask.any() and not self.silent(sample, loss)
        ]
        counts = bool(forwarded)
        if not counts:
            if not always:
                return NothingToDo(units)
            forwarded = [samples[0]]
        masks = [trained_tokens(sample) for sample in forwarded]
        packed = pack_samples(forwarded, masks, device, self.processor)
        if self.asks(loss):
            packed = packed._replace(asked=pack_asked(forwarded, masks, device))
        return Forward(packed, units, self, forwarded, masks, loss, counts, version)

    @abstractmethod
    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        """Raise `ValueError` for a sample that lacks what the loss needs."""

    @abstractmethod
    def part(self, forward: Forward, found: Any) -> MicroBatchSums:
        """Return the loss of what the model has found."""

    def silent(self, sample: TrainingSample, loss: LanguageLossConfig) -> bool:
        """Whether the gradient of a sample is exactly 0, and need not be computed."""
        return False

    def asks(self, loss: LanguageLossConfig) -> bool:
        """Whether the loss compares log-probs of tokens that were not drawn with a teacher's."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether the loss needs log-probs under the weights that the iteration began with."""
        return False


class PolicyObjective(Objective):
    """Policy-gradient losses, from log-probs and entropies."""

    @property
    def recomputes(self) -> bool:
        return self.config.loss.proximal == "step"

    def asks(self, loss: LanguageLossConfig) -> bool:
        return loss.may_use_teacher

    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        for sample in samples:
            if sample.advantage is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no advantage: call "
                    "compute_advantages() on its group first"
                )
            if loss.uses_teacher and sample.teacher is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no log-probs of a teacher, which "
                    "the loss compares with: have an inference worker ask one"
                )
            if loss.proximal == "step" and sample.prev_log_prob is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no prev_log_prob, but loss.proximal "
                    "is 'step': fill it in with first_log_probs() before the first optimizer step"
                )

    def part(self, forward: Forward, found: TokenStatistics) -> MicroBatchSums:
        losses = token_loss(_loss_inputs(forward, found), forward.loss)
        weights = token_weights(forward.masks, forward.loss, losses.loss.device)
        metrics = {name: numbers.sum() for name, numbers in losses.metrics.items()}
        if forward.version is not None:
            metrics |= engine_difference(forward, found)
        if found.rerouted is not None:
            metrics[ROUTING_CHANGED] = found.rerouted.sum()
        averaged = {name: (one * weights).sum() for name, one in losses.averaged.items()}
        total = (losses.loss * weights).sum()
        return MicroBatchSums(total, forward.units, len(forward.packed.rows), metrics, averaged)

    def silent(self, sample: TrainingSample, loss: LanguageLossConfig) -> bool:
        quiet = loss.name in SILENT_AT_ZERO and not (
            loss.kl_coefficient or loss.entropy_coefficient or loss.teacher_coefficient
        )
        return (
            self.config.skip_silent
            and quiet
            and sample.advantage is not None
            and not sample.advantage.any()
        )


class ValueObjective(Objective):
    """Half the squared error, from values ``[N]``."""

    def check_ready(self, samples: Sequence[TrainingSample], loss: LanguageLossConfig) -> None:
        for sample in samples:
            if sample.returns is None or sample.value is None:
                raise ValueError(
                    f"sample {sample.group}/{sample.index} has no returns or no values: a critic "
                    "trains on samples with its own values, after compute_advantages()"
                )

    def part(self, forward: Forward, found: Tensor) -> MicroBatchSums:
        returns = forward.column("returns")
        losses = token_value_loss(found, forward.column("value"), returns, self.config.value_clip)
        total = (losses * token_weights(forward.masks, forward.loss, losses.device)).sum()
        error = (found.detach() - returns).square()
        metrics = {"value": found.detach().sum(), "value_error": error.sum()}
        return MicroBatchSums(total, forward.units, len(forward.packed.rows), metrics)


def engine_difference(forward: Forward, now: TokenStatistics) -> dict[str, Tensor]:
    """Return the sum of the absolute differences between the engine's log-probs and those of this
    forward pass, over the tokens that weights of this version have generated, and their number."""
    same = torch.eq(forward.column("version"), forward.version or 0)
    difference = (now.log_prob.detach() - forward.column("log_prob")).abs()
    return {ENGINE_DIFFERENCE: difference.where(same, 0.0).sum(), ENGINE_TOKENS: same.sum()}


def token_weights(
    masks: Sequence[NDArray[np.bool_]], config: LanguageLossConfig, device: torch.device
) -> Tensor:
    """Return the weight ``[N]`` of each trained token in the sum of the losses."""
    counts = [int(mask.sum()) for mask in masks]
    shares = [share_of(count, config).weight for count in counts]
    return torch.from_numpy(np.repeat(np.array(shares, np.float32), counts)).to(device)


def trained_tokens(sample: TrainingSample) -> NDArray[np.bool_]:
    """Return the mask of the tokens in the loss."""
    return sample.loss_mask if sample.scored else np.zeros_like(sample.loss_mask)


def _loss_inputs(forward: Forward, now: TokenStatistics) -> TokenLossInputs:
    column = forward.column
    behaviour = column("log_prob")
    proximal = {
        "auto": lambda: column("prev_log_prob", "log_prob"),
        "behaviour": lambda: behaviour,
        "current": lambda: now.log_prob.detach(),
        "step": lambda: column("prev_log_prob"),
    }[forward.loss.proximal]()
    with_reference = all(sample.ref_log_prob is not None for sample in forward.samples)
    counts = torch.tensor([int(mask.sum()) for mask in forward.masks])
    return TokenLossInputs(
        log_prob=now.log_prob,
        entropy=now.entropy,
        proximal_log_prob=proximal,
        behaviour_log_prob=behaviour,
        ref_log_prob=column("ref_log_prob") if with_reference else None,
        advantage=column("advantage"),
        sample=torch.repeat_interleave(counts).to(behaviour.device),
        samples=len(forward.samples),
        **_of_teacher(forward, now),
    )


def _of_teacher(forward: Forward, now: TokenStatistics) -> dict[str, Any]:
    """Return the fields of `TokenLossInputs` about a teacher; none where it was not asked."""
    told = [one.teacher for one in forward.samples if one.teacher is not None]
    if len(told) < len(forward.samples):
        return {}

    def at_tokens(numbers: Sequence[Floats]) -> Tensor:
        chosen = [one[mask] for one, mask in zip(numbers, forward.masks, strict=True)]
        return torch.from_numpy(np.concatenate(chosen)).to(now.log_prob.device)

    found: dict[str, Any] = {"teacher_log_prob": at_tokens([one.drawn for one in told])}
    if now.asked is not None:
        found["teacher_likely"] = at_tokens([one.likely for one in told])
        found["likely"] = now.asked
        found["whole"] = now.asked.shape[1] == now.vocabulary
    return found
