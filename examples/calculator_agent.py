"""An agent with a calculator: ``rlinf-async train examples/calculator_agent.toml``."""

import ast
import operator
import re
from typing import Any

from rlinf_async.episodes import Episode, Parsed, ToolCall, tool

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@tool(seconds=5, output=64)
async def calc(expression: str) -> str:
    """Evaluate an arithmetic expression of whole numbers."""
    return str(value(ast.parse(expression, mode="eval").body))


def value(node: ast.expr) -> int:
    """The value of an expression; ValueError for what is no sum or product of whole numbers."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            found: int = OPERATORS[type(op)](value(left), value(right))
            return found
    raise ValueError(f"{ast.unparse(node)} is no arithmetic expression")


async def run(episode: Episode) -> float:
    """Answer a question, with the calculator where the model calls it."""
    chat = episode.chat(tools=[calc])
    while (turn := await chat.turn()).tool_calls:
        await chat.answer(turn)
    episode.metrics["with_calculator"] = float(episode.tool_calls["calc"] > 0)
    return float(turn.text == episode.task.reference)


def parse(text: str) -> Parsed:
    """Read ``calc(3456*7891)``: the model has one token for each character, so calls are short."""
    found = re.fullmatch(r"calc\((.*)\)", text)
    if found is None:
        return Parsed(text=text)
    return Parsed(text="", tool_calls=(ToolCall(name="calc", arguments={"expression": found[1]}),))
