"""`BatchDecoder`: the rows that are decoded together, one token each at a time.

::

    join(rows) --prefill--> rows 0 .. n-1 --step--> one token each --> finished rows leave
                                 ^
              load(update): new weights; the cache is recomputed from each row's tokens

Runs in one thread. Invariant: the cache (`RowCache`) holds, for each row, all of its tokens but the
last one, under the weights that are loaded; the next step feeds that last one.

Which rows are together depends on when requests arrive, so it must not show in what a row gets, not
by its last bit: a token drawn near a border would be another one, and two runs from one seed would
part. On the CPU, in float32, it does not, as rows are computed each by itself: the libraries take
another order of summation only for fewer than `ROWS` rows, and for keys beyond a whole number of
`SPAN`, so there is filling up to these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_async.backends.language import LAYER_KINDS, ModelOutputError
from rlinf_async.backends.transformers.formats import ResponseFormat, ResponseFormats
from rlinf_async.backends.transformers.images import (
    SeeingPrompt,
    image_inputs,
    image_vectors,
    prompt_positions,
    with_answer,
)
from rlinf_async.backends.transformers.routing import RecordedRoutes
from rlinf_async.backends.transformers.sampling import NOTHING, Rules, draw, kept_sets, uniforms
from rlinf_async.backends.transformers.tensors import ModelTensors, check_kind, load_weights
from rlinf_async.config import MissingExtra
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Images, Kept, Request, Routes, Tokens
from rlinf_async.messages.stopping import StopTexts
from rlinf_async.messages.weights import WeightUpdate, refuse_older

GROWTH = 64
"""positions added when the cache grows, at least; else half as many as it has"""


class RowCache:
    """Keys and values of the rows that are decoded together, densely packed.

    ::

        keys[layer]   [rows, heads, positions, head size]      rows 0 .. count - 1 are in use

    A row that joins comes last; if one leaves, the last takes its place. So a decoding step reads
    one view of each layer, without a copy, however rows come and go. The model sees the interface
    of the library's own caches, of which its attention calls `update` only.

    Unused positions are zero or left from an earlier row, never NaN: masks hide them, and a hidden
    NaN would still come through (0 * NaN).
    """

    is_compileable = False

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._joining: tuple[slice, Tensor] | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._width = 0
        self._rows = 0

    def join(self, first: int, source: Tensor, width: int) -> None:
        """The next forward pass fills rows from ``first`` on: row ``i`` from its ``source[i]``.

        Args:
            first: number of rows in use.
            source: ``[joining]``, which row of the pass each one is.
            width: positions of the pass.
        """
        self._reserve(first + len(source), width)
        self._joining, self._places = (slice(first, first + len(source)), source), None
        self._width = width

    def step(self, positions: Tensor, width: int) -> None:
        """The next forward pass adds one position to each row.

        Args:
            positions: ``[rows]``, where.
            width: over all of them, the largest plus 1.
        """
        rows = len(positions)
        self._reserve(rows, width)
        every = torch.arange(rows, device=positions.device)
        self._joining, self._places = None, (every, positions)
        self._width = width

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values ``[rows, heads, new, size]``; return what to attend to."""
        if layer_idx == len(self._keys):
            self._keys.append(self._empty(keys))
            self._values.append(self._empty(values))
        stored_keys, stored_values = self._keys[layer_idx], self._values[layer_idx]
        if self._joining is not None:
            rows, source = self._joining
            stored_keys[rows, :, : self._width] = keys[source]
            stored_values[rows, :, : self._width] = values[source]
            return keys, values
        assert self._places is not None
        every, positions = self._places
        stored_keys[every, :, positions] = keys[:, :, 0]
        stored_values[every, :, positions] = values[:, :, 0]
        count = len(every)
        return stored_keys[:count, :, : self._width], stored_values[:count, :, : self._width]

    def move(self, source: int, target: int, width: int) -> None:
        """Copy a row's first ``width`` positions over another row."""
        for stored in (*self._keys, *self._values):
            stored[target, :, :width] = stored[source, :, :width]

    def clear(self) -> None:
        """Drop all rows and release the memory."""
        self._keys, self._values, self._rows = [], [], 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions in use, as the library's caches do."""
        return self._width

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self._rows, heads, self._positions, size)

    def _reserve(self, rows: int, width: int) -> None:
        if not self._rows:
            self._rows, self._positions = rows, width + GROWTH
            return
        if rows > self._rows or width > self._positions:
            old, held = self._rows, self._positions
            self._rows = max(2 * old, rows) if rows > old else old
            self._positions = width + max(GROWTH, held // 2) if width > held else held
            self._keys = [self._grown(stored, old, held) for stored in self._keys]
            self._values = [self._grown(stored, old, held) for stored in self._values]

    def _grown(self, stored: Tensor, rows: int, positions: int) -> Tensor:
        new = self._empty(stored)
        new[:rows, :, :positions] = stored
        return new


Finish = Literal["stop", "length", "abort"]


class DecodedRow:
    """One request inside the decoder: its tokens so far, and the random numbers of the next."""

    __slots__ = (
        "_kept",
        "_log_probs",
        "_prompt",
        "_random",
        "_routed_by",
        "_routes",
        "_stop_texts",
        "_versions",
        "failure",
        "finish",
        "format",
        "images",
        "name",
        "positions",
        "sampling",
        "shift",
        "tokens",
    )

    def __init__(self, request: Request, stop_texts: StopTexts | None = None) -> None:
        partial = request.partial
        self._stop_texts = stop_texts
        self.name = request.name
        self.sampling = request.sampling
        self.images = request.prompt.images
        """images of the prompt"""
        self.positions: NDArray[np.int64] | None = None
        """``[3, P]`` of the prompt, once it has joined; None: the order of its tokens"""
        self.shift = 0
        """what the position of a token of the response is more than its place"""
        self.tokens: list[int] = request.prompt.token_ids.tolist()
        """tokens of the prompt and the response"""
        self._prompt = len(self.tokens)
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[NDArray[Any]] = []
        self._routes: list[Routes] = []
        self._routed_by = -1
        self.failure: Exception | None = None
        """why it cannot go on; None: it can"""
        self.format: ResponseFormat | None = None
        """what its next token may be, where the sampling has a grammar and it has joined"""
        self.finish: Finish | None = None
        if partial is not None:
            self.tokens += partial.token_ids.tolist()
            self._log_probs += partial.log_prob.tolist()
            self._versions += partial.version.tolist()
            if partial.kept is not None:
                self._kept += partial.kept.sets()
            if partial.routes is not None:
                self._routes.append(partial.routes)
                self._routed_by = int(partial.version.max(initial=-1))
            if partial.finish == "stop":
                self.finish = "stop"
            elif len(self._versions) >= self.sampling.max_tokens:
                self.finish = "length"
        self._random: list[float] = uniforms(request.seed, self.sampling.max_tokens).tolist()

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt."""
        return self.tokens[: self._prompt]

    @property
    def response(self) -> list[int]:
        """Tokens of the response so far."""
        return self.tokens[self._prompt :]

    def place(self, positions: NDArray[np.int64] | None) -> None:
        """Take the positions of the prompt's tokens, where they are not their order."""
        self.positions = positions
        if positions is not None:
            self.shift = int(positions.max()) + 1 - self._prompt

    @property
    def random(self) -> float:
        """The random number of the next position."""
        return self._random[len(self._versions)]

    def add(
        self,
        token: int,
        log_prob: float,
        version: int,
        kept: NDArray[Any],
        stops: frozenset[int],
    ) -> bool:
        """Add a token, drawn from the ``kept`` ones (empty: from the whole vocabulary); return
        whether the response is finished."""
        self.tokens.append(token)
        if self.format is not None:
            self.format.accept(token)
        self._log_probs.append(log_prob)
        self._versions.append(version)
        if self.sampling.truncates:
            self._kept.append(kept)
        if token in stops or self._is_stopped():
            self.finish = "stop"
        elif len(self._versions) == self.sampling.max_tokens:
            self.finish = "length"
        return self.finish is not None

    def read_routes(self, routes: Routes, version: int) -> None:
        """Take the routes of the row's first tokens, as weights of this version have computed them:
        of those that are not known, and of all where the others are of older weights."""
        if not self.sampling.routing_replay:
            return
        if version > self._routed_by:
            self._routes = []
        known = sum(map(len, self._routes))
        self._routes.append(routes[known:])
        self._routed_by = max(version, self._routed_by)

    def add_routes(self, routes: Routes) -> None:
        """Take the routes of the row's last token ``[1, layers, k]``."""
        if self.sampling.routing_replay:
            self._routes.append(routes)

    def _is_stopped(self) -> bool:
        """Whether the newest token ends the response by the request's own settings."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return True
        texts = self._stop_texts
        return texts is not None and texts.ended(self.tokens, self._prompt)

    def generated(self) -> Generated:
        """Return the response so far; its ``finish`` is ``abort`` unless it is finished."""
        told = self.sampling.truncates and len(self._kept) == len(self._versions)
        routed = self._routes and sum(map(len, self._routes)) == len(self.tokens) - 1
        return Generated(
            token_ids=np.array(self.tokens[self._prompt :], np.int32),
            log_prob=np.array(self._log_probs, np.float32),
            version=np.array(self._versions, np.int32),
            finish=self.finish or "abort",
            kept=Kept.of(self._kept) if told else None,
            routes=np.concatenate(self._routes) if routed else None,
        )


Masks = Tensor | dict[str, Tensor]


def layer_kinds(config: Any) -> list[str]:
    """Return the kinds of layers that a model has, as its configuration names them.

    Raises:
        ValueError: it has layers that do not attend to keys and values (recurrent ones).
    """
    kinds: list[str] = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in LAYER_KINDS]
    if unknown:
        raise ValueError(
            f"the model ({config.model_type}) has layers of kind {unknown}; the transformers "
            f"engine supports {list(LAYER_KINDS)} only: use the vllm engine"
        )
    if kinds:
        return kinds
    return ["sliding_attention" if _window(config) else "full_attention"]


def make_masks(config: Any, kinds: list[str], at: Tensor, width: int, dtype: torch.dtype) -> Masks:
    """Mask what comes later, and what lies outside the window.

    Masks are added to scores: 0, or the lowest number where masked. The library takes one of four
    dimensions ``[rows, 1, new, seen]`` as it is; a model with layers of several kinds takes one for
    each kind.

    Args:
        config: the model's configuration.
        kinds: kinds of the model's layers.
        at: ``[rows, new]`` (rows may be 1): the position of each query token.
        width: positions of keys.
        dtype: dtype of the model.
    """
    seen = torch.arange(width, device=at.device)
    look = seen <= at[:, None, :, None]
    masks = {}
    for kind in kinds:
        window = _window(config) if kind == "sliding_attention" else None
        within = look if window is None else look & (seen > at[:, None, :, None] - window)
        masks[kind] = torch.zeros(within.shape, dtype=dtype, device=at.device).masked_fill_(
            ~within, torch.finfo(dtype).min
        )
    return masks if len(masks) > 1 else masks[kinds[0]]


def _window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


ROWS: Final = 4
"""rows of a step on the CPU, at least: fewer are multiplied as vectors, which rounds differently"""
SPAN: Final = 16
"""positions that are attended to are a multiple of this: floats of the widest vector unit"""


class BatchDecoder:
    """Decodes rows that join and leave between steps.

    Args:
        model: a Hugging Face causal language model.
        stop_token_ids: tokens that end a response.
        prefill_tokens: most tokens of prompts in one forward pass, padding included.
        processor: of a model that sees images; None: it does not.
        formats: those that responses may have; None: no request asks for one.
    """

    def __init__(
        self,
        model: nn.Module,
        stop_token_ids: frozenset[int],
        prefill_tokens: int,
        processor: ImageProcessor | None = None,
        formats: ResponseFormats | None = None,
    ) -> None:
        self.model = model
        self._formats = formats
        self._processor = processor
        self.tensors = ModelTensors(model)
        self.version = -1
        self.takes_adapter = False
        """whether updates are adapters (LoRA) alone, over the weights that are there"""
        self._config = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
        self._kinds = layer_kinds(self._config)
        self._stops = stop_token_ids
        self._prefill_tokens = prefill_tokens
        self._cache = RowCache()
        self._routes = RecordedRoutes(model)
        self.rows: list[DecodedRow] = []
        self._rules: Rules | None = None
        self._read_device()

    def move(self, device: str) -> None:
        """Move the model to the device, and release the cache. There are no rows."""
        self._cache.clear()
        self.model.to(device)
        torch.cuda.empty_cache()  # torch keeps what is freed; nothing happens without CUDA
        self._read_device()

    def _read_device(self) -> None:
        """Keep device and dtype, which every step needs."""
        first: Tensor = next(self.model.parameters())
        self.device, self._dtype = first.device, first.dtype
        self._least = ROWS if self.device.type == "cpu" else 1

    @torch.inference_mode()
    def join(self, rows: Sequence[DecodedRow]) -> list[DecodedRow]:
        """Compute the keys and values of these rows' tokens, but of each one's last; return those
        that cannot begin (`DecodedRow.failure`)."""
        failed = [row for row in rows if not self._has_format(row)]
        rows = [row for row in rows if row.failure is None]
        for row in rows:
            if row.images and row.positions is None:
                prompt = SeeingPrompt(0, np.array(row.prompt), row.images)
                row.place(prompt_positions(prompt, self._processor))
        waiting = sorted(rows, key=lambda row: len(row.tokens))
        while waiting:
            count = 1
            while (
                count < len(waiting)
                and (count + 1) * _spanned(len(waiting[count].tokens)) <= self._prefill_tokens
            ):
                count += 1
            self._prefill(waiting[:count])
            waiting = waiting[count:]
        self._rules = None
        return failed

    def _has_format(self, row: DecodedRow) -> bool:
        """Begin its format, where it has one; whether it can."""
        if row.sampling.grammar and row.format is None:
            assert self._formats is not None
            try:
                row.format = self._formats.begin(row.sampling.grammar, row.name, row.response)
            except (ValueError, ModelOutputError, MissingExtra) as error:
                row.failure = error
        return row.failure is None

    def _allowed(self) -> Tensor | None:
        """The tokens ``[rows, vocabulary]`` that the formats of the rows allow; None: there are no
        formats. A row that cannot go on fails alone."""
        formats = [row.format for row in self.rows]
        if self._formats is None or not any(formats):
            return None
        found = self._formats.possible(formats)
        for at in (~found.any(-1)).nonzero().flatten().tolist():
            stuck = formats[at]
            assert stuck is not None
            self.rows[at].failure = self._formats.no_token(stuck)
            found[at] = True  # whatever is drawn is dropped
        return found.to(self.device)

    @torch.inference_mode()
    def leave(self, rows: Sequence[DecodedRow]) -> None:
        """Remove rows."""
        for row in rows:
            place, last = self.rows.index(row), self.rows.pop()
            if last is not row:
                self._cache.move(len(self.rows), place, len(last.tokens) - 1)
                self.rows[place] = last
        self._rules = None

    @torch.inference_mode()
    def step(self) -> list[DecodedRow]:
        """Add a token to each row; remove and return the rows that are finished or have failed."""
        if self._rules is None:
            self._rules = Rules.of([row.sampling for row in self.rows], self.device)
        count = len(self.rows)
        filling = [0] * (self._least - count)  # their places in the cache are of no row
        last = torch.tensor([*(row.tokens[-1] for row in self.rows), *filling], device=self.device)
        at = torch.tensor(
            [*(len(one.tokens) - 1 for one in self.rows), *filling], device=self.device
        )
        width = _spanned(max(len(row.tokens) for row in self.rows))
        self._cache.step(at, width)
        self._routes.want(self.rows)
        shifts = [*(row.shift for row in self.rows), *filling]
        positions = (
            (at + torch.tensor(shifts, device=self.device))[:, None] if any(shifts) else None
        )
        logits = self._forward(last[:, None], at[:, None], width, 1, positions=positions)[
            :count, -1
        ]
        if (routes := self._routes.take()) is not None:
            for number, row in enumerate(self.rows):
                row.add_routes(routes[number : number + 1])
        numbers = [row.random for row in self.rows]
        random = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        drawn = draw(logits, self._rules, random, self._seen(logits), self._allowed())
        kept = [NOTHING] * count if drawn.kept is None else kept_sets(drawn.kept)
        done = [
            row
            for row, token, log_prob, one in zip(
                self.rows, drawn.tokens.tolist(), drawn.log_probs.tolist(), kept, strict=True
            )
            if row.failure or row.add(token, log_prob, self.version, one, self._stops)
        ]
        if done:
            self.leave(done)
        return done

    def _seen(self, logits: Tensor) -> Tensor | None:
        """Tokens of prompt and response, ``[rows, vocabulary]``, of rows that are penalised."""
        if self._rules is None or self._rules.penalty is None:
            return None
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for at, row in enumerate(self.rows):
            if row.sampling.repetition_penalty != 1.0:
                seen[at, torch.tensor(row.tokens, device=self.device)] = True
        return seen

    def load(self, update: WeightUpdate) -> int:
        """Take new weights between two steps; running rows keep their tokens, and the cache is
        computed anew. Return the checksum; raises what `load_weights` does."""
        refuse_older(update.version, self.version)
        check_kind(update, adapter=self.takes_adapter)
        checksum = load_weights(update, self.model, self.tensors)
        self.version = update.version
        if self.rows:
            rows, self.rows = self.rows, []
            self.join(rows)
        return checksum

    @torch.inference_mode()
    def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return the log-probs ``[R]`` at temperature 1 of each ``(prompt [P], response [R])``."""
        found: list[Floats] = []
        for prompt, response in sequences:
            tokens = np.concatenate([prompt, response]).astype(np.int64)
            ids = torch.from_numpy(tokens).to(self.device)[None]
            at = torch.arange(len(tokens), device=self.device)[None]
            logits = self._forward(ids, at, len(tokens), 0, cached=False)[0].float()
            after = logits[len(prompt) - 1 : -1].log_softmax(-1)
            picked = after.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            found.append(picked.cpu().numpy())
        return found

    def _prefill(self, rows: Sequence[DecodedRow]) -> None:
        # Samples of one prompt share their tokens: each different one is computed once.
        numbers: dict[tuple[tuple[int, ...], Images], int] = {}
        source = [
            numbers.setdefault((tuple(row.tokens[:-1]), row.images), len(numbers)) for row in rows
        ]
        longest = max(len(tokens) for tokens, _ in numbers)
        if longest:
            width = _spanned(longest)
            padded = np.zeros((len(numbers), width), np.int64)
            for (tokens, _), number in numbers.items():
                padded[number, : len(tokens)] = tokens
            ids = torch.from_numpy(padded).to(self.device)
            # Padding is on the right: no token looks at it, and later ones overwrite it.
            # Its positions stay below those that the model knows.
            at = torch.arange(width, device=self.device).clamp_(max=longest - 1)[None]
            self._cache.join(len(self.rows), torch.tensor(source, device=self.device), width)
            self._routes.want(rows)
            seen = {number: row for number, row in zip(source, rows, strict=True) if row.images}
            self._forward(
                ids,
                at,
                width,
                1,
                embedded=self._embedded(ids, seen),
                positions=_grid_positions(at.expand_as(ids), seen),
            )
            if (routes := self._routes.take()) is not None:
                for number, row in zip(source, rows, strict=True):
                    first = slice(number * width, number * width + len(row.tokens) - 1)
                    row.read_routes(routes[first], self.version)
        self.rows += rows

    def _embedded(self, ids: Tensor, seen: Mapping[int, DecodedRow]) -> Tensor | None:
        """Return the embeddings ``[rows, T, hidden]`` of rows of which some, by their number, have
        images; None where none has."""
        if not seen:
            return None
        embedded: Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        known: dict[Images, Tensor] = {}
        for number, row in seen.items():
            prompt = SeeingPrompt(0, np.array(row.prompt), row.images)
            inputs = image_inputs([prompt], self._processor, self.device)
            assert inputs is not None  # the row has images
            # Each prompt's by themselves: others beside them would change their last bits.
            if row.images not in known:
                known[row.images] = image_vectors(self.model, inputs).to(embedded.dtype)
            embedded[number, inputs.places] = known[row.images]
        return embedded

    def _forward(
        self,
        ids: Tensor,
        at: Tensor,
        width: int,
        keep: int,
        *,
        cached: bool = True,
        embedded: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the model; logits ``[rows, keep or all, vocabulary]``. ``embedded``: what it reads in
        place of ``ids``; ``positions``: where they are not the places ``at``."""
        masks = make_masks(self._config, self._kinds, at, width, self._dtype)
        output = self.model(
            **({"input_ids": ids} if embedded is None else {"inputs_embeds": embedded}),
            attention_mask=masks,
            position_ids=at.expand_as(ids) if positions is None else positions,
            past_key_values=self._cache if cached else None,
            use_cache=cached,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits


def _grid_positions(at: Tensor, rows: Mapping[int, DecodedRow]) -> Tensor | None:
    """Return the positions ``[3, rows, T]`` of rows at places ``[rows, T]``, of which some, by
    their number, have positions of their own; None where none has."""
    own = {number: row for number, row in rows.items() if row.positions is not None}
    if not own:
        return None
    found = at.expand(3, -1, -1).clone()
    for number, row in own.items():
        assert row.positions is not None
        length = len(row.tokens) - 1
        placed = torch.from_numpy(with_answer(row.positions, length))
        found[:, number, :length] = placed.to(at.device)
    return found


def _spanned(width: int) -> int:
    """A whole number of `SPAN`, not below ``width``."""
    return -(-width // SPAN) * SPAN
