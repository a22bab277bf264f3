"""How good the model is now: greedy answers to held-out tasks, through the same workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from rlinf_async.channels import Sender
from rlinf_async.messages.language import Prompt, Request, Sampling, Scored, ScoredSample
from rlinf_async.runtime.jobs.language.collector import Collector


class Evaluated(NamedTuple):
    """What came of one evaluation."""

    accuracy: float | None
    """mean reward of the samples that were scored; None where none was"""
    samples: int
    """that were scored"""
    unscored: int
    """that the verifier rejected or failed on"""


async def evaluate(
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    version: int,
    requests: Sender[Request],
    collector: Collector,
) -> Evaluated | None:
    """Have every prompt answered once, greedily, by weights of at least this version.

    None where there is no prompt.
    """
    if not prompts:
        return None
    greedy = Sampling(max_tokens=max_tokens, temperature=0.0)
    wanted = [
        Request(
            group=-1 - position,  # never that of a sample to train on
            index=version,
            group_size=1,
            iteration=version,
            min_version=version,
            prompt=prompt,
            sampling=greedy,
            seed=position,
            evaluation=True,
        )
        for position, prompt in enumerate(prompts)
    ]
    expected = collector.expect(wanted)
    for request in wanted:
        await requests.put(request)
    return _summed_up(await asyncio.gather(*expected))


def _summed_up(answers: Sequence[ScoredSample]) -> Evaluated:
    rewards = [one.outcome.reward for one in answers if isinstance(one.outcome, Scored)]
    accuracy = sum(rewards) / len(rewards) if rewards else None
    return Evaluated(accuracy, len(rewards), len(answers) - len(rewards))
