"""vLLM's outputs as `Generated`."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.vllm.config import asked_log_probs
from rlinf_async.messages.language import Generated, Kept, Request


class Output(NamedTuple):
    """The fields of vLLM's ``CompletionOutput`` that are used here."""

    token_ids: Sequence[int]
    logprobs: Any
    weight_versions: Any
    finish_reason: Literal["stop", "length", "abort"]


def collect_in_arrays(processor: Any) -> None:
    """Have vLLM collect the log-probs of each request in arrays, and no ranks.

    Its own lists of Python's numbers take ten times the memory, until the response ends.

    Args:
        processor: an ``OutputProcessor``.
    """
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        flat = processor.request_states[request.request_id].logprobs_processor.logprobs
        if flat is not None:
            flat.token_ids, flat.logprobs = array("i"), array("f")
            flat.ranks = flat.decoded_tokens = deque(maxlen=0)

    processor.add_request = add_request


def collected(llm: Any, running: Mapping[str, Request], vocabulary: int) -> dict[str, Generated]:
    """Return the tokens that each request has by now, by its name.

    The library returns a response when it is complete, but collects its tokens in this process, in
    the states that are read here.

    Args:
        llm: an ``AsyncLLM``.
        running: the requests, by the library's request id.
        vocabulary: number of tokens.
    """
    found: dict[str, Generated] = {}
    for state in llm.output_processor.request_states.values():
        request = running.get(state.external_req_id)
        if request is not None:
            made = Output(
                state.detokenizer.output_token_ids,
                state.logprobs_processor.logprobs,
                state._weight_version_spans(),
                "abort",
            )
            found[request.name] = joined(request, made, vocabulary)
    return found


def joined(request: Request, output: Any, vocabulary: int) -> Generated:
    """Return the response: the tokens of the partial one, and those of the engine.

    Raises `ModelOutputError` where more tokens were kept than were asked for.
    """
    partial = request.partial
    tokens = np.array(output.token_ids, np.int32)
    flat, starts = output.logprobs, []
    if len(tokens):  # the first entry of each is of the token that was drawn
        starts = flat.start_indices[: len(tokens)]
    log_probs = np.array([flat.logprobs[at] for at in starts], np.float32)
    kept = _kept(request, flat, len(tokens), vocabulary)
    versions = np.empty(len(tokens), np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if partial is not None:
        tokens = np.concatenate([partial.token_ids, tokens])
        log_probs = np.concatenate([partial.log_prob, log_probs])
        versions = np.concatenate([partial.version, versions])
        if kept is not None:
            kept = None if partial.kept is None else partial.kept.followed_by(kept)
    finish: Literal["stop", "length", "abort"] = output.finish_reason
    return Generated(
        token_ids=tokens, log_prob=log_probs, version=versions, finish=finish, kept=kept
    )


def _kept(request: Request, flat: Any, count: int, vocabulary: int) -> Kept | None:
    """Return what each of ``count`` tokens was drawn from: all that have a probability."""
    asked = asked_log_probs(request.sampling, vocabulary)
    if not asked:
        return None
    sets = []
    for at in range(count):
        # Behind the drawn token the most likely ones: sorted, so those without any come last.
        first = flat.start_indices[at] + 1
        likely = np.array(flat.logprobs[first : first + asked], np.float32)
        ids = np.array(flat.token_ids[first : first + asked], np.int64)[likely > -np.inf]
        if len(ids) == asked < vocabulary:
            raise ModelOutputError(
                f"request {request.name} (prompt {request.prompt.index}): at token {at} at least "
                f"{asked} tokens are as likely as the one in place top_k = "
                f"{request.sampling.top_k}, and vLLM keeps them all without telling which: is the "
                "output of the model constant? Use the transformers engine, or no top_k"
            )
        sets.append(ids[:0] if len(ids) == vocabulary else np.sort(ids))
    return Kept.of(sets)
