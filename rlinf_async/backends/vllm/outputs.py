"""vLLM's outputs as `Generated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rlinf_async.messages.language import Generated, Request


class Output(NamedTuple):
    """The fields of vLLM's ``CompletionOutput`` that are used here."""

    token_ids: Sequence[int]
    logprobs: Any
    weight_versions: Any
    finish_reason: Literal["stop", "length", "abort"]


def collected(llm: Any, running: Mapping[str, Request]) -> dict[str, Generated]:
    """Return the tokens that each request has by now, by its name.

    The library returns a response when it is complete, but collects its tokens in this process, in
    the states that are read here.

    Args:
        llm: an ``AsyncLLM``.
        running: the requests, by the library's request id.
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
            found[request.name] = joined(request.partial, made)
    return found


def joined(partial: Generated | None, output: Any) -> Generated:
    """Return the response: the tokens of the partial one, and those of the engine."""
    tokens = np.array(output.token_ids, np.int32)
    log_probs = np.array(output.logprobs.logprobs if len(tokens) else [], np.float32)
    versions = np.empty(len(tokens), np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if partial is not None:
        tokens = np.concatenate([partial.token_ids, tokens])
        log_probs = np.concatenate([partial.log_prob, log_probs])
        versions = np.concatenate([partial.version, versions])
    finish: Literal["stop", "length", "abort"] = output.finish_reason
    return Generated(token_ids=tokens, log_prob=log_probs, version=versions, finish=finish)
