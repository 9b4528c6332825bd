"""Ray clusters: two nodes give the bits of one, and data is shipped where it is needed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from flwr.app import RecordDict
from ray.cluster_utils import Cluster

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import (
    CONFIG,
    MEAN,
    ORDER,
    TRAIN,
    TaskInstructions,
    config_digest,
    text_record,
    to_arrays,
)
from fedloom.conf import load, to_json
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from tests.engines.messages import SITES, answers, ask, assert_good, by_site, messages, opened, pids
from tests.engines.parts import final_states


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of one core each; the last test loses one."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    """These nodes, which the test has to join by their address."""
    yield nodes
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Tip:FutureWarning")  # Ray's, on what it will do with GPUs
def test_a_cluster_of_two_nodes_gives_the_bits_of_the_inline_engine(tmp_path: Path, cluster: Cluster):
    inline = final_states(tmp_path, "inline", "engine.name=inline")
    config = ["engine.name=ray", f"engine.address={cluster.address}", "engine.workers=2"]
    assert final_states(tmp_path, "cluster", *config) == inline


class Killer(LogListener):
    """Kills a process when a round is done, and keeps what rounds tell."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process, self.records = process, list[dict]()

    def round_done(self, record: dict) -> None:
        self.records.append(record)
        if record["round"] == 2:
            os.kill(self.process, signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_outlive_their_nodes_raylet_cost_no_site_a_round(tmp_path: Path, cluster: Cluster):
    """Once they answered that the round's network cannot be read, and their sites were left out."""
    node = cluster.add_node(num_cpus=1)
    raylet = node.all_processes["raylet"][0].process.pid
    words = ["sites=[{domain: digits, count: 6, samples: 60}]", "data.size=8", "rounds=6", "evaluation.every=6"]
    there = [f"engine.address={cluster.address}", "engine.workers=3", f"run.root={tmp_path}"]
    config, listener = load("digits", [*words, *there]), Killer(raylet)
    try:
        with open_engine(config) as grid:
            found = run_experiment(grid, config, listener)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    assert [len(record["dropped"]) for record in listener.records] == [0] * 6
    alone = load("digits", [*words, "engine.name=inline", f"run.root={tmp_path}", "run.name=inline"])
    with open_engine(alone) as grid:
        assert run_experiment(grid, alone, LogListener())["digest"] == found["digest"]


@pytest.mark.slow
def test_data_shipped_to_a_cluster_is_read_there(tmp_path: Path, cluster: Cluster):
    """The data folder is gone when the sites train: the only copy left is the one that Ray has shipped."""
    data, random = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    pixels, labels = random.integers(0, 256, (40, 16, 16), np.uint8), np.arange(40, dtype=np.uint8) % 10
    np.savez(data / "usps.npz", X_train=pixels, y_train=labels, X_test=pixels, y_test=labels)
    words = [f"data.root={data}", "sites=[{domain: usps, count: 2}]", "data.size=8", "rounds=2", "evaluation.every=2"]
    there = [f"engine.address={cluster.address}", "engine.ship_data=true", "engine.workers=1"]
    config = load("digits", [*words, *there, f"run.root={tmp_path}"])
    with open_engine(config) as grid:
        data.rename(tmp_path / "elsewhere")
        federation = ClientChannel(grid, config.roster, window=0)
        federation.join(timeout=60)
        text, mean = to_json(config), to_arrays(initial_state(config))
        order = TaskInstructions(config_digest(text), "run", site=0, round=1, rounds=2, base=0, members=2).record()
        content = RecordDict({ORDER: order, MEAN: mean, CONFIG: text_record(text)})
        replies = list(federation.ask(TRAIN, [(config.roster[0], content)], 1, timeout=60))
    assert [reply.reason for reply in replies] == [""]


@pytest.mark.slow
def test_the_jobs_of_a_node_that_died_go_to_the_workers_that_live_within_seconds(tmp_path: Path, cluster: Cluster):
    """Once they stayed with the worker that had no place any more, at worst for an hour."""
    (node,) = cluster.worker_nodes
    grid = opened(tmp_path, f"engine.address={cluster.address}", "engine.num_cpus=1")
    try:
        assert len(pids(ask(grid, {site: {"kind": "slow"} for site in range(SITES)}))) == 2
        keys = list(grid.push_messages(messages({site: {"kind": "slow"} for site in range(SITES)})))
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        replies = answers(grid, keys, 60)
        seconds = time.monotonic() - begin
        assert_good(by_site(replies), set())
        assert len(replies) == SITES and seconds < 25, seconds
        assert_good(ask(grid, {}), set())  # at once, although one worker has no place
    finally:
        grid.close()
