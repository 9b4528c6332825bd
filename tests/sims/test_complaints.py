"""The page of complaints: each row is shown by a test or a command that exists."""

import re
from pathlib import Path

from typer.main import get_command

from fedloom.conf.package import ROOT
from fedloom.sims.cli.main import app

ROWS = [line.split(" | ") for line in (ROOT / "sims/benchmarks/COMPLAINTS.md").read_text().splitlines()[6:]]


def test_there_are_thirty_complaints_with_four_cells():
    assert len(ROWS) == 30 and all(len(row) == 4 for row in ROWS)


def test_what_shows_a_row_exists():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    folder = Path(__file__).parents[2]
    for row in ROWS:
        shown = re.findall(r"`([^`]+)`", row[3])
        assert shown, row
        for name in shown:
            assert (folder / name).is_file() if name.startswith("tests/") else name.split()[1] in commands, name
