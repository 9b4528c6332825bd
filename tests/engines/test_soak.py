"""A short soak: everything that can go wrong over Ray, against the inline engine."""

import pytest

from sims.benchmarks import soak, soak_plan, soak_run

pytestmark = pytest.mark.slow

TASK_TIMEOUT, ROUND_TIMEOUT = 4.0, 12.0  # a slow round of 30 sites takes two workers 22 s


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak waits half as long for what hangs."""
    monkeypatch.setattr(soak_run, "TASK_TIMEOUT", TASK_TIMEOUT)
    monkeypatch.setattr(soak_run, "ROUND_TIMEOUT", ROUND_TIMEOUT)
    monkeypatch.setattr(soak, "NO_REPLY", f"no reply within {ROUND_TIMEOUT:g} s")
    for kind in ("hang", "stop"):
        monkeypatch.setitem(soak_plan.REASONS, kind, f"took longer than engine.task_timeout={TASK_TIMEOUT:g} s")


def test_a_short_soak_with_partial_sums_leaves_the_bits_of_what_counted_and_nothing_else(impatient: None):
    """Killed, hung and stopped workers, a round that times out, a node that dies, hostile replies."""
    row = soak.soak(sites=30, rounds=10, partial_sums=True)
    assert row["wrong"] == []
    assert row["nodes_killed"] == 1
    assert row["rounds_timed_out"] >= 1
    assert row["verdicts"].pop("memory is flat") is row["verdicts"].pop("every kind of fault was met") is None
    assert row["verdicts"] == dict.fromkeys(row["verdicts"], True)
    assert row["ok"]
