"""Ray clusters: two nodes give the bits of one, and data is shipped where it is needed."""

from pathlib import Path

import numpy as np
import pytest
import ray
from flwr.app import RecordDict
from ray.cluster_utils import Cluster

from clients.initial import initial_state
from clients.messages import MEAN, ORDER, Order, to_arrays
from conf import UserError, load, to_json
from conf.sites import roster
from server.federation import Federation
from sims.engines import open_engine
from tests.engines.parts import final_states


@pytest.mark.slow
def test_a_cluster_of_two_nodes_gives_the_bits_of_the_inline_engine(tmp_path: Path):
    inline = final_states(tmp_path, "inline", "engine.name=inline")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        config = ["engine.name=ray", f"engine.address={cluster.address}", "engine.workers=2"]
        assert final_states(tmp_path, "cluster", *config) == inline
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_data_shipped_to_a_cluster_is_read_there(tmp_path: Path):
    """The data folder is gone when the sites train: the only copy left is the one that Ray has shipped."""
    data, random = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    pixels, labels = random.integers(0, 256, (40, 16, 16), np.uint8), np.arange(40, dtype=np.uint8) % 10
    np.savez(data / "usps.npz", X_train=pixels, y_train=labels, X_test=pixels, y_test=labels)
    words = [f"data.root={data}", "sites=[{domain: usps, count: 2}]", "data.size=8", "rounds=2", "evaluation.every=2"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        there = [f"engine.address={cluster.address}", "engine.ship_data=true", "engine.workers=1"]
        config = load("digits", [*words, *there, f"run.root={tmp_path}"])
        with open_engine(config) as grid:
            data.rename(tmp_path / "elsewhere")
            federation = Federation(grid, roster(config), window=0)
            federation.join(timeout=60)
            order = Order(to_json(config), "run", site=0, round=1, base=0, members=2).record()
            mean = to_arrays(initial_state(config))
            replies = list(federation.train([(roster(config)[0], RecordDict({ORDER: order, MEAN: mean}))], 1, timeout=60))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [reply.reason for reply in replies] == [""]


def test_a_cluster_that_is_not_there_is_one_clear_line(tmp_path: Path):
    config = load("digits", ["engine.name=ray", "engine.address=127.0.0.1:1", f"run.root={tmp_path}"])
    with pytest.raises(UserError, match=r"Ray did not start \(.*engine.name=inline") as caught, open_engine(config):
        pass
    assert "\n" not in str(caught.value)
