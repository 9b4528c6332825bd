"""Flower's own strategies over our round loop: what they make of the sites' replies, and what they remember."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedloom.clients.objectives import resolve
from fedloom.conf import load
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.schema import Config
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.schedules import Sampling
from fedloom.server.run.checks import check
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import one_round
from fedloom.server.strategies.averaging import NETWORKS
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.server.strategies.flower.memory import arrays_of, put_back, remembered
from fedloom.server.strategies.flower.nodes import Nodes, quiet
from fedloom.server.strategies.flower.strategy import METRIC, FlowerStrategy
from fedloom.server.unlearning.certificate import CERTIFICATES, KEPT, read
from fedloom.server.unlearning.verification import verify, verify_accuracy
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, Run, folder, set_up
from tests.server.runs import method_of

OPTIONS = {
    "FedAvg": [], "FedAdam": ["eta=0.05"], "FedYogi": ["eta=0.05"], "FedAdagrad": [], "FedAvgM": ["server_momentum=0.9"],
    "FedProx": ["proximal_mu=0.5"], "FedMedian": [], "FedTrimmedAvg": ["beta=0.25"], "Krum": [], "MultiKrum": [],
    "Bulyan": [], "QFedAvg": ["client_learning_rate=0.1"],
}  # fmt: skip
REMEMBERING = ["FedAdam", "FedYogi", "FedAdagrad", "FedAvgM"]


def configured(root: Path, name: str, *words: str) -> Config:
    reference = name if ":" in name else f"flwr.serverapp.strategy:{name}"
    fixed = ["sites=[{domain: digits, count: 4, samples: 60}]", "data={size: 8, validation_limit: 50, test_limit: 100}",
             "network={name: mlp, widths: [8]}", "engine.name=inline", f"run.root={root}", "rounds=2",
             "training={batch: 16, rate: 0.1, momentum: 0.0, schedule: constant}", f"strategy.name={reference}",
             *(f"strategy.{option}" for option in OPTIONS.get(name, [])), *words]  # fmt: skip
    config = with_default_objective(load("digits", fixed), fixed)
    check(config)
    return config


def begun(root: Path, name: str, *words: str) -> Run:
    return set_up(configured(root, name, *words))


def network_of(run: Run) -> State:
    return run.aggregate.aggregate().state


def replies_of(run: Run) -> list[Message]:
    """What the sites sent in the last round, as Flower's own loop would hold it."""
    view, found = run.aggregate.view(), []
    for site in run.aggregate.members():
        sent = view.slots.contributions.floats(site.name, NETWORKS)
        loss, samples = float(sent.pop(f"{METRIC}train_loss")), view.slots.contributions.latest[site.name].samples
        metrics = MetricRecord({"num-examples": samples, "train_loss": loss})
        content = RecordDict({"arrays": arrays_of(sent), "metrics": metrics})
        found.append(Message(content, reply_to=Message(RecordDict(), site.index + 1, "train")))
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_the_network_is_what_flowers_own_loop_makes_of_the_same_replies(tmp_path: Path, name: str):
    run = begun(tmp_path, name)
    inner = run.aggregate.strategy.fresh()  # type: ignore[attr-defined]
    arrays = arrays_of(run.aggregate.view().initial())
    for number in (1, 2):
        one_round(run.loop, number)
        with quiet():
            inner.configure_train(number, arrays, ConfigRecord(), Nodes(run.aggregate.members()))
            made, _ = inner.aggregate_train(number, replies_of(run))
        arrays = made if made is not None else arrays
    for key, tensor in network_of(run).items():
        assert torch.equal(tensor, torch.from_numpy(arrays[key].numpy()).float())


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_a_strategy_remembers_survives_a_resumption_with_the_same_bits(tmp_path: Path, name: str):
    whole, cut = begun(tmp_path / "whole", name).all_rounds(), begun(tmp_path / "cut", name)
    one_round(cut.loop, 1)
    cut.aggregate.slots.reload()
    one_round(cut.loop, 2)
    assert digest(network_of(cut)) == digest(network_of(whole))
    kept = cut.aggregate.view().server_state("memory")
    assert any(path.split("/")[0] in ("m_t", "momentum_vector", "v_t") for path in kept)


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "FedAdam"])
def test_a_forgotten_sites_last_round_is_aggregated_again_without_it(tmp_path: Path, name: str):
    run = begun(tmp_path, name)
    one_round(run.loop, 1)
    run.aggregate.membership.forget(["site-0003"], {})
    inner = run.aggregate.strategy.fresh()  # type: ignore[attr-defined]
    start = arrays_of(run.aggregate.view().initial())
    inner.configure_train(1, start, ConfigRecord(), Nodes(run.aggregate.members()))
    made, _ = inner.aggregate_train(1, replies_of(run))
    assert len(run.aggregate.members()) == 3
    assert all(torch.equal(one, torch.from_numpy(made[key].numpy()).float()) for key, one in network_of(run).items())
    assert not run.aggregate.residue(["site-0003"])
    one_round(run.loop, 2)
    assert "earlier" in run.aggregate.strategy.warnings(resolve(run.config))[0] and run.aggregate.residue()


def test_a_request_is_fulfilled_in_a_process_that_has_sent_no_messages(tmp_path: Path):
    config = configured(tmp_path, "FedAdam")
    run_experiment(InlineGrid(4, store_folder(config)), config, Recorder())
    with method_of(config) as method:
        before = digest(method.state.aggregate().state)
    words = ["unlearn", str(folder(config)), "site-0000", "--request-id", "r", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "fedloom.sims.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Request 'r' is verified" in done.stdout, done.stderr
    with method_of(config) as method:
        assert digest(method.state.aggregate().state) != before
    written = read(file := folder(config) / CERTIFICATES / "r.json")
    assert written["exact"]["statement"] == KEPT and not written["exact"]["tensors"]
    with Ledger.open(folder(config), server=False) as ledger:
        found = verify(file, ledger)
        assert {one.verdict for one in found} == {"match"} and "remaining contributions then" in [one.what for one in found]
        measured = verify_accuracy(file, ledger, lambda: written["evidence"]["after"]["accuracy"])
        assert {one.verdict for one in measured} == {"match"}
    forged = {**written, "exact": {**written["exact"], "remaining": {"site-0001": "0" * 64}}}
    file.write_text(json.dumps(forged))
    with Ledger.open(folder(config), server=False) as ledger:
        assert "remaining contributions" in [one.what for one in verify(file, ledger) if one.verdict == "mismatch"]


def test_its_fractions_choose_who_is_asked_by_the_runs_seed(tmp_path: Path):
    asked = []
    for part in ("one", "two"):
        run = begun(tmp_path / part, "FedAvg", "strategy.fraction_train=0.5")
        run.all_rounds()
        view = run.aggregate.view()
        asked.append({site.name: view.last_put(site.name) for site in run.aggregate.members()})
        assert [record["replies"] for record in run.listener.records] == [2, 2]
    assert asked[0] == asked[1]
    assert isinstance(run.aggregate.schedule, Sampling)


def test_fedprox_hands_its_weight_to_the_sites(tmp_path: Path):
    assert configured(tmp_path, "FedProx").objective == {"name": "fedprox", "mu": 0.5}
    with pytest.raises(UserError, match=r"objective\.mu: got 0\.1, the strategy needs 0\.5"):
        configured(tmp_path, "FedProx", "objective.mu=0.1")


def test_too_few_replies_for_bulyan_leave_the_network_as_it_was(tmp_path: Path):
    run = begun(tmp_path, "Bulyan", "strategy.num_malicious_nodes=1").all_rounds()
    assert digest(network_of(run)) == digest(run.aggregate.view().initial())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("FedAdam", ["strategy.eeta=1"], r"strategy\.eeta"),
        ("FedTrimmedAvg", ["strategy.beta=0.7"], r"failed with beta=0\.7 \(ValueError"),
        ("FedXgbBagging", [], r"XGBoost's trees"),
        ("DifferentialPrivacyServerSideFixedClipping", [], r"privacy\.clip and privacy\.noise"),
        ("FedAvg", ["strategy.min_available_nodes=9"], r"min_available_nodes: got 9, but there are 4 sites"),
        ("FedAvg", ["strategy.fraction_train=0"], r"no site would train"),
        ("FedAvg", ["strategy.weighted_by_key=loss"], r"sites report only num-examples and train_loss"),
        ("FedAvg", ["strategy.train_metrics_aggr_fn=os.system"], r"needs a Python object"),
        ("Result", [], r"is the class Result, takes"),
        ("FedAvg", ["federation.secure_aggregation=true"], r"is not summed"),
        ("FedAvg", ["objective.name=local"], r"objective\.name: got 'local'"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(tmp_path: Path, name: str, words: list[str], message: str):
    with pytest.raises(UserError, match=message) as caught:
        configured(tmp_path, name, *words)
    assert "\n" not in str(caught.value)


class Telling(flower.FedAvg):
    """Tells the sites what nobody reads there."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.1
        return super().configure_train(server_round, arrays, config, grid)


class Failing(flower.FedAvg):
    def aggregate_train(self, server_round, replies):
        raise KeyError("x")


class Nothing(flower.FedAvg):
    def aggregate_train(self, server_round, replies) -> Any:
        return None


class Infinite(flower.FedAvg):
    def aggregate_train(self, server_round, replies):
        return ArrayRecord({"a": flower_array(np.array([np.nan]))}), None


class Waiting(flower.FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        while len(list(grid.get_node_ids())) < 9:
            pass
        return []


def flower_array(array):
    return arrays_of({"a": torch.from_numpy(array)})["a"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("Telling", r"sends the sites 'lr'"), ("Failing", r"failed \(KeyError"), ("Nothing", r"failed \(TypeError"),
     ("Infinite", "not finite"),
     ("Waiting", "waits for more sites")],
)  # fmt: skip
def test_a_strategy_of_the_user_that_fails_is_reported_in_a_line(tmp_path: Path, name: str, message: str):
    run = begun(tmp_path, f"{__name__}:{name}")
    with pytest.raises(FailedError, match=message):
        run.all_rounds()
        network_of(run)


kinds = st.one_of(
    st.dictionaries(st.text("abc./", min_size=1, max_size=5), arrays.arrays(np.float64, 3), max_size=3),
    st.lists(arrays.arrays(np.float32, (2, 2)), max_size=3),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    arrays.arrays(np.float32, 2),
)


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


@given(given_=kinds)
def test_what_is_remembered_is_put_back_bit_for_bit(given_: object):
    fresh = types.SimpleNamespace(m_t=None, eta=0.1)
    strategy = types.SimpleNamespace(m_t=given_, eta=0.1)
    back = put_back(types.SimpleNamespace(m_t=None, eta=0.1), remembered(strategy, fresh))
    assert same(back.m_t, given_)
    assert back.eta == 0.1


def test_what_no_tensor_holds_is_refused():
    with pytest.raises(FailedError, match="'m_t' became a set"):
        remembered(types.SimpleNamespace(m_t={1}), types.SimpleNamespace(m_t=None))


def test_a_strategy_that_is_none_of_flowers_is_not_taken_for_one():
    assert not issubclass(dict, flower.Strategy) and FlowerStrategy.default_objective is not None
