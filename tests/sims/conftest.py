"""What the tests of the command line share."""

import sys

import pytest

from sims import cli
from tests.sims.commands import Command, Said


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
