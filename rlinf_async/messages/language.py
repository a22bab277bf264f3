"""Messages of the language job: requests, samples, their scores, groups to train on.

::

    Request       source    -> rollout     one sample to generate (or to go on with)
    Sample        rollout   -> inference   finished; each goes on at once, in the order they finish
                  inference -> reward      with previous, reference and teacher's log-probs, where
                                           asked for
                  gatherer  -> reward      with the others of its prompt, where a verifier judges
                                           all of them at once
    ScoredSample  reward    -> collector   with its outcome: scored, rejected or failed
    SampleGroup   collector -> actor       every sample of one prompt, by key of the DP rank
    WeightsTaken  rollout   -> actor       an engine serves the weights of a version, checked
    LanguageTrainReport  actor, critic -> runtime   what one rank trained in one iteration

Shapes are written with ``P`` prompt tokens and ``R`` response tokens. Log-probs are of the
distribution that was sampled from: after biases, temperature, min-p, top-k and top-p. What these
kept of the vocabulary travels with the tokens (`Kept`), and so do temperature and biases, and, of a
mixture of experts, the experts that were chosen (`Routes`), so that trainers compute the same
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Floats

Tokens = NDArray[np.int32]
Versions = NDArray[np.int32]
Mask = NDArray[np.bool_]
Unsigned = NDArray[np.uint8 | np.uint16 | np.uint32]
Routes = Unsigned
"""Experts that tokens went through, ``[tokens, layers, k]``: numbers of the ``k`` that the router
of each layer with experts has chosen, in the smallest dtype that fits"""

Images = tuple[bytes, ...]
"""encoded images (PNG, JPEG, ...), in the order of their placeholders"""

LEAST_TEMPERATURE = 0.01
"""lowest temperature besides 0: below it, rounding of the logits decides what is drawn, and vLLM
would silently use this one"""
MAX_BIAS = 100.0
"""largest size of a logit's bias, as vLLM and OpenAI have it"""
MAX_REWARD = 1e18
"""largest size of a reward: training squares rewards in float32, which ends at 3e38"""


Biases = tuple[tuple[int, float], ...]
"""Token ids with a number each. No dict: a channel would look closely at each item with one, as it
may be changed."""


class Grammar(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The format of a whole response: one of these, or none. No other token is drawn than one with
    which it can still become such a text, and its end only where it is one."""

    regex: str = ""
    """regular expression that the whole text matches"""
    choices: tuple[str, ...] = ()
    """texts of which it is one"""
    json_schema: str = ""
    """JSON schema, as text, of the JSON that it is"""
    ebnf: str = ""
    """grammar in the notation of GBNF, whose rule ``root`` it follows"""

    def __post_init__(self) -> None:
        if len(given := self._given()) > 1:
            raise ValueError(f"a response has one format, and {' and '.join(given)} are given")
        if "" in self.choices:
            raise ValueError("choices has an empty text, which no response is")

    def __bool__(self) -> bool:
        return bool(self._given())

    @property
    def kind(self) -> str:
        """Name of the format that is given; empty: none is."""
        return "".join(self._given())

    def _given(self) -> list[str]:
        return [name for name in self.__struct_fields__ if getattr(self, name)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which the tokens of one sample are drawn."""

    max_tokens: int = 128
    """tokens of the response, including those of a partial one"""
    temperature: float = 1.0
    """divisor of the logits, at least 0.01; 0: the most likely token (greedy), with log-probs at
    temperature 1 of the whole vocabulary, or of what the grammar allows"""
    top_k: int = 0
    """number of most likely tokens to draw from; 0: all"""
    top_p: float = 1.0
    """probability mass of the most likely tokens to draw from; 1: all"""
    min_p: float = 0.0
    """smallest probability of a token to draw from, as a share of that of the most likely one; 0:
    none. It is applied after the temperature and before top-k and top-p"""
    logit_bias: Biases = ()
    """token ids, and the number that is added to the logit of each before the temperature"""
    repetition_penalty: float = 1.0
    """divisor of the positive logits, and factor of the others, of tokens that stand in the prompt
    or in the response so far, before the temperature; 1: off"""
    grammar: Grammar = Grammar()
    """format of the response: tokens that it does not allow are left out first of all, also where
    the most likely token is taken"""
    stop: tuple[str, ...] = ()
    """texts that end a response, with the token that completes the first of them; see
    `rlinf_async.messages.stopping`"""
    stop_token_ids: tuple[int, ...] = ()
    """tokens that end a response, beside those of the model's own"""
    include_stop: bool = False
    """whether the text of a response has the stop text, or the stop token, that ended it"""
    routing_replay: bool = False
    """whether the experts that each token went through travel with it (`Generated.routes`), and the
    policy's forward passes go through the same ones"""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.temperature != 0.0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}; it must be a number from {LEAST_TEMPERATURE} "
                "on, or 0 (greedy)"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: off)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must lie between 0 and 1 (0: off)")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be a number above 0 "
                "(1: off)"
            )
        self._check_bias()
        self._check_stops()

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias:
            if token < 0:
                raise ValueError(f"logit_bias has {token}, which is no token id")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(
                    f"logit_bias of token {token} is {bias}; it must lie between -{MAX_BIAS:.0f} "
                    f"and {MAX_BIAS:.0f}"
                )
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError("logit_bias has a token twice")

    def _check_stops(self) -> None:
        if "" in self.stop:
            raise ValueError("stop has an empty text, which would end every response at once")
        if any(one < 0 for one in self.stop_token_ids):
            raise ValueError(f"stop_token_ids has {min(self.stop_token_ids)}, which is no token id")
        if self.include_stop and not (self.stop or self.stop_token_ids):
            raise ValueError(
                "include_stop is true, but there is neither stop nor stop_token_ids: leave it out"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens may be drawn from a part of the vocabulary: then they come with `Kept`."""
        return not self.greedy and (self.cuts or bool(self.grammar))

    @property
    def stops(self) -> bool:
        """Whether a response may end before the model ends it, or ``max_tokens`` does."""
        return bool(self.stop or self.stop_token_ids)

    @property
    def further(self) -> list[str]:
        """Names of the settings that are given and change a distribution, beside those that every
        engine has to honour."""
        given = {
            "min_p": self.min_p > 0.0,
            "logit_bias": any(bias for _, bias in self.logit_bias),
            "repetition_penalty": self.repetition_penalty != 1.0,
            "grammar": bool(self.grammar),
            "routing_replay": self.routing_replay,
        }
        return [name for name, is_given in given.items() if is_given]

    def greedily(self) -> Sampling:
        """Return the same, but that the most likely token is taken, which is not trained."""
        greedy = msgspec.structs.replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        return msgspec.structs.replace(greedy, routing_replay=False)


class Kept(msgspec.Struct, frozen=True):
    """The tokens that each token of a response could be drawn from, where a grammar, top-k, top-p
    or min-p left others out. Both arrays have the smallest unsigned dtype that fits."""

    counts: Unsigned
    """``[R]``: number of tokens kept; 0: the whole vocabulary"""
    token_ids: Unsigned
    """``[sum(counts)]``: those of the first token, then those of the second, ..."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | NDArray[Any]]) -> Kept:
        """Return the sets of the tokens of a response; an empty one is the whole vocabulary.

        Raises `ValueError` for a number below 0, such as what pads rows of one length.
        """
        ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(one, np.int64) for one in sets)])
        if ids.min(initial=0) < 0:
            raise ValueError(f"{ids.min()} is no token id: a set has only what was kept")
        return cls(_smallest(np.array([len(one) for one in sets], np.int64)), _smallest(ids))

    def sets(self) -> list[Unsigned]:
        """Return the set of each token; empty: the whole vocabulary."""
        return np.split(self.token_ids, np.cumsum(self.counts.astype(np.int64)))[:-1]

    def followed_by(self, rest: Kept) -> Kept:
        """Return the kept sets of these tokens, followed by those of ``rest``."""
        return Kept(
            np.concatenate([self.counts, rest.counts]),
            np.concatenate([self.token_ids, rest.token_ids]),
        )


def _smallest(numbers: NDArray[np.int64]) -> Unsigned:
    """Return the numbers, none below 0, in the smallest dtype that fits."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One task, as the data gave it."""

    index: int
    """position in the data, counted over epochs"""
    text: str
    """text that the model reads, after the chat template"""
    token_ids: Tokens
    """``[P]``"""
    verifier: str
    """name of the verifier that scores the response"""
    reference: str
    """right answer, or JSON of the verifier's own"""
    messages: tuple[dict[str, Any], ...] = ()
    """``text`` before the chat template, for an episode, which renders it itself; else none"""
    images: Images = ()
    """images of the placeholders in ``text``, which ``token_ids`` has expanded"""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a model has generated for a prompt so far."""

    token_ids: Tokens
    """``[R]``, the end-of-sequence token included where it was drawn"""
    log_prob: Floats
    """``[R]``"""
    version: Versions
    """``[R]``: version of the weights that generated each token"""
    finish: Literal["stop", "length", "abort"]
    """reason of the end: ``stop``: end of sequence, a stop token or a stop text; ``length``:
    max_tokens; ``abort``: interrupted, generation can continue"""
    kept: Kept | None = None
    """what each token was drawn from, where the request's sampling truncates (`Sampling`); None
    from an engine that cannot tell: it must not be trained on then"""
    drawn: Mask | None = None
    """``[R]``: tokens that the model drew; the others were given to it between two turns, with
    log-prob 0 and version -1. None: all"""
    cached: int | None = None
    """tokens of what was read before the first one that the engine had in its prefix cache; None:
    it does not say"""
    routes: Routes | None = None
    """``[P + R - 1, layers, k]``, where the sampling has ``routing_replay``: of all tokens but the
    last one, which went through none. Those of a token that was computed several times are of the
    first time under the newest weights. None: they are not told"""

    @property
    def drawn_mask(self) -> Mask:
        """``[R]``: tokens that the model drew."""
        return _mask(self.drawn, len(self.token_ids))

    @property
    def drawn_tokens(self) -> int:
        """Number of tokens that the model drew."""
        return int(self.drawn_mask.sum())

    def tells_of(self, sampling: Sampling) -> bool:
        """Whether it is known what the tokens were drawn from with this sampling."""
        return not (self.untold(sampling) and len(self.token_ids))

    def untold(self, sampling: Sampling) -> str:
        """Return what would have to be known for that, in words, and is not; empty: nothing."""
        if self.kept is None and sampling.truncates:
            return "which tokens grammar, top_k, top_p and min_p kept (`Generated.kept`)"
        if self.routes is None and sampling.routing_replay:
            return "which experts the tokens went through (`Generated.routes`)"
        return ""


def _mask(drawn: Mask | None, size: int) -> Mask:
    return np.ones(size, np.bool_) if drawn is None else drawn


class TeacherLogProbs(msgspec.Struct, frozen=True):
    """Log-probs of a teacher at the tokens of a response, under the sample's temperature."""

    drawn: Floats
    """``[R]``: of each token of the response; 0 of tokens that were given"""
    likely: Floats
    """``[R, k]``: of the tokens that it holds most likely there; ``k`` is 0 where it was only asked
    about those that were drawn"""
    token_ids: Unsigned
    """``[R, k]``: which ones these are; ``[R, 0]``: tokens 0 to ``k - 1`` of the vocabulary"""
    version: int = -1
    """version of the policy that the teacher is; -1: it is another model"""

    @property
    def count(self) -> int:
        """``k``."""
        return int(self.likely.shape[1])


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one turn in the response of an episode."""

    start: int
    """position of its first token in ``[R]``"""
    stop: int
    """position after its last token"""
    reward: float | None = None
    """reward of this turn, beside the outcome of the episode; None: it was given none"""


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of an episode that has several: its own prompt, and its part of the response.

    The responses of all branches follow each other in ``[R]``; the first one begins at 0, with the
    sample's prompt, and is no `Branch`. A token is trained once: what a branch shares with the one
    that it left is prompt there.
    """

    prompt_ids: Tokens
    """``[P']``"""
    start: int
    """position of its first token in ``[R]``; it ends where the next one begins"""


class EngineUse(msgspec.Struct, kw_only=True):
    """What the engines did for the turns of an episode."""

    moved: int = 0
    """turns that went to another rollout worker than the turn before"""
    read_tokens: int = 0
    """tokens of what was read for all turns of which engines say what they had cached"""
    cached_tokens: int = 0
    """number of these that were in a prefix cache"""
    seconds: float = 0.0
    """seconds of the rollout workers, each since it had sent its last turn"""
    idle_seconds: float = 0.0
    """seconds of these in which there was nothing to do until an episode went on: see
    `Sample.idle_seconds`"""

    def add(self, sample: Sample, before: int) -> None:
        """Count the answer to a turn; the one before was drawn by rollout worker ``before``."""
        self.moved += before not in (-1, sample.rollout_rank)
        if sample.generated.cached is not None:
            self.read_tokens += len(sample.request.prompt.token_ids)
            self.cached_tokens += sample.generated.cached
        self.seconds += sample.engine_seconds
        self.idle_seconds += sample.idle_seconds


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in an episode, for metrics."""

    turns: int
    """turns of all branches"""
    tool_calls: dict[str, int] = {}
    """number of calls, by name of the tool"""
    tool_failures: dict[str, int] = {}
    """number of calls that failed, by ``tool/kind of failure``"""
    tool_seconds: dict[str, float] = {}
    """duration of all calls of a tool, in seconds, by its name"""
    cut: str = ""
    """limit that ended it (``turns``, ``tokens``, ``seconds``); empty: it ended by itself"""
    metrics: dict[str, float] = {}
    """numbers of the user's own"""
    engines: EngineUse = msgspec.field(default_factory=EngineUse)
    rendered_anew: int = 0
    """times that the template did not let a conversation go on, so that it became a branch"""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """source -> rollout: one sample to generate, or one turn of an episode."""

    group: int
    """number of the prompt in this run; samples of one prompt share it"""
    index: int
    """number of this sample in its group, below ``group_size``"""
    group_size: int
    iteration: int
    """iteration that the sample was admitted for"""
    min_version: int
    """oldest weights that may generate a token of it: ``iteration - max_staleness``, at least 0"""
    prompt: Prompt
    sampling: Sampling
    seed: int
    """seed of this sample's random numbers, where the engine can seed a single request"""
    priority: int = 0
    """order of the engine: lower numbers first"""
    partial: Generated | None = None
    """tokens generated before an interruption; generation continues after them"""
    evaluation: bool = False
    evaluation_set: str = ""
    """name of the set that its prompt belongs to; empty: the run's own data"""
    turn: int = 0
    """number of the turn of an episode, from 1 on, over all branches; its prompt is the whole
    conversation so far. 0: no turn but a whole sample, or the task of an episode"""
    replay: bool = False
    """whether turns of this episode may have been made before: of a run that was resumed"""
    state: bytes = b""
    """`Episode.state` when the turn was asked for: its sample brings it back"""

    @property
    def sample_name(self) -> str:
        """``group/index``: name of the sample, also of that to which a turn belongs."""
        return f"{self.group}/{self.index}"

    @property
    def name(self) -> str:
        """Unique in a run: ``group/index``, of a turn ``group/index.turn``."""
        return self.sample_name + (f".{self.turn}" if self.turn else "")


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The verifier judged the response."""

    reward: float
    parts: dict[str, float] = {}
    """components of the reward, for metrics"""
    cost: float = 0.0
    """what it cost to judge, in a unit of the verifier's own; 0 of an answer that was known"""


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The verifier refuses to judge: the sample is left out of training, and counted."""

    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The verifier failed (raised, timed out, died, returned no number): the sample is left out of
    training, and counted."""

    error: str


Outcome = Scored | Rejected | Failed


class Sample(msgspec.Struct, kw_only=True):
    """rollout -> inference -> reward: a finished response."""

    request: Request
    """the request, without its ``partial``, whose tokens are in ``generated``"""
    generated: Generated
    text: str
    """text of the response, without special tokens; of a turn empty, as its episode reads the
    tokens"""
    rollout_rank: int
    prev_log_prob: Floats | None = None
    """``[R]``, by the actor's forward under weights at least as new as the newest token, and as
    those that training begins with where the run is on-policy; one version for all tokens"""
    ref_log_prob: Floats | None = None
    """``[R]``, by the actor's forward under the reference weights"""
    teacher: TeacherLogProbs | None = None
    """by a teacher, which is another model, or an earlier version of the policy"""
    value: Floats | None = None
    """``[R]``, by the critic: of the state before each response token"""
    outcome: Outcome | None = None
    """outcome of an episode that scores itself, or failed; None: the verifier judges ``text``"""
    branches: tuple[Branch, ...] = ()
    """sequences of an episode after the first one"""
    turns: tuple[TurnSpan, ...] = ()
    """turns of an episode, oldest first in each branch"""
    episode: EpisodeRecord | None = None
    engine_seconds: float = 0.0
    """of a turn: seconds since its rollout worker had sent the last one"""
    idle_seconds: float = 0.0
    """of a turn: seconds of these in which its rollout worker had no request, until one came that
    was not the first of its episode: it waited for an agent or its tools"""
    others: tuple[Sample, ...] = ()
    """the other samples of its prompt, where a verifier judges all of them at once"""

    def apart(self) -> list[Sample]:
        """Return it and the other samples of its prompt, each by itself."""
        return [msgspec.structs.replace(self, others=()), *self.others] if self.others else [self]

    @property
    def tokens(self) -> int:
        """``P + R`` over all branches."""
        own = len(self.request.prompt.token_ids) + len(self.generated.token_ids)
        return own + sum(len(branch.prompt_ids) for branch in self.branches)


class JudgeUse(msgspec.Struct, kw_only=True):
    """How often a verifier was called for one sample."""

    calls: int = 0
    retries: int = 0
    """calls after an error that may not come again"""
    cache_hits: int = 0
    """1: the same answer was judged before, and no verifier was called"""


class ScoredSample(msgspec.Struct, kw_only=True):
    """reward -> collector."""

    sample: Sample
    outcome: Outcome
    seconds: float = 0.0
    """duration of scoring, including the wait for a free process"""
    verifier: str = ""
    """name of the verifier that has scored it, where that was not its prompt's: of a reward worker
    that was swapped in for another verifier"""
    judge: JudgeUse | None = None
    """calls of its verifier, where that is asynchronous, was called again, or may be remembered; of
    samples that were judged at once, with the first one"""
    others: tuple[ScoredSample, ...] = ()
    """the other samples of its prompt, which were judged with it"""

    def apart(self) -> list[ScoredSample]:
        """Return it and the other samples of its prompt, each by itself."""
        return [msgspec.structs.replace(self, others=()), *self.others] if self.others else [self]


class TrainingSample(msgspec.Struct, kw_only=True):
    """One sample as the trainer sees it."""

    group: int
    index: int
    prompt_ids: Tokens
    """``[P]``"""
    response_ids: Tokens
    """``[R]``"""
    loss_mask: Mask
    """``[R]``: tokens that count in the loss: of those that the model drew, and none of a sample
    that was not scored"""
    log_prob: Floats
    """``[R]``: behaviour log-probs, as sampled; 0 of tokens that were given"""
    version: Versions
    """``[R]``; -1 of tokens that were given"""
    temperature: float
    """divisor of the logits before log-probs are taken"""
    reward: float
    """NaN where it was not scored"""
    scored: bool
    prev_log_prob: Floats | None = None
    """``[R]``"""
    ref_log_prob: Floats | None = None
    """``[R]``"""
    teacher: TeacherLogProbs | None = None
    """log-probs of a teacher, which the loss compares with"""
    value: Floats | None = None
    """``[R]``"""
    kept: Kept | None = None
    """tokens that each one was drawn from: log-probs and entropies are of the distribution over
    these; None: over the whole vocabulary"""
    logit_bias: Biases = ()
    """token ids, and the number that is added to the logit of each before the temperature"""
    routes: Routes | None = None
    """``[tokens, layers, k]``: experts that tokens of prompt and response but the last one go
    through, those of each sequence after those of the one before; None: which the routers choose"""
    advantage: Floats | None = None
    """``[R]``; filled in by `compute_advantages_and_returns` where it is None"""
    returns: Floats | None = None
    """``[R]``: the target of the critic"""
    branches: tuple[Branch, ...] = ()
    """sequences after the first one, of an episode that has several"""
    turns: tuple[TurnSpan, ...] = ()
    """turns of an episode"""
    drawn: Mask | None = None
    """``[R]``: tokens that the model drew; None: all"""
    images: Images = ()
    """images of the prompt"""

    @property
    def tokens(self) -> int:
        """``P + R`` over all branches: tokens that a forward pass sees."""
        own = len(self.prompt_ids) + len(self.response_ids)
        return own + sum(len(branch.prompt_ids) for branch in self.branches)

    @property
    def drawn_mask(self) -> Mask:
        """``[R]``: tokens that the model drew."""
        return _mask(self.drawn, len(self.response_ids))

    @property
    def sequences(self) -> list[tuple[Tokens, slice]]:
        """The prompt of each sequence, and its part of the response ``[R]``; the only one is the
        whole response where there are no branches."""
        starts = [0, *(one.start for one in self.branches), len(self.response_ids)]
        prompts = [self.prompt_ids, *(one.prompt_ids for one in self.branches)]
        return list(zip(prompts, map(slice, starts, starts[1:]), strict=True))

    @property
    def rewards(self) -> tuple[float, ...]:
        """Reward of the sample, and of its turns that were given one."""
        return (self.reward, *(one.reward for one in self.turns if one.reward is not None))


class Example(msgspec.Struct, frozen=True):
    """A prompt and the answer to learn."""

    prompt_ids: Tokens
    """``[P]``"""
    response_ids: Tokens
    """``[R]``, with the end-of-sequence token that generation is to stop at"""
    learnt: Mask | None = None
    """``[R]``: tokens of the answer; the others are given, as what is said between several answers.
    None: all"""
    images: Images = ()
    """images of the prompt"""

    @property
    def tokens(self) -> int:
        """``P + R``."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def mask(self) -> Mask:
        """``[R]``: tokens of the answer."""
        return _mask(self.learnt, len(self.response_ids))

    def sample(
        self,
        group: int,
        index: int = 0,
        ref_log_prob: Floats | None = None,
        teacher: TeacherLogProbs | None = None,
    ) -> TrainingSample:
        """Return it as a sample that nobody has drawn, of any version, without a reward."""
        nothing = np.zeros(len(self.response_ids), np.float32)
        return TrainingSample(
            group=group,
            index=index,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            loss_mask=self.mask,
            log_prob=nothing,
            version=np.full(len(nothing), -1, np.int32),
            temperature=1.0,
            reward=0.0,
            scored=True,
            ref_log_prob=ref_log_prob,
            teacher=teacher,
            advantage=nothing,
            drawn=self.learnt,
            images=self.images,
        )


class SampleGroup(msgspec.Struct, kw_only=True):
    """collector -> actor: every sample of one prompt."""

    iteration: int
    group: int
    samples: list[TrainingSample]


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """rollout -> actor: an engine now serves this version."""

    rollout_rank: int
    version: int
    checksum: int
    """checksum of the `WeightUpdate`, after the engine compared it with what arrived"""
    seconds: float
    """duration from the arrival of the update until the engine served it"""


class LanguageTrainReport(msgspec.Struct, kw_only=True):
    """actor, critic -> runtime: one rank trained its share of an iteration."""

    iteration: int
    version: int
    """version of the resulting weights"""
    rank: int
    metrics: dict[str, float]
    """means over the optimizer steps: loss, entropy, approx_kl, grad_norm, lr, ..."""
    steps: int
    """optimizer steps that were asked for; ``metrics["skipped"]`` is the share left out"""
    samples: int
    """samples in this rank's share, including those that were not scored"""
    unscored: int
    """samples that were left out: rejected or failed"""
    left_out: int
    """samples of this rank's share that a mask of ``loss.off_policy_...`` left out"""
    groups: int
    groups_without_signal: int
    """groups whose scored samples all have the same rewards: nothing can be learnt from them"""
    prompt_tokens: int
    """tokens that the model was given: prompts, and what comes between the turns of an episode"""
    response_tokens: int
    """tokens that the model drew"""
    reward_mean: float
    """mean reward of the scored samples; NaN where there are none"""
    lag_mean: float
    """versions between the weights that made a token and those that were trained, over tokens"""
    lag_max: int
    wait_seconds: float
    """time spent waiting for samples: before training, or, pipelined, in between"""
    train_seconds: float
    """time from the begin of training to its end; pipelined, it includes ``wait_seconds``"""
    ranks: int = 1
    """number of ranks that train the next iteration and share its data"""


class RequestCount(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a request."""

    name: str
    made: int
    """tokens of its response so far"""
    most: int
    """tokens that may still come"""
    group: int = -1
    """number of its prompt's group"""

    @classmethod
    def of(cls, request: Request, made: int = 0) -> RequestCount:
        """Return how far a request is with ``made`` tokens; 0: with those that it brings along."""
        if not made and request.partial is not None:
            made = len(request.partial.token_ids)
        most = request.sampling.max_tokens - made
        return cls(name=request.name, made=made, most=most, group=request.group)


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one rollout worker: counts, no tokens."""

    rank: int
    version: int
    """version of the weights that the worker serves"""
    slots: int
    """requests that its engine decodes together"""
    samples: int
    """samples that it has sent on, since it was started"""
    tokens: int
    """tokens of these samples, prompts left out"""
    requests: tuple[RequestCount, ...]
    """the requests that are here, in the order in which they were taken"""


class Boundary(msgspec.Struct, frozen=True, order=True):
    """A place between two mini-batches (global batches) of the actor."""

    iteration: int
    done: int
    """mini-batches of the iteration that are trained, over all epochs"""


class DataShare(msgspec.Struct, frozen=True, kw_only=True):
    """actor rank 0 -> collector: who trains the global batch after a boundary."""

    boundary: Boundary
    ranks: int
    """data ranks, which share it"""
