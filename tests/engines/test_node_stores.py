"""federation.node_store: nodes keep their sites' contributions and give one sum each; what is lost with a node."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from fedloom.clients.protocol.messages import to_arrays
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError, load
from fedloom.fusion.exact import ExactSum, exact
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import AWAY, Problem, check
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.checks import check as check_config
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from fedloom.sims.engines.node_store import NodeStore
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn

SITES = 8
SMALL = [f"sites=[{{domain: digits, count: {SITES}, samples: 40}}]", "data.size=8", "rounds=4", "evaluation.every=4",
         "baselines=[]", "objective.subset_probability=0.5", "federation.fraction=0.75"]  # fmt: skip


WEIGHTS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4)


@given(st.lists(st.tuples(WEIGHTS, st.booleans()), min_size=1, max_size=6))
def test_a_node_adds_up_what_is_named_and_nothing_that_a_dead_worker_left(calls: list[tuple[list[int], bool]]):
    """A worker that dies after it has left its sum is not heard of: its sites are asked again, and counted once."""
    with tempfile.TemporaryDirectory() as folder:
        part, size = NodeStore(folder, "here"), max(len(numbers) for numbers, _ in calls)
        numbers = [torch.tensor(given + [0] * (size - len(given))) for given, _ in calls]
        made = [PartialSum("run", 1, frozenset({str(place)}), {}, {"site": 1}, {"site": to_arrays({"w": tensor})})
                for place, tensor in enumerate(numbers)]  # fmt: skip
        left = [part.leave(one) for one in made]
        assert all(one.records == {} and one.node == "here" for one in left)
        heard = [place for place, (_, reported) in enumerate(calls) if reported]
        found = part.add_up("run", [left[place].ticket for place in heard])
        expected = sum((numbers[place] for place in heard), torch.zeros(size, dtype=torch.int64))
        assert [*map(list, found.values())] == ([expected.tolist()] if heard else [])
        if heard:
            with pytest.raises(FileNotFoundError):  # what was given once is not given twice
                part.add_up("run", [left[heard[0]].ticket])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("$NOT_SET_ANYWHERE/kept", "its variable is not set on this node"),
        ("relative/kept", "takes a whole path"),
        ("/proc/nowhere/kept", "cannot be written on this node"),
        (__file__, "cannot be written on this node"),
    ],
)
def test_a_folder_that_cannot_be_used_is_reported_with_the_key(given: str, message: str):
    with pytest.raises(UserError, match=f"federation.node_store: .*{message}"):
        NodeStore(given, "here")


def test_what_a_node_keeps_is_read_by_its_digest(tmp_path: Path):
    part, state = NodeStore(str(tmp_path), "here"), {"w": torch.arange(3.0)}
    kept = part.put("run", state)
    assert torch.equal(part.get("run", kept, "here")["w"], state["w"])
    assert part.put("run", state) == kept
    with pytest.raises(ReplyError, match=r"its last contribution cannot be read from node here .*this blob is missing"):
        part.get("other", kept, "here")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of one core each, each with a folder of its own under the same name ($PART)."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False,
                                                            "env_vars": {"PART": str(tmp_path / "part-0")}})  # fmt: skip
    try:
        cluster.add_node(num_cpus=1, env_vars={"PART": str(tmp_path / "part-1")})
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Watching(LogListener):
    """Does something when a round is done, and keeps what is said."""

    def __init__(self, then: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
        super().__init__()
        self.then, self.said, self.records = then, [], []

    def round_done(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self.then(record)

    def message(self, text: str) -> None:
        self.said.append(text)


def run(root: Path, name: str, *words: str, listener: LogListener | None = None) -> dict[str, Any]:
    """The summary of a run."""
    config = load("digits", [*SMALL, f"run.root={root}", f"run.name={name}", *words])
    check_config(config)
    with open_engine(config) as grid:
        return run_experiment(grid, config, listener or LogListener())


def states(folder: Path) -> dict[str, str]:
    return {file.stem: digest(read_state(file)) for file in (folder / "states").glob("*.safetensors")}


def over(cluster: Cluster, *words: str) -> list[str]:
    return [
        "engine.name=ray",
        f"engine.address={cluster.address}",
        "engine.workers=2",
        "federation.partial_sums=true",
        *words,
    ]


NODES = "federation.node_store=$PART/kept"


@pytest.mark.slow
def test_nodes_give_one_sum_each_and_keep_the_rest_until_the_end_with_the_same_bits(tmp_path: Path, cluster: Cluster):
    run(tmp_path, "inline", "engine.name=inline")
    run(tmp_path, "plain", *over(cluster))
    ray.shutdown()
    kept: list[set[str]] = []
    found: list[Problem] = []

    def look(_: dict[str, Any]) -> None:
        kept.append({file.parent.parent.parent.parent.name for file in tmp_path.glob("part-*/kept/*/blobs/*")})
        found.extend(check(tmp_path / "nodes"))

    listener = Watching(look)
    run(tmp_path, "nodes", *over(cluster, NODES), listener=listener)
    assert states(tmp_path / "nodes") == states(tmp_path / "plain") == states(tmp_path / "inline")
    whole = next(sent for sent, _ in listener.records[0]["bytes"].values())
    assert round(listener.records[0]["received"] / whole, 1) in (2.0, 4.0)  # of one node or two, 8 bytes a weight
    assert {tuple(both)[1] for record in listener.records for both in record["bytes"].values()} == {0}
    assert kept[-1] == {"part-0", "part-1"} and not list(tmp_path.glob("part-*/kept/*"))  # all is at home, and only there
    assert {problem.severity for problem in found} == {"note"} and any(problem.what == AWAY for problem in found)
    assert check(tmp_path / "nodes") == []
    unlearn(tmp_path / "nodes", UnlearningRequest(["site-0003"], "gone"))
    assert check(tmp_path / "nodes") == []


@pytest.mark.slow
def test_what_a_lost_node_kept_is_out_of_the_sum_and_the_sum_is_that_of_what_is_left(tmp_path: Path, cluster: Cluster):
    """The node dies, and its disk with it, after the second round."""
    (node,) = cluster.worker_nodes

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            (tmp_path / "part-1").rename(tmp_path / "burnt")

    listener = Watching(kill)
    summary = run(tmp_path, "lost", *over(cluster, NODES, "rounds=6"), listener=listener)
    assert all(summary["checks"].values()) and check(tmp_path / "lost") == []
    (said,) = [line for line in listener.said if "a node lost the last contributions of" in line]
    assert "these sites leave the sum and start again as new ones" in said
    with Ledger.open(tmp_path / "lost", server=False) as ledger:
        (lost,) = ledger.events("forgotten")
        assert 0 < len(lost.body["sites"]) < SITES and not any(ledger.sites().values())
        bits, total = ledger.run().bits, ExactSum(ledger.run().bits)
        for one in ledger.all_latest().values():
            total.add(exact(ledger.blobs.get(one.blob), bits))
        (row,) = ledger.sums()
        last = ledger.last_round()
        names = ledger.blobs.get(last.states[row.name]) if last else {}
        assert digest({name: total.totals[name] for name in names}) == digest(names)


@pytest.mark.slow
def test_what_a_living_node_has_lost_restarts_as_soon_as_that_is_known(tmp_path: Path, cluster: Cluster):
    def burn(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            shutil.rmtree(next((tmp_path / "part-1").glob("kept/*/blobs")))

    listener = Watching(burn)
    summary = run(tmp_path, "burnt", *over(cluster, NODES, "rounds=6"), listener=listener)
    assert all(summary["checks"].values()) and check(tmp_path / "burnt") == []
    (said,) = [line for line in listener.said if "a node lost the last contributions of" in line]
    assert said.startswith(("round 3:", "round 4:"))
    assert not any(record["dropped"] for record in listener.records if record["round"] > 3)


@pytest.mark.parametrize(
    "words", [["engine.name=inline", "federation.partial_sums=true"], ["engine.name=ray"]], ids=["inline", "no sums"]
)
def test_where_no_workers_add_up_there_is_no_node_store(words: list[str]):
    with pytest.raises(UserError, match=r"federation\.node_store: .*set federation\.partial_sums=true and engine\.name=ray"):
        check_config(load("digits", [*words, NODES]))
