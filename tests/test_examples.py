"""Which examples hypothesis draws: the same in every run, new ones if asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRAWING = """
from hypothesis import given, strategies as st

@given(st.integers(0, 2**60))
def test_drawn(number):
    with open("drawn", "a") as file:
        print(number, file=file)
"""


def drawn(folder: Path, *words: str) -> str:
    """The examples of one run of pytest with the profiles of tests/conftest.py."""
    (folder / "test_drawn.py").write_text(DRAWING, encoding="utf-8")
    (folder / "drawn").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_drawn.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=100)
    return (folder / "drawn").read_text(encoding="utf-8")


@pytest.mark.parametrize(("words", "same"), [([], True), (["--hypothesis-profile=random"], False)])
def test_examples_are_the_same_in_every_run_unless_new_ones_are_asked_for(tmp_path: Path, words: list[str], same: bool):
    assert (drawn(tmp_path, *words) == drawn(tmp_path, *words)) is same
