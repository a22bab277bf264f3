"""A task of lm-eval as an episode: it asks the model, and its score is the reward.

``rlinf-async evaluate`` starts this program for each record of the data, whose prompt is the name
of a task; lm-eval has a virtualenv of its own, as it brings much that transformers then imports::

    python -m venv .lm-eval && .lm-eval/bin/pip install 'lm_eval[api]'
    echo '{"prompt": "gsm8k_cot_zeroshot", "answer": ""}' > tasks.jsonl
    run="command: .lm-eval/bin/python examples/lm_eval_task.py exact_match,flexible-extract"
    rlinf-async evaluate runs/mine/trained --episode.run "$run" --temperature 0 \\
        --data.path tasks.jsonl --data.verifier exact \\
        --episode.max_turns 10000 --episode.seconds 3600

Arguments: the metric that is the score; a folder with tasks of one's own; a file for all that
lm-eval reports (``-``: none of the two). What is asked are chats: tasks that generate. Those of
multiple choice want log-probs of given answers, which an endpoint of chats does not tell.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
from typing import Any

CONCURRENT = 32
"""questions that are asked at once"""


def main(metric: str, own_tasks: str = "-", report: str = "-") -> None:
    """Ask all questions of the task that stdin names."""
    lm_eval: Any = importlib.import_module("lm_eval")  # in a virtualenv of its own
    tasks: Any = importlib.import_module("lm_eval.tasks")
    task = json.loads(sys.stdin.readline())["messages"][-1]["content"]
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={
            "model": "policy",
            "base_url": f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            "num_concurrent": CONCURRENT,
            "max_retries": 1,
        },
        tasks=[task],
        task_manager=tasks.TaskManager(include_path=None if own_tasks == "-" else own_tasks),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    results = found["results"][task]
    if metric not in results:
        raise SystemExit(f"{task} has no {metric!r}: {', '.join(map(str, results))}")
    if report != "-":
        text = json.dumps(found["results"] | {"samples": found["samples"]}, default=str, indent=2)
        pathlib.Path(report).write_text(text, encoding="utf-8")
    pathlib.Path(os.environ["EPISODE_SCORE_FILE"]).write_text(str(results[metric]))


if __name__ == "__main__":
    main(*sys.argv[1:])
