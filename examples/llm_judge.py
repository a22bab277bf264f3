"""A judge that is a language model, behind any server that speaks OpenAI's chat completions.

In a configuration::

    [data]
    verifier = "examples/llm_judge.py:graded"

    [reward]
    processes = 1
    time_limit = 60.0
    environment = ["JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY"]
    cache = 10000

The verifier is a coroutine function: a process has up to ``reward.calls`` requests open. A server
that is busy or breaks down is asked again (``reward.retries``); a grade that cannot be read fails
the sample, and is no reward of 0.
"""

from __future__ import annotations

import itertools
import os
import re

import httpx

from rlinf_async.rewards import Answer, Retry, Scored

PROMPT = """\
Grade the answer to a question from 0 (wrong) to 10 (right and clear).
Question: {question}
Right answer: {reference}
Answer to grade: {answer}
Think briefly, then end with a line "Grade: N"."""

DOLLARS_PER_TOKEN = 0.6e-6
"""price of a token that the judge reads or writes"""

tls = httpx.create_ssl_context()
clients = itertools.cycle(
    httpx.AsyncClient(
        base_url=os.environ.get("JUDGE_URL", "http://localhost:8000/v1"),
        headers={"Authorization": f"Bearer {os.environ.get('JUDGE_KEY', '')}"},
        timeout=None,  # reward.time_limit ends a request that takes too long
        limits=httpx.Limits(max_connections=None),  # reward.calls limits them
        verify=tls,
    )
    for _ in range(64)
)
"""clients in turn: one looks through all of its connections for each request, which would take ten
times as long with 256 connections of a single client"""


async def graded(answer: Answer) -> Scored:
    """The judge's grade, as a reward between 0 and 1."""
    asked = PROMPT.format(question=answer.prompt, reference=answer.reference, answer=answer.text)
    reply = await next(clients).post(
        "/chat/completions",
        json={
            "model": os.environ.get("JUDGE_MODEL", "judge"),
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0.0,
        },
    )
    if reply.status_code == 429 or reply.status_code >= 500:
        after = reply.headers.get("Retry-After", "")
        raise Retry(f"HTTP {reply.status_code}", after=float(after) if after.isdigit() else 0.0)
    reply.raise_for_status()
    body = reply.json()
    grades = re.findall(r"Grade: *(\d+)", body["choices"][0]["message"]["content"])
    if not grades:
        raise ValueError("the judge gave no grade")
    return Scored(
        reward=min(int(grades[-1]), 10) / 10,
        cost=body["usage"]["total_tokens"] * DOLLARS_PER_TOKEN,
    )
