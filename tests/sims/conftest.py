"""What the tests of the command line share."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedloom.conf import load
from fedloom.sims.cli import main as cli
from fedloom.sims.operations.simulate import simulate
from tests.sims.commands import SMALL, Command, Said

if TYPE_CHECKING:
    from tests.sims.links import Link


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


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Link":
    """A SuperLink's database, a run, and two nodes of it; the second one is hostile."""
    from tests.sims.links import new_link

    return new_link(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, which no test changes."""
    root = tmp_path_factory.mktemp("user")
    simulate(load("digits", [*SMALL, "rounds=2", f"run.root={root}"]))
    return root / "digits"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(finished_run, tmp_path / "digits"))
