"""Tests that are not marked `data` run as on a machine without a data folder, and fail if they read one all the same."""

import os
import subprocess
import sys
from pathlib import Path

from tests.data_folder import FOLDER, below

REPOSITORY = Path(__file__).parents[1]
READS = """
import os, pathlib, pytest

def read():
    return pathlib.Path(os.environ["FEDLOOM_TEST_DATA"], "usps.npz").read_bytes()

def test_unmarked():
    read()

def test_neighbour():
    pass

@pytest.mark.data
def test_marked():
    read()
"""


def outcomes(folder: Path, data: Path) -> str:
    """What pytest, with this project's conftest, says of a file that reads the data folder."""
    (folder / "test_reads.py").write_text(READS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  data\n")
    given = {name: text for name, text in os.environ.items() if not name.startswith(("FEDLOOM", "PYTEST"))}
    environment = {**given, "FEDLOOM_DATA": str(data), "PYTHONPATH": str(REPOSITORY)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-v",
        "-rs",
        "test_reads.py",
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


def test_a_test_without_the_mark_that_reads_the_data_folder_fails(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "usps.npz").write_bytes(b"x")
    found = outcomes(tmp_path, data)
    assert "test_reads.py::test_unmarked ERROR" in found and "mark the test `data`" in found
    assert "3 passed, 1 error" in found


def test_marked_tests_are_skipped_without_a_data_folder(tmp_path: Path) -> None:
    assert "needs a data folder: set FEDLOOM_DATA" in outcomes(tmp_path, tmp_path / "absent")


def test_no_test_finds_the_data_folder_by_the_environment() -> None:
    assert not Path(os.environ["FEDLOOM_DATA"]).exists()
    assert below(str(FOLDER / "MNIST" / "raw")) and not below(str(FOLDER.parent / "other"))
