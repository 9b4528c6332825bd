"""The command line as it is called in tests."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FEDLOOM = str(Path(sys.executable).parent / "fedloom")  # a process of its own


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


def refused(said: Said, *told: str) -> None:
    """Exit code 2 and one line, which says this."""
    assert said.code == 2, said
    assert said.err.startswith("fedloom: ")
    assert len(said.err.splitlines()) == 1, said.err
    assert all(words in said.err for words in told), said.err
