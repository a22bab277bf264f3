"""The modules that are sharded: a Hugging Face decoder with a head for log-probs or for values.

Everything that computes with parameters runs inside ``forward`` of the outermost module: only there
are sharded parameters whole.

Log-probs and entropies come from hidden states without holding all logits at once. With ``z = h W^T
+ b`` and, where the model caps them, ``c tanh(z / c)``, with its bias (`LogitBias`), times the
inverse temperature: ``l``, and minus infinity where a token was not drawn from (`KeptTokens`). Then
``log p = l - logsumexp(l)``, and ``H = -sum p log p``. The gradients are written out::

    d log p_t / d l_j = [j = t] - p_j          d H / d l_j = -p_j (log p_j + H)

Log-probs of further tokens (`AskedTokens`) are held, ``N x k`` of them: that is all logits where
the whole vocabulary is asked for.

Logits that fit ``chunk_bytes`` are kept for the backward pass; more are computed chunk by chunk,
and again in the backward pass, so that memory does not grow with tokens x vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlinf_async.backends.language import UnsupportedModel, sees_images, supported_families
from rlinf_async.backends.language_training.objective import (
    AskedTokens,
    KeptTokens,
    LogitBias,
    PackedTokens,
    TokenStatistics,
)
from rlinf_async.backends.transformers.images import image_vectors, vain_vectors
from rlinf_async.backends.transformers.routing import ReplayedRoutes
from rlinf_async.backends.transformers.tensors import ModelTensors

FLOAT_BYTES = 4


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    *,
    kept: KeptTokens | None = None,
    asked: AskedTokens | None = None,
    bias_of_logits: LogitBias | None = None,
    softcap: float | None = None,
    chunk_bytes: int = 256 * 1024 * 1024,
) -> TokenStatistics:
    """Return log-probs and entropies.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        targets: ``[N]``, int64.
        scale: ``[N]``: of the logits; 1 / temperature.
        kept: what each target was drawn from; None: the whole vocabulary.
        asked: other tokens whose log-probs are returned, too.
        bias_of_logits: with which each target was drawn.
        softcap: logits are held within it, smoothly.
        chunk_bytes: bytes of float32 logits at a time.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        log_prob, entropy, of_asked, ids = _Statistics.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, scale, kept, asked, bias_of_logits, softcap, chunk_bytes
        )
    if asked is None:
        return TokenStatistics(log_prob, entropy)
    return TokenStatistics(log_prob, entropy, of_asked, ids, len(weight))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        kept: KeptTokens | None,
        asked: AskedTokens | None,
        added: LogitBias | None,
        softcap: float | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        rows = max(chunk_bytes // (FLOAT_BYTES * len(weight)), 1)
        log_prob = torch.empty_like(scale)
        entropy = torch.empty_like(scale)
        normalizer = torch.empty_like(scale)
        logits = None
        of_asked: list[Tensor] = []
        ids: list[Tensor] = []
        for start in range(0, max(len(hidden), 1), rows):
            at = slice(start, start + rows)
            logits = _logits(hidden[at], weight, bias, scale[at], softcap)
            if added is not None:
                added.add(logits, start)
            if kept is not None:
                kept.restrict(logits, start)
            normalizer[at] = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[at, None])[:, 0]
            log_prob[at] = chosen - normalizer[at]
            if asked is not None:
                others, which = asked.of(logits, start)
                of_asked.append(others - normalizer[at, None])
                ids += [which] if which is not None else []
            probability = (logits - normalizer[at, None]).exp_()
            finite = logits if kept is None else logits.masked_fill(logits == -torch.inf, 0.0)
            entropy[at] = normalizer[at] - (probability.mul_(finite)).sum(-1)
        held = logits if len(hidden) <= rows else None
        which = torch.cat(ids) if ids else None
        if which is not None:
            ctx.mark_non_differentiable(which)
        ctx.save_for_backward(
            hidden, weight, bias, targets, scale, normalizer, entropy, held, which
        )
        ctx.softcap, ctx.rows, ctx.kept, ctx.added = softcap, rows, kept, added
        ctx.set_materialize_grads(False)
        return log_prob, entropy, torch.cat(of_asked) if of_asked else None, which

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Any, ...]:
        grad_log_prob, grad_entropy, grad_asked, _ = grad_outputs
        hidden, weight, bias, targets, scale, normalizer, entropy, held, ids = ctx.saved_tensors
        # Of all log-probs together: each has the normalizer in it.
        total = torch.zeros_like(scale) if grad_log_prob is None else grad_log_prob
        if grad_asked is not None:
            total = total + grad_asked.sum(-1)
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks, so in float32 whatever the arithmetic is. A frozen head has none.
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        if grad_entropy is not None and not bool(grad_entropy.any()):
            grad_entropy = None
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            logits = held
            if logits is None:
                logits = _logits(hidden[at], weight, bias, scale[at], ctx.softcap)
                if ctx.added is not None:
                    ctx.added.add(logits, start)
                if ctx.kept is not None:
                    ctx.kept.restrict(logits, start)
            log_p = logits - normalizer[at, None]
            grad = log_p.exp()
            if grad_entropy is not None:
                by_entropy = (log_p + entropy[at, None]).mul_(grad_entropy[at, None])
                grad.mul_(by_entropy.add_(total[at, None]).neg_())
            else:
                grad.mul_(-total[at, None])
            if grad_log_prob is not None:
                grad.scatter_add_(-1, targets[at, None], grad_log_prob[at, None])
            if grad_asked is not None and ids is not None:
                grad.scatter_add_(-1, ids[at], grad_asked[at])
            elif grad_asked is not None:
                grad[:, : grad_asked.shape[1]] += grad_asked[at]
            if ctx.softcap is not None:
                own = logits
                if ctx.added is not None:
                    own = logits.clone()
                    ctx.added.add(own, start, sign=-1.0)
                capped = own / (scale[at, None] * ctx.softcap)
                grad.mul_(1.0 - capped.square_())
            if ctx.kept is not None:
                grad.masked_fill_(logits == -torch.inf, 0.0)
            grad = grad.mul_(scale[at, None]).to(hidden.dtype)
            grad_hidden[at] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[at]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, softcap: float | None
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.mul_(scale[:, None])


class LanguageNetwork(nn.Module):
    """A causal language model over packed rows."""

    def __init__(self, language: nn.Module, *, packs: bool) -> None:
        """Take a model of transformers.

        ``packs``: its attention is `packed_attention`; else it separates the samples by positions.
        """
        super().__init__()
        self.language = language
        self._packs = packs
        self._sees = sees_images({"model_type": cast(Any, language).config.model_type})

    def hidden_states(self, packed: PackedTokens) -> Tensor:
        """Return ``[N, D]``: the last hidden states at ``packed.rows``."""
        lengths: dict[str, Any] = {"sample_lengths": packed.lengths} if self._packs else {}
        decoder = cast(Any, self.language).get_decoder()
        read = {"inputs_embeds": self._seen(packed)} if self._sees else {}
        output = decoder(
            **(read or {"input_ids": packed.input_ids}),
            position_ids=packed.position_ids,
            use_cache=False,
            **lengths,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[0].index_select(0, packed.rows)

    def _seen(self, packed: PackedTokens) -> Tensor:
        """Return the embeddings ``[1, T, hidden]`` of tokens and images.

        Without any image the vision tower sees a white one in vain, as all ranks of a sharded model
        have to gather its parameters, and reduce its gradients, at the same time.
        """
        language = cast(Any, self.language)
        embedded: Tensor = language.get_input_embeddings()(packed.input_ids)
        if packed.images is None:
            return embedded + 0.0 * vain_vectors(language).sum()
        vectors = image_vectors(language, packed.images).to(embedded.dtype)
        return embedded.index_copy(1, packed.images.places, vectors[None])


class PolicyNetwork(LanguageNetwork):
    """Computes log-probs and entropies."""

    def __init__(
        self,
        language: nn.Module,
        *,
        packs: bool,
        logit_chunk_bytes: int,
        routing_replay: bool = False,
    ) -> None:
        super().__init__(language, packs=packs)
        self._replay = ReplayedRoutes(language) if routing_replay else None
        self.published = ModelTensors(language).published()
        """tensors of its checkpoints, by name: where each lies in ``language``"""
        self._chunk_bytes = logit_chunk_bytes
        config = cast(Any, language).config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies the logits, Granite divides them.
        multiplied = getattr(config, "logit_scale", None) or 1.0
        self._logit_scale = multiplied / (getattr(config, "logits_scaling", None) or 1.0)

    def forward(self, packed: PackedTokens) -> TokenStatistics:
        """Return log-probs and entropies ``[N]`` of the targets."""
        head = cast(Any, self.language).get_output_embeddings()
        if self._replay is not None:
            self._replay.use(packed.routes)
        found = token_statistics(
            self.hidden_states(packed),
            head.weight,
            head.bias,
            packed.targets,
            packed.inverse_temperature * self._logit_scale,
            kept=packed.kept,
            asked=packed.asked,
            bias_of_logits=packed.bias,
            softcap=self._softcap,
            chunk_bytes=self._chunk_bytes,
        )
        if self._replay is None:
            return found
        return found._replace(rerouted=self._replay.changed(packed.rows))


class ValueNetwork(LanguageNetwork):
    """Computes values: the decoder of a language model and one output, which begins at 0."""

    def __init__(self, language: nn.Module, *, packs: bool) -> None:
        super().__init__(language, packs=packs)
        head = cast(Any, language).get_output_embeddings()
        # The head over the vocabulary has no part in a value; an embedding tied to it stays.
        for name, child in list(language.named_children()):
            if child is head:
                setattr(language, name, nn.Identity())
        self.value_head = nn.Linear(head.in_features, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, packed: PackedTokens) -> Tensor:
        """Return the values ``[N]`` of the states before the targets."""
        value: Tensor = self.value_head(self.hidden_states(packed)).float()
        return value.squeeze(-1).clone()


def check_same_as_transformers(network: PolicyNetwork) -> None:
    """Raise `UnsupportedModel` unless packed log-probs are those of transformers' forward pass.

    Architectures differ in what they do to logits and in what they carry from token to token; one
    that does more than is known here must not be silently trained wrongly.
    """
    language = cast(Any, network.language)
    size = min(language.config.get_text_config().vocab_size, 97)
    device = next(network.parameters()).device
    ids = (torch.arange(1, 12, device=device) * 7) % size
    parts = [ids[:6], ids[6:]]
    packed = PackedTokens(
        torch.cat([part[:-1] for part in parts])[None],
        torch.cat([torch.arange(len(part) - 1, device=device) for part in parts])[None],
        [len(part) - 1 for part in parts],
        torch.arange(9, device=device),
        torch.cat([part[1:] for part in parts]),
        torch.ones(9, device=device),
    )
    with torch.no_grad():
        try:
            found = network(packed).log_prob
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise UnsupportedModel(
                f"a {type(language).__name__} cannot be trained: its forward pass over packed "
                f"samples fails with {type(error).__name__}: {error}. {supported_families()}"
            ) from error
        expected = torch.cat(
            [
                language(input_ids=part[None, :-1], use_cache=False)
                .logits[0]
                .float()
                .log_softmax(-1)
                .gather(-1, part[1:, None])[:, 0]
                for part in parts
            ]
        )
    worst = float((found - expected).abs().max())
    if not worst <= 1e-3:
        raise UnsupportedModel(
            f"a {type(language).__name__} cannot be trained: log-probs of packed samples differ "
            f"from its own forward pass by up to {worst:.3g}. {supported_families()}"
        )
