"""Whatever is wrong with a configuration, ``check`` says so, by name; a run would end of it."""

from __future__ import annotations

import pathlib

import pytest

from rlinf_async.cli import main
from tests.jobs.agreement.wrong import WRONG, Wrong

ROOT = pathlib.Path(__file__).parents[2]


def test_no_two_cases_have_one_name() -> None:
    assert len({case.name for case in WRONG}) == len(WRONG) >= 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM, while it is imported
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_check_refuses_a_wrong_configuration_and_names_what_is_wrong(
    case: Wrong,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    if case.prepare is not None:
        case.prepare(tmp_path)
    code = main(["check", *case.arguments(tmp_path)])
    said = capsys.readouterr().err
    assert code == 2, said
    assert case.named.lower() in said.lower()
