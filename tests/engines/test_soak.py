"""A short soak: everything that can go wrong over Ray, against the inline engine."""

import pytest

from fedloom.sims.benchmarks.faults import soak

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # test_faults, test_lost_workers and test_node_stores have its parts


@pytest.mark.parametrize("node_store", [False, True], ids=["server keeps", "nodes keep"])
def test_a_short_soak_with_partial_sums_leaves_the_bits_of_what_counted_and_nothing_else(node_store: bool):
    """Killed, hung and stopped workers, a round that times out, a node that dies, hostile replies."""
    row = soak(sites=30, rounds=10, partial_sums=True, node_store=node_store)
    assert row["wrong"] == []
    assert row["nodes_killed"] == 1
    assert row["rounds_timed_out"] >= 1
    assert row["verdicts"].pop("memory is flat") is row["verdicts"].pop("every kind of fault happened") is None
    assert row["verdicts"] == dict.fromkeys(row["verdicts"], True)
    assert row["ok"]
