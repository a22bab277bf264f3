"""``rlinf-async push``: a trained model goes to the Hub of Hugging Face, or to another one that
speaks as it does (``HF_ENDPOINT``).

The token is that of ``hf auth login`` or of ``HF_TOKEN``. It is never written, nor printed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from rlinf_async.cli.failures import OK
from rlinf_async.config import UsageError
from rlinf_async.config.registry import needed
from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.model_card import CARD, write_card

HINTS: Final = {
    401: "the Hub does not accept the token: run 'hf auth login' again, or look at HF_TOKEN",
    403: "the token may not write there: it needs the right to write, in this organisation",
    404: "there is no such repository or branch, or the token may not see it",
}
"""what to do, by the HTTP status of the Hub's answer"""


class NotPushed(Exception):
    """The Hub refused, or cannot be reached."""


@click.command()
@click.argument("source", metavar="RUN", type=click.Path(path_type=pathlib.Path))
@click.argument("repo_id", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="A new repository can be seen by everybody.")
@click.option("--revision", metavar="BRANCH", help="Branch, which is made if it is not there.")
@click.option("--message", default="", help="Message of the commit.")
@click.option("--dry-run", is_flag=True, help="Name the files; send nothing.")
def push(
    source: pathlib.Path,
    repo_id: str,
    public: bool,
    revision: str | None,
    message: str,
    dry_run: bool,
) -> int:
    """Upload the trained model of the run in RUN to the Hub, as OWNER/NAME.

    RUN may also be the folder of a model, such as `rlinf-async export` writes. A repository that is
    not there is made, and private unless --public is given.
    """
    hub = needed("huggingface_hub", extra="llm", needed_for="the Hub of Hugging Face")
    _check_name(hub, repo_id)
    folder = _model_folder(source.expanduser())
    files = _files(folder)
    if dry_run:
        for one in files:
            click.echo(f"{one.relative_to(folder)}  {one.stat().st_size:,} bytes")
        click.echo(f"{len(files)} files would go to {repo_id}")
        return OK
    token = hub.get_token()
    if not token:
        raise UsageError("no token of the Hub is known: run 'hf auth login', or set HF_TOKEN")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    api = hub.HfApi(
        endpoint=os.environ.get("HF_ENDPOINT"),
        token=token,
        library_name="rlinf-async",
        library_version=importlib.metadata.version("rlinf-async"),
    )
    with _explained(repo_id, token):
        name = api.create_repo(repo_id, private=not public, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Upload {source.name}",
            ignore_patterns=[".*", "**/.*"],
        )
    click.echo(f"{folder}: {len(files)} files -> {done.commit_url}")
    return OK


@contextmanager
def _explained(repo_id: str, token: str) -> Iterator[None]:
    """Say in a line what the Hub has against it, without the token."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        said = getattr(error, "server_message", None) or str(error).splitlines()[0]
        why = f"{HINTS[status]} ({status}: {said})" if status in HINTS else f"{status}: {said}"
        raise NotPushed(_without(token, f"{repo_id} was not pushed: {why}")) from error
    except (ValueError, OSError) as error:  # metadata of a card; a network that is not there
        raise NotPushed(_without(token, f"{repo_id} was not pushed: {error}")) from error
    except Exception as error:
        # Which library speaks HTTP depends on the version of the client.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        where = os.environ.get("HF_ENDPOINT") or "the Hub"
        text = f"{repo_id} was not pushed: {where} cannot be reached: {error}"
        raise NotPushed(_without(token, text)) from error


def _without(token: str, text: str) -> str:
    return text.replace(token, "***")


def _check_name(hub: Any, repo_id: str) -> None:
    try:
        hub.utils.validate_repo_id(repo_id)
    except ValueError as error:
        raise UsageError(f"{repo_id!r} is no name of a repository: {error}") from error


def _model_folder(source: pathlib.Path) -> pathlib.Path:
    """The folder of the model, with a card."""
    if not source.is_dir():
        raise UsageError(f"{source}: there is no such folder; name that of a run, or of a model")
    if not (source / "config.toml").is_file():
        return _checked(source)
    folder = source / "trained"
    if not folder.is_dir():
        raise UsageError(
            f"{source} has no trained/, which a run writes at its end (training.export): write a "
            f"checkpoint by 'rlinf-async export {source} OUT', and push OUT"
        )
    _checked(folder)
    if not (folder / CARD).is_file():
        try:
            write_card(source, folder)
        except RunFolderError as error:
            raise UsageError(str(error)) from error
    return folder


def _checked(folder: pathlib.Path) -> pathlib.Path:
    """Refuse what nobody could load."""
    from rlinf_async.runtime.jobs.language.backends import has_weights

    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UsageError(f"{folder} is neither the folder of a run nor of a model (config.json)")
    if not has_weights(folder):
        raise UsageError(f"{folder} holds no weights (*.safetensors)")
    return folder


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Everything in a folder that is not hidden, as it is uploaded."""
    found = (one for one in folder.rglob("*") if one.is_file())
    return sorted(
        one for one in found if not any(p[0] == "." for p in one.relative_to(folder).parts)
    )
