"""A command line with a fake job, and a configuration file for it."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from rlinf_async.cli import main
from tests.cli.fake import FakeConfig, FakeJob


@dataclasses.dataclass
class CommandLine:
    """Calls the command line in this process; ``run`` gives exit code, stdout and stderr."""

    job: FakeJob
    file: pathlib.Path
    capture: pytest.CaptureFixture[str]

    def run(self, *arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments], self.job.find)
        printed = self.capture.readouterr()
        return code, printed.out, printed.err

    def train(self, *arguments: object) -> tuple[int, str, str]:
        return self.run("train", self.file, *arguments)

    @property
    def config(self) -> FakeConfig:
        """The configuration of the only run."""
        [(config, _, _)] = self.job.runs
        return config


@pytest.fixture
def command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    file = tmp_path / "fake.toml"
    file.write_text('job = "fake"\n[actor]\nlr = 0.5\n', encoding="utf-8")
    return CommandLine(FakeJob(), file, capsys)
