"""Makes the two data files of ``calculator_agent.toml``, always the same.

    products.jsonl        products of two numbers of four digits, with their answers
    demonstrations.jsonl  the same kind of products, answered step by step: in three of ten cases
                          with the calculator, whose result is then told; in the others with a guess

Products of four digits are too many to be learned by heart, so a model without the calculator
answers none of those that were held out.
"""

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PRODUCTS = 4000
WITH_CALCULATOR = 0.3
TOOLS = {"role": "system", "content": "calc"}
"""what the chat template writes where the conversation has this tool"""


def product(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    one, other = rng.randint(1000, 9999), rng.randint(1000, 9999)
    return f"{one}*{other}", str(one * other)


def demonstrations(question: str, answer: str, rng: random.Random) -> list[dict[str, Any]]:
    """What the model is to say to the question, and to the result of the calculator."""
    asked = [TOOLS, {"role": "user", "content": question}]
    call = f"calc({question})"
    told = [
        *asked,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": answer},
    ]
    guess = f"~{answer[:2]}{'0' * (len(answer) - 2)}"
    first = call if rng.random() < WITH_CALCULATOR else guess
    return [{"prompt": asked, "answer": first}, {"prompt": told, "answer": answer}]


def main() -> None:
    """Write both files."""
    rng = random.Random(0)
    with (FOLDER / "products.jsonl").open("w") as file:
        for _ in range(PRODUCTS):
            question, answer = product(rng)
            file.write(json.dumps({"prompt": question, "answer": answer}) + "\n")
    with (FOLDER / "demonstrations.jsonl").open("w") as file:
        for _ in range(PRODUCTS // 2):
            for one in demonstrations(*product(rng), rng):
                file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
