"""What the tests of the command line share."""

import shutil
import sys
from pathlib import Path

import pytest

from conf import load
from sims.cli import main as cli
from sims.simulate import simulate
from tests.sims.commands import SMALL, Command, Said


@pytest.fixture
def fedloom(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """A command in this process: main, but for its handlers of signals."""

    def run(*words: object) -> Said:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, words)])
        code = cli._guarded()
        said = capfd.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, which no test changes."""
    root = tmp_path_factory.mktemp("user")
    simulate(load("digits", [*SMALL, "rounds=2", f"run.root={root}"]), quiet=True)
    return root / "digits"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(finished_run, tmp_path / "digits"))
