"""The task of the GRPO bench: write as many letters as the prompt says, then stop.

    23=  ->  bbbbbbbbbbbbbbbbbbbbbbb<end>

The numbers are long-tailed (log-normal, median 20, at most 120), so the responses of one step end
at very different times. The reward is 1 minus the relative error of the length, at least 0; letters
other than ``b`` count as errors. Only the standard library is used here: all sides import it.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

MEDIAN, SIGMA, LONGEST = 20, 0.7, 120
MAX_TOKENS = 128
GROUP = 8
LR = 1e-4
CLIP = 0.2
MAX_GRAD_NORM = 1.0
LORA_RANK, LORA_ALPHA, LORA_LR = 8, 16, 1e-3
LAST = 4
"""steps over which the reward at the end is averaged"""


class Size(NamedTuple):
    """How much is trained, and on what."""

    hidden: int
    layers: int
    intermediate: int
    warm_steps: int
    """supervised, before the bench: all sides start from their result"""
    prompts: int
    """of one optimizer step, each with a group of responses"""
    steps: int

    @property
    def samples(self) -> int:
        """Of one optimizer step."""
        return self.prompts * GROUP


SIZES = {
    "full": Size(256, 6, 832, warm_steps=60, prompts=16, steps=12),
    "small": Size(64, 1, 128, warm_steps=2, prompts=2, steps=2),
}
"""5 million parameters, and a small mode that only shows that everything runs"""


def numbers(count: int, seed: int) -> list[int]:
    """Long-tailed numbers of letters."""
    chance = random.Random(seed)
    drawn = (round(chance.lognormvariate(0.0, SIGMA) * MEDIAN) for _ in range(count))
    return [max(1, min(LONGEST, number)) for number in drawn]


def prompt(number: int) -> str:
    """What the model is asked."""
    return f"{number}="


def right(number: int) -> str:
    """The right response."""
    return "b" * number


def reward(text: str, number: int) -> float:
    """Between 0 and 1."""
    wrong = abs(len(text) - number) + sum(letter != "b" for letter in text)
    return max(0.0, 1.0 - wrong / number)


def score(answer: Any) -> float:
    """The same, as our verifier: the reference is the number."""
    return reward(answer.text, int(answer.reference))
