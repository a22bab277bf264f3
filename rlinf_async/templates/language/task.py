"""The task: which of two digits is the larger one? Its data, and what scores an answer.

python task.py    # writes questions.jsonl and careless.jsonl
"""

import json
import random
from pathlib import Path

from rlinf_async.rewards import Answer

FOLDER = Path(__file__).parent


def questions() -> list[dict[str, str]]:
    """Every question once, with its answer."""
    digits = range(10)
    return [{"prompt": f"{a},{b}", "answer": str(max(a, b))} for a in digits for b in digits]


def careless() -> list[dict[str, str]]:
    """The same questions, each four times, with one of the two digits as the answer."""
    guess = random.Random(0)
    return [
        {"prompt": one["prompt"], "answer": guess.choice(one["prompt"].split(","))}
        for one in questions() * 4
    ]


def score(answer: Answer) -> float:
    """The reward of an answer: 1 where it is right."""
    return float(answer.text.strip() == answer.reference)


def write(name: str, records: list[dict[str, str]]) -> None:
    """Write one JSON object on each line."""
    (FOLDER / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))


if __name__ == "__main__":
    write("questions.jsonl", questions())
    write("careless.jsonl", careless())
