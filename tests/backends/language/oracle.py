"""What samples with several turns and branches teach, in plain torch: token by token, no batch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig

Credit = dict[int, float]
"""advantages by position in ``[R]``, of the tokens that the model drew"""


def gradients(
    model: Any, samples: Sequence[Any], advantage: str, loss: LanguageLossConfig
) -> dict[str, Tensor]:
    """Return the gradients of the loss of all samples, by parameter."""
    scored = [one for one in samples if one.scored]
    per_sample = []
    for one, credit in zip(scored, credits_of(scored, advantage), strict=True):
        terms = []
        for prompt, first, last in parts(one):
            ids = torch.tensor([*prompt, *one.response_ids[first:last].tolist()])
            rows = model(input_ids=ids[None]).logits[0] / one.temperature
            for t in range(first, last):
                if not one.drawn[t]:
                    continue
                row, chosen = rows[len(prompt) + t - first - 1], int(one.response_ids[t])
                if one.kept is not None:
                    kept = one.kept.sets()[t].tolist()
                    row, chosen = row[kept], kept.index(chosen)
                log_p = row.log_softmax(-1)
                ratio = (log_p[chosen] - float(one.prev_log_prob[t])).exp()
                held = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
                policy = -torch.minimum(ratio * credit[t], held * credit[t])
                away = float(one.ref_log_prob[t]) - log_p[chosen]
                kl = (away.exp() - 1 - away).clamp(max=loss.k3_limit)
                entropy = -(log_p.exp() * log_p).sum()
                terms.append(policy + loss.kl_coefficient * kl - loss.entropy_coefficient * entropy)
        per_sample.append(torch.stack(terms))
    if loss.aggregation == "token-mean":
        total = torch.cat(per_sample).mean()
    elif loss.aggregation == "sequence-mean-token-mean":
        total = torch.stack([one.mean() for one in per_sample]).mean()
    else:
        total = torch.stack([one.sum() for one in per_sample]).mean()
    model.zero_grad()
    torch.autograd.backward(total)
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def parts(one: Any) -> list[tuple[list[int], int, int]]:
    """Prompt, begin and end of each branch."""
    starts = [0, *(branch.start for branch in one.branches)]
    prompts = [one.prompt_ids, *(branch.prompt_ids for branch in one.branches)]
    ends = [*starts[1:], len(one.response_ids)]
    return [(p.tolist(), a, b) for p, a, b in zip(prompts, starts, ends, strict=True)]


def credits_of(samples: Sequence[Any], name: str) -> list[Credit]:
    """The advantages of these samples."""
    by_name = {"grpo": grpo, "turn_grpo": turn_grpo, "gae": gae}[name]
    found = [by_name([two for two in samples if two.group == one.group], one) for one in samples]
    if name != "gae":
        return found
    every = [number for one in found for number in one.values()]
    mean, deviation = statistics.mean(every), statistics.stdev(every)
    return [{t: (number - mean) / (deviation + 1e-8) for t, number in one.items()} for one in found]


def grpo(group: Sequence[Any], one: Any) -> Credit:
    """The standard score of everything that it earned."""
    score = standard([earned(other, other.turns) for other in group], one.index)
    return dict.fromkeys(range(len(one.response_ids)), score)


def turn_grpo(group: Sequence[Any], one: Any) -> Credit:
    """The standard score of what a turn and later ones earned."""
    found: Credit = {}
    for branch in range(len(parts(one))):
        for at, turn in enumerate(turns_of(one, branch)):
            rest = [earned(other, turns_of(other, branch)[at:]) for other in group]
            found |= dict.fromkeys(range(turn.start, turn.stop), standard(rest, one.index))
    return found


def gae(group: Sequence[Any], one: Any) -> Credit:
    """Temporal-difference errors, added up; gamma and lambda are 1."""
    found: Credit = {}
    for _, first, last in parts(one):
        own = [t for t in range(first, last) if one.drawn[t]]
        running = after = 0.0
        for t in reversed(own):
            reward = one.reward if t == own[-1] else 0.0
            reward += sum(turn.reward or 0.0 for turn in one.turns if turn.stop == t + 1)
            running += reward + after - float(one.value[t])
            after = float(one.value[t])
            found[t] = running
    return found


def turns_of(one: Any, branch: int) -> list[Any]:
    """The turns of one branch; none where there is no such branch."""
    for _, first, last in parts(one)[branch : branch + 1]:
        return [turn for turn in one.turns if first <= turn.start < last]
    return []


def earned(one: Any, turns: Sequence[Any]) -> float:
    """The outcome, and the rewards of these turns."""
    total: float = one.reward + sum(turn.reward or 0.0 for turn in turns)
    return total


def standard(rewards: list[float], at: int) -> float:
    """The standard score of one reward in its group."""
    return (rewards[at] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
