"""Somebody else's agent, unchanged: one of ``openai-agents``, with a calculator.

``rlinf-async train examples/black_box_agent.toml`` starts this program for each episode, in a
virtualenv of its own, with the endpoint of the episode in ``OPENAI_BASE_URL`` and its key in
``OPENAI_API_KEY``::

    python -m venv .agents && .agents/bin/pip install openai-agents==0.24.0

It knows nothing of this framework, and neither does its library.
"""

import ast
import json
import operator
import sys

from agents import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    Agent,
    Runner,
    function_tool,
    set_tracing_disabled,
)

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calc(expression: str) -> str:
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


def main() -> None:
    """Answer the question on stdin. No score is written, so the verifier of the data judges."""
    set_tracing_disabled(True)
    agent = Agent(name="calculator", tools=[function_tool(calc)])
    messages = json.loads(sys.stdin.readline())["messages"]
    print("answer:", Runner.run_sync(agent, messages).final_output)


if __name__ == "__main__":
    main()
