"""The agent: it is asked for the price of an item, and may look it up. Its data are here, too.

python agent.py    # writes questions.jsonl and demonstrations.jsonl
"""

import json
import random
import re
from pathlib import Path

from rlinf_async.episodes import Episode, Parsed, ToolCall, tool

FOLDER = Path(__file__).parent


def price(item: str) -> int:
    """The price of an item, which nobody can guess: in your project, a database or a service."""
    return random.Random(item).randrange(10, 100)


@tool(seconds=5)
async def look(item: str) -> str:
    """Look up the price of an item."""
    return str(price(item))


async def run(episode: Episode) -> float:
    """One episode: the model answers, or calls the tool and reads what it returns.

    What this returns is the reward. Raise `rlinf_async.rewards.Reject` where there is none.
    """
    chat = episode.chat(tools=[look])
    while (turn := await chat.turn()).tool_calls:
        await chat.answer(turn)
    episode.metrics["looked"] = float(episode.tool_calls["look"] > 0)
    return float(turn.text == episode.task.reference)


def parse(text: str) -> Parsed:
    """Read a tool call such as ``look(372)`` in an answer.

    This tiny model has its own short format. Real models have one that is known by name
    (``tools = "hermes"`` in train.toml): then this function is not needed.
    """
    found = re.fullmatch(r"look\((\w+)\)", text)
    if found is None:
        return Parsed(text=text)
    return Parsed(text="", tool_calls=(ToolCall(name="look", arguments={"item": found[1]}),))


def questions(first: int, last: int) -> list[dict[str, object]]:
    """The price of each item in turn."""
    items = [str(number) for number in range(first, last)]
    return [{"prompt": item, "answer": str(price(item))} for item in items]


def demonstrations() -> list[dict[str, object]]:
    """What the model imitates first: one answer in three looks the price up, the others guess."""
    made = list[dict[str, object]]()
    chance = random.Random(0)
    for number in range(100, 1000):
        item, cost = str(number), str(price(str(number)))
        asked = [{"role": "system", "content": "look"}, {"role": "user", "content": item}]
        called = {"role": "assistant", "content": f"look({item})"}
        told = {"role": "tool", "content": cost}
        guess = f"~{chance.randrange(10, 100)}"
        first = f"look({item})" if chance.random() < 1 / 3 else guess
        made.append({"prompt": asked, "answer": first})
        made.append({"prompt": [*asked, called, told], "answer": cost})
    return made


def write(name: str, records: list[dict[str, object]]) -> None:
    """Write one JSON object on each line."""
    (FOLDER / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))


if __name__ == "__main__":
    write("questions.jsonl", questions(100, 1000))
    write("demonstrations.jsonl", demonstrations())
