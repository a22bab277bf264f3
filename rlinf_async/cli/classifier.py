"""``rlinf-async classifier``: a classifier of success, learnt from recorded episodes."""

from __future__ import annotations

import pathlib
from typing import Any

import click

from rlinf_async.config import UsageError


@click.command()
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    metavar="FOLDER...",
    type=click.Path(path_type=pathlib.Path, file_okay=False, exists=True),
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="A new folder for the classifier.",
)
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Last steps of an episode that has succeeded, which are successes.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Share of the episodes that it is measured on, and does not learn from.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="Probability from which a step is called a success, in what is measured.",
)
@click.option("--steps", type=click.IntRange(min=1), default=2000, show_default=True)
@click.option("--batch", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def classifier(folders: tuple[pathlib.Path, ...], out: pathlib.Path, **options: Any) -> None:
    """Learn from demonstrations in FOLDER... whether what is shown is a success.

    `env.reward.classifier` names the folder for a run that is paid by it.
    """
    from rlinf_async.backends.success.training import Wanted, train_classifier

    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out}: is not empty; name a new folder")
    made = train_classifier(folders, Wanted(**options))
    made.save(out)
    found = made.info.figures
    others = found.steps - found.positives
    failed = found.episodes - found.succeeded
    click.echo(f"{out}: a classifier of success in {made.info.env}")
    click.echo(
        f"  measured on {found.episodes} episodes that it has not learnt from, {found.succeeded} "
        f"of them successful, at a threshold of {found.threshold:g}"
    )
    click.echo(f"  right about {found.accuracy:.2%} of {found.steps} steps")
    click.echo(
        f"  false positives: {found.false_positives} of {others} steps "
        f"({found.false_positive_rate:.2%}), in {found.episode_false_positives} of {failed} failed "
        f"episodes, and too early in {found.early} of {found.succeeded} successful ones"
    )
    click.echo(f"  false negatives: {found.false_negatives} of {found.positives} steps")
    click.echo(f"  right about the end of {found.episode_accuracy:.2%} of the episodes")
