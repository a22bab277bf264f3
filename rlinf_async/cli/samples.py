"""``rlinf-async samples``: what the model of a run said, and what it got for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import click
import numpy as np
from numpy.typing import NDArray

from rlinf_async.cli.runs import as_usage, named
from rlinf_async.config import UsageError
from rlinf_async.observe.samples import KINDS, SampleIndex, extremes

SHOWN: Final = 10
"""newest samples that are shown where no option chooses"""
KNOWN: Final = 8
"""numbers that an error names of those there are"""

_count = click.IntRange(min=1)


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path())
@click.option("--best", type=_count, metavar="N", help="The N with the highest rewards.")
@click.option("--worst", type=_count, metavar="N", help="The N with the lowest rewards.")
@click.option("--last", type=_count, metavar="N", help=f"The N newest; {SHOWN} when left out.")
@click.option("--failed", is_flag=True, help="Those that were not scored, or did not succeed.")
@click.option("--iteration", type=click.IntRange(min=0), help="Those that it trained.")
@click.option("--name", metavar="GROUP[/INDEX]", help="One sample, or all of a prompt.")
@click.option("--kind", type=click.Choice(KINDS), help="What they were made for.")
@click.option("--jsonl", is_flag=True, help="Print records, as JSON, a line each; all by default.")
def samples(
    folder: str | None,
    best: int | None,
    worst: int | None,
    last: int | None,
    failed: bool,
    iteration: int | None,
    name: str | None,
    kind: Literal["training", "evaluation"] | None,
    jsonl: bool,
) -> None:
    """Print samples of the run in DIR: prompt, completion, reward; episodes turn by turn.

    The run may go on. Without DIR: the run under runs/ that was started last. Options that choose
    go together: --iteration 12 --best 5.
    """
    if last is not None and (best or worst):
        raise UsageError("--last chooses by time, --best and --worst by reward: leave one out")
    with as_usage():
        index = SampleIndex(named(folder))
        _check(index, iteration, name)
        chosen = index.choose(iteration=iteration, name=name, failed=failed, kind=kind)
        everything = jsonl or iteration is not None or name is not None
        if best is None and worst is None:
            count = last or (len(chosen) if everything else SHOWN)
            shown = chosen[len(chosen) - min(count, len(chosen)) :]
        else:
            shown = extremes(index, chosen, best, worst)
        if jsonl:
            _write(index.lines(shown.tolist()))
            return
        _write(_readable(index, shown, chosen))


def _check(index: SampleIndex, iteration: int | None, name: str | None) -> None:
    """Refuse what is not there, and say what is."""
    if not len(index):
        raise UsageError(
            f"{index.run}: there are no samples; a run keeps them once its first iteration is "
            "trained, unless samples.keep is 0"
        )
    if iteration is not None and not len(index.choose(iteration=iteration)):
        raise UsageError(
            f"--iteration {iteration}: {index.run} has no samples of it; there are those of "
            f"{_spans(index.iterations)}"
        )
    if name is not None and not len(index.choose(name=name)):
        example = index.read([len(index) - 1])[0]["name"]
        raise UsageError(
            f"--name {name}: {index.run} has no such sample; names are GROUP/INDEX, such as "
            f"{example}"
        )


def _spans(numbers: list[int]) -> str:
    """Numbers in order, as ``0-3, 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans]
    if len(texts) > KNOWN:
        texts = [*texts[: KNOWN - 1], "...", texts[-1]]
    return ", ".join(texts) or "evaluations only"


def _readable(
    index: SampleIndex, shown: NDArray[np.int64], chosen: NDArray[np.int64]
) -> Iterator[bytes]:
    for record in (one for number in shown.tolist() for one in index.read([number])):
        yield f"{described(record)}\n\n".encode()
    if not len(shown):
        yield f"{index.run}: none of {len(index)} samples is such a one\n".encode()
    else:
        yield f"{len(shown)} of {len(chosen)} samples; {len(index)} are kept\n".encode()


def _write(chunks: Iterator[bytes]) -> None:
    """Write to stdout; who reads it may have had enough before the end."""
    out = sys.stdout.buffer
    try:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
    except BrokenPipeError:
        # What is still in the buffer goes nowhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def described(record: Mapping[str, Any]) -> str:
    """Return a record as text for people; control characters of a model's are written out."""
    lines = [_head(record)]
    if "prompt" in record:
        lines += _language(record)
    return "\n".join(lines)


def _head(record: Mapping[str, Any]) -> str:
    reward = record["reward"]
    parts = [
        f"{record['name']}",
        f"evaluation of version {record['iteration']}"
        if record["kind"] == "evaluation"
        else f"iteration {record['iteration']}",
        record["outcome"] if reward is None else f"reward {reward:g}",
    ]
    if "success" in record:
        said = {True: "success", False: "no success", None: ""}[record["success"]]
        parts += [said, f"{record['size']} steps"]
    else:
        parts += [f"{record['size']} tokens", record.get("finish", "")]
    versions = sorted({one for one in record.get("versions", ()) if one >= 0})
    if versions:
        parts.append(f"version {_spans(versions)}")
    if record["kind"] == "training" and not record["trained"]:
        parts.append("not trained on")
    return "== " + ", ".join(part for part in parts if part)


def _language(record: Mapping[str, Any]) -> Iterator[str]:
    yield _labelled("prompt", record["prompt"])
    episode = record.get("episode")
    if episode is None:
        yield _labelled("completion", record["completion"])
    else:
        yield from _episode(record, episode)
    if record["reference"]:
        yield _labelled("reference", record["reference"])
    if record["detail"]:
        yield _labelled(record["outcome"], record["detail"])
    if record["reward_parts"]:
        parts = (f"{name} {value:g}" for name, value in record["reward_parts"].items())
        yield _labelled("reward of", ", ".join(parts))


def _episode(record: Mapping[str, Any], episode: Mapping[str, Any]) -> Iterator[str]:
    branch = 0
    for turn in episode["turns"]:
        if turn["branch"] != branch:
            branch = turn["branch"]
            yield _labelled(f"branch {branch}", episode["branches"][branch - 1]["prompt"])
        reward = "" if turn["reward"] is None else f" (reward {turn['reward']:g})"
        yield _labelled(turn["role"] + reward, turn["text"])
    if not episode["turns"]:
        yield _labelled("completion", record["completion"])
    if episode["tool_calls"]:
        calls = (f"{name} {count}" for name, count in episode["tool_calls"].items())
        yield _labelled("tool calls", ", ".join(calls))
    if episode["tool_failures"]:
        failures = (f"{name} {count}" for name, count in episode["tool_failures"].items())
        yield _labelled("tool failures", ", ".join(failures))
    if episode["cut"]:
        yield _labelled("cut", f"by the limit of {episode['cut']}")


def _labelled(label: str, text: str) -> str:
    """The text after its label; further lines of it are indented."""
    lines = printable(text).split("\n")
    if len(lines) == 1:
        return f"{label}: {lines[0]}"
    return "\n".join([f"{label}:", *(f"  {line}" for line in lines)])


def printable(text: str) -> str:
    """Return the text with its control characters written out, but for line breaks and tabs: what a
    model says must not steer a terminal."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )
