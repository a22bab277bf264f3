"""Makes the data files of the examples of addition, always the same.

    addition.jsonl   every sum of two numbers from 10 to 59, with its answer
    careless.jsonl   the same sums, three of five answered one too high
    pairs.jsonl      the same sums, each with the right answer and one that is one too high

A model that imitates the careless answers adds well and answers wrongly; only the verifier, or
whoever has chosen among two answers, knows better. The files agree line by line, so the lines that
are held out are the same in all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUMBERS = range(10, 60)
CARELESS = 0.6
FOLDER = Path(__file__).parent


def main() -> None:
    chance = random.Random(0)
    sums = [(a, b) for a in NUMBERS for b in NUMBERS]
    chance.shuffle(sums)
    with (
        (FOLDER / "addition.jsonl").open("w") as right,
        (FOLDER / "careless.jsonl").open("w") as careless,
        (FOLDER / "pairs.jsonl").open("w") as pairs,
    ):
        for a, b in sums:
            one_too_high = chance.random() < CARELESS
            for file, answer in ((right, a + b), (careless, a + b + one_too_high)):
                file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(answer)}) + "\n")
            pair = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            pairs.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main()
