"""`Decoder`: the rows that are decoded together, one token each at a time.

::

    join(rows) --prefill--> rows 0 .. n-1 --step--> one token each --> finished rows leave
                                 ^
              load(update): new weights; the cache is recomputed from each row's tokens

Runs in one thread. Invariant: the cache holds, for each row, all of its tokens but the last one,
under the weights that are loaded; the next step feeds that last one.

Which rows are together depends on when requests arrive, so it must not show in what a row gets, not
by its last bit: a token drawn near a border would be another one, and two runs from one seed would
part. On the CPU, in float32, it does not, as rows are computed each by itself: the libraries take
another order of summation only for fewer than `ROWS` rows, and for keys beyond a whole number of
`SPAN`, so there is filling up to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.backends.transformers.cache import RowCache
from rlinf_async.backends.transformers.masks import layer_kinds, make_masks
from rlinf_async.backends.transformers.model import load_weights
from rlinf_async.backends.transformers.row import Row
from rlinf_async.backends.transformers.sampling import NOTHING, Rules, draw, kept_sets
from rlinf_async.backends.transformers.tensors import ModelTensors
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Tokens
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights import refuse_older

ROWS: Final = 4
"""rows of a step on the CPU, at least: fewer are multiplied as vectors, which rounds differently"""
SPAN: Final = 16
"""positions that are attended to are a multiple of this: floats of the widest vector unit"""


class Decoder:
    """Decodes rows that join and leave between steps.

    Args:
        model: a Hugging Face causal language model.
        stop_token_ids: tokens that end a response.
        prefill_tokens: of prompts in one forward pass, padding included.
    """

    def __init__(
        self, model: nn.Module, stop_token_ids: frozenset[int], prefill_tokens: int
    ) -> None:
        self.model = model
        self.tensors = ModelTensors(model)
        self.version = -1
        self._config = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
        self._kinds = layer_kinds(self._config)
        self._stops = stop_token_ids
        self._prefill_tokens = prefill_tokens
        self._cache = RowCache()
        self.rows: list[Row] = []
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
    def join(self, rows: Sequence[Row]) -> None:
        """Compute the keys and values of these rows' tokens, but of each one's last."""
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

    @torch.inference_mode()
    def leave(self, rows: Sequence[Row]) -> None:
        """Remove rows."""
        for row in rows:
            place, last = self.rows.index(row), self.rows.pop()
            if last is not row:
                self._cache.move(len(self.rows), place, len(last.tokens) - 1)
                self.rows[place] = last
        self._rules = None

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Add a token to each row; remove and return the finished rows."""
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
        logits = self._forward(last[:, None], at[:, None], width, 1)[:count, -1]
        random = [row.random for row in self.rows]
        drawn = draw(
            logits, self._rules, torch.tensor(random, dtype=torch.float64, device=self.device)
        )
        kept = [NOTHING] * count if drawn.kept is None else kept_sets(drawn.kept)
        done = [
            row
            for row, token, log_prob, one in zip(
                self.rows, drawn.tokens.tolist(), drawn.log_probs.tolist(), kept, strict=True
            )
            if row.add(token, log_prob, self.version, one, self._stops)
        ]
        if done:
            self.leave(done)
        return done

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recompute the cache of all rows, after the weights have changed."""
        rows, self.rows = self.rows, []
        self.join(rows)

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

    def _prefill(self, rows: Sequence[Row]) -> None:
        # Samples of one prompt share their tokens: each different one is computed once.
        numbers: dict[tuple[int, ...], int] = {}
        source = [numbers.setdefault(tuple(row.tokens[:-1]), len(numbers)) for row in rows]
        longest = max(len(tokens) for tokens in numbers)
        if longest:
            width = _spanned(longest)
            padded = np.zeros((len(numbers), width), np.int64)
            for tokens, number in numbers.items():
                padded[number, : len(tokens)] = tokens
            ids = torch.from_numpy(padded).to(self.device)
            # Padding is on the right: no token looks at it, and later ones overwrite it.
            # Its positions stay below those that the model knows.
            at = torch.arange(width, device=self.device).clamp_(max=longest - 1)[None]
            self._cache.join(len(self.rows), torch.tensor(source, device=self.device), width)
            self._forward(ids, at, width, 1)
        self.rows += rows

    def _forward(
        self, ids: Tensor, at: Tensor, width: int, keep: int, *, cached: bool = True
    ) -> Tensor:
        """Run the model; logits ``[rows, keep or all, vocabulary]``."""
        masks = make_masks(self._config, self._kinds, at, width, self._dtype)
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=at.expand_as(ids),
            past_key_values=self._cache if cached else None,
            use_cache=cached,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits


def _spanned(width: int) -> int:
    """A whole number of `SPAN`, not below ``width``."""
    return -(-width // SPAN) * SPAN


def load(decoder: Decoder, update: WeightUpdate) -> int:
    """Take new weights between two steps; running rows keep their tokens. See `load_weights`."""
    refuse_older(update.version, decoder.version)
    checksum = load_weights(update, decoder.model, decoder.tensors)
    decoder.version = update.version
    if decoder.rows:
        decoder.recompute()
    return checksum
