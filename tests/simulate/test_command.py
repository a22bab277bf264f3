"""``rlinf-async simulate``: its table, files, sweep and refusals."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlinf_async.cli import main
from rlinf_async.config import Document, to_toml
from rlinf_async.simulate import SimulationConfig
from tests.simulate.kit import SMALL


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(to_toml(SMALL))
    return str(path)


def test_policies_are_compared(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, results = tmp_path / "devices.png", tmp_path / "results.json"
    files = ["--picture", str(picture), "--json", str(results)]
    code = main(["simulate", file, "--compare", "static,tail,oracle", "--oracle", *files])
    assert code == 0
    printed = capsys.readouterr().out
    assert "static" in printed
    assert "(at best)" in printed
    assert "(lengths unknown)" in printed
    assert "of oracle" in printed
    assert "small batches" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    static, tail = msgspec.json.decode(results.read_bytes())
    assert static["decisions"] == 0 < tail["decisions"]
    assert tail["samples"] == static["samples"] == 2 * SMALL.samples
    assert sum(tail["spent"].values()) == pytest.approx(1.0)


def test_a_sweep_prints_the_best_configuration(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", file, "--sweep", "--compare", "static", "--work.iterations", "1"]) == 0
    rows, _, best = capsys.readouterr().out.partition("# the best of them\n")
    rates = [float(line.split()[0]) for line in rows.splitlines() if "samples/device-h" in line]
    assert len(rates) > 2
    config = Document("best", best).to(SimulationConfig)
    assert config.work.iterations == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "tial"], "no scaling policy is called 'tial'; did you mean 'tail'?"),
        (["--compare", "static,nobody"], "no scaling policy is called 'nobody'"),
        (["--oracle", "--sweep"], "--oracle: simulate the configuration that --sweep prints"),
        (["--compare", "oracle"], "name a policy that is held against it"),
        (["--oracle", "--work.max_staleness", "1"], "work.max_staleness is 1"),
        (["--hardware.actor_devices", "3"], "sizes that can: [1, 2, 4]"),
        (["--generation.decode_seconds", "0"], "decode_seconds is 0.0; it must be above 0"),
        (["--work.iteration", "3"], "did you mean 'iterations'?"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(
    file: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", file, *arguments]) == 2
    assert text in capsys.readouterr().err.replace("\n", " ")


def test_a_cost_model_with_a_missing_figure_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing.toml"
    path.write_text("[generation]\ndecode_seconds = 0.01\n[actor]\ntoken_seconds = 1e-4\n")
    assert main(["simulate", str(path)]) == 2
    assert "sequence_seconds" in capsys.readouterr().err


def test_the_examples_can_be_read() -> None:
    for path in sorted(Path("examples").glob("simulated_*.toml")):
        assert Document.read(path).to(SimulationConfig).samples > 0
