"""The command line as it is called in tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedloom.server.ledger import Ledger

SMALL = ["sites=[{domain: digits, count: 3, samples: 40}]", "data.size=8", "data.test_limit=60", "network.width=0.25",
         "engine.name=inline", "baselines=[]"]  # fmt: skip
ONE, TWO = "site-0001", "site-0002"
FEDLOOM = str(Path(sys.executable).parent / "fedloom")  # a process of its own


class Said(NamedTuple):
    """What a command said."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


def refused(said: Said, *texts: str) -> None:
    """Exit code 2 and one line, which says this."""
    assert said.code == 2, said
    assert said.err.startswith("fedloom: ")
    assert len(said.err.splitlines()) == 1, said.err
    assert all(words in said.err for words in texts), said.err


def last_line(said: Said) -> dict:
    """The JSON that a command ends with."""
    return json.loads(said.out.splitlines()[-1])


def events(path: Path) -> list[str]:
    """The kinds of the events in a run's ledger."""
    with Ledger.open(path, server=False) as ledger:
        return [event.kind for event in ledger.events()]
