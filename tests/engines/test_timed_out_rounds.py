"""Rounds whose time is up while sites are at work: what was late is in no sum, and what counted is in it once."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import load
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

SITES = 40
WORDS = [f"sites=[{{domain: digits, count: {SITES}, samples: 30, partition: {{min_samples: 1}}}}]", "data.size=8",
         "baselines=[]", "evaluation.every=9", "evaluation.sites=2", "data.test_limit=50", "engine.workers=1"]  # fmt: skip


class Rounds(LogListener):
    """Remembers the rounds' records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def round_done(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def late(grid: Any, words: list[str], whole: float) -> tuple[dict[str, Any], Rounds]:
    """A run of which some replies come too late and some do not: half the time of a round (`whole`: seconds of one of an
    epoch) at first, and then more or fewer epochs, by how busy the machine is."""
    epochs = math.ceil(2.2 / whole)  # the time to reply is at least a second
    timeout = 0.5 * whole * epochs
    for _ in range(8):
        short = [f"training.epochs={epochs}", f"federation.timeout={timeout}", "federation.window=30"]
        listener, options = Rounds(), ["run.name=late", "run.overwrite=true", "rounds=3"]
        try:
            summary = run_experiment(grid, load("digits", [*words, *short, *options]), listener)
        except TooFewRepliesError:
            epochs = max(1, math.floor(epochs / 1.5))
        else:
            if any(timed_out(listener)):
                return summary, listener
            epochs = math.ceil(epochs * 1.7)
    pytest.fail("no run had replies in time and others too late")


def timed_out(listener: Rounds) -> list[int]:
    """The number of replies that came too late, of each round."""
    return [sum("no reply within" in reason for reason in record["dropped"].values()) for record in listener.records]


@pytest.mark.parametrize("sums", ["true", "false"])
def test_a_round_that_timed_out_leaves_nothing_to_the_next_one(tmp_path: Path, sums: str):
    """Late messages shared a chunk with the next round's; the sum of both went to a reply that nobody awaited any more."""
    words, listener = [*WORDS, f"run.root={tmp_path}", f"federation.partial_sums={sums}"], Rounds()
    with open_engine(load("digits", words)) as grid:
        run_experiment(grid, load("digits", [*words, "run.name=quick", "rounds=2"]), listener)
        whole = listener.records[-1]["seconds"]  # of a round, once the worker is warm
        summary, listener = late(grid, words, whole)
        assert not grid._pool._queue and not grid._pool._calls and not grid._pool._done  # type: ignore[attr-defined]
        assert not grid._messages and not grid._sums  # type: ignore[attr-defined]
    assert all(record["replies"] + len(record["dropped"]) == SITES for record in listener.records)
    assert summary["status"] == "finished"
    assert summary["checks"] and all(summary["checks"].values())
    assert check(tmp_path / "late") == []
    assert not (tmp_path / "late" / "staging").exists()
