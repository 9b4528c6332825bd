"""A whole run with seeded faults over Ray against the inline engine."""

import pytest

from sims.benchmarks.fault_run import bench
from sims.benchmarks.untrained import fault


@pytest.mark.slow
def test_a_run_with_many_seeded_faults_names_them_all_and_leaves_the_bits_of_the_inline_engine():
    _, (inline, over_ray) = bench(sites=150, rounds=4)
    planned = {(round, site) for round in range(1, 5) for site in range(150) if fault(site, round)}
    assert {fault(site, round) for round, site in planned} == {"raise", "kill"}
    assert inline["failed"] == over_ray["failed"] == len(planned)
    assert inline["digest"] == over_ray["digest"]
