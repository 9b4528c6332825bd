"""Where few sites are asked in a round the sum is over those that have trained: everything stays exact."""

from pathlib import Path

import pytest
import torch

from fedloom.clients.objectives import resolve
from fedloom.conf import UserError
from fedloom.fusion.state import digest
from fedloom.server.strategies import strategy_of
from fedloom.sims.operations.ledger import audit
from fedloom.sims.operations.simulate import simulate
from tests.server.parts import contribution, folder, set_up, small, started, sum_of_contributions
from tests.server.runs import method_of

FEW = ("federation.fraction=0.34", "rounds=2")
WAYS = ["shared", "own", "aggregate"]


def test_where_all_are_asked_the_start_is_what_it_was(tmp_path: Path):
    aggregate = started(small(tmp_path, sites=3, samples=20))
    assert aggregate.slots.total("sum").addends == 3
    assert all(aggregate.slots.has("sum", site.name) for site in aggregate.members())


@pytest.mark.parametrize("initialisation", WAYS)
@pytest.mark.parametrize("sums", [True, False], ids=["partial sums", "replies"])
def test_the_sum_is_over_those_that_have_trained(tmp_path: Path, initialisation: str, sums: bool):
    words = [*FEW, f"objective.initialisation={initialisation}", f"federation.partial_sums={str(sums).lower()}"]
    run = set_up(small(tmp_path, *words, sites=6, samples=20)).all_rounds()
    there = [site.name for site in run.aggregate.members() if run.aggregate.slots.has("sum", site.name)]
    assert 2 < len(there) < 6
    assert run.aggregate.slots.total("sum").addends == len(there)
    assert all(run.aggregate.slots.base(name) > 0 for name in there)
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)
    assert all(run.aggregate.checks()[0].values())
    mean = run.aggregate.aggregate().state
    kept = [contribution(run.aggregate, name) for name in there]
    for name in kept[0]:
        exact = sum(one[name].double() for one in kept) / 2**32 / len(there)
        assert torch.equal(mean[name], exact.float())


@pytest.mark.parametrize("initialisation", WAYS)
def test_partial_sums_give_the_same_bits(tmp_path: Path, initialisation: str):
    words = [*FEW, f"objective.initialisation={initialisation}"]
    found = []
    for sums in ("true", "false"):
        config = small(tmp_path / sums, *words, f"federation.partial_sums={sums}", sites=6, samples=20)
        found.append(set_up(config).all_rounds().aggregate.digest()["sum"])
    assert found[0] == found[1]


def test_the_mean_that_is_sent_holds_those_that_join_as_they_start(tmp_path: Path):
    """In the first round it is what all start from; a site that joins at the aggregate does not change it."""
    from fedloom.server.strategies.sum_aggregation import _mean, _start

    for way in ("shared", "aggregate"):
        run = set_up(small(tmp_path / way, *FEW, f"objective.initialisation={way}", sites=6, samples=20)).all_rounds()
        view = run.aggregate.view()
        new = [site.name for site in view.sites if not view.has("sum", site.name)]
        before, after = _mean(view), _mean(view, new)
        if way == "aggregate":
            assert digest(before) == digest(after) == digest(_start(view, new[0]))
        else:
            number = view.total("sum").addends
            for name, tensor in after.items():
                expected = (number * before[name] + len(new) * view.initial()[name]) / (number + len(new))
                torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("initialisation", WAYS)
def test_forgetting_and_coming_back_are_exact(tmp_path: Path, initialisation: str):
    words = [*FEW, f"objective.initialisation={initialisation}", "evaluation.sites=0"]
    config = small(tmp_path, *words, sites=6, samples=20)
    simulate(config)
    with method_of(config) as method:
        aggregate = method.state
        there = [site.name for site in aggregate.members() if aggregate.slots.has("sum", site.name)]
        never = next(site.name for site in aggregate.members() if site.name not in there)
        before = aggregate.digest()["sum"]
        aggregate.membership.forget([never], {"evidence": None, "digest_before": {}})
        assert aggregate.digest()["sum"] == before
        aggregate.membership.forget([there[0]], {"evidence": None, "digest_before": {}})
        assert aggregate.digest()["sum"] == sum_of_contributions(aggregate)
        after = aggregate.digest()["sum"]
        aggregate.readmit([there[0], never])
        assert aggregate.digest()["sum"] == after  # they come back with what they train next
        assert not aggregate.slots.has("sum", there[0])
        aggregate.membership.forget(there[1:], {"evidence": None, "digest_before": {}})
        assert aggregate.slots.total("sum").addends == 0
        assert digest(aggregate.aggregate().state)  # what all start from
    assert audit(folder(config))["ok"]


def test_masked_sums_are_those_that_can_be_read(tmp_path: Path):
    digests = set()
    for masks in ("false", "true"):
        words = [
            "federation.fraction=0.5",
            "rounds=3",
            "training.batch=4",
            f"federation.secure_aggregation={masks}",
            f"run.name={masks}",
        ]
        run = set_up(small(tmp_path / masks, *words, sites=6, samples=20)).all_rounds()
        assert all(run.aggregate.checks()[0].values())
        digests.add(run.aggregate.digest()["sum"])
    assert len(digests) == 1


@pytest.mark.parametrize(("words", "message"), [
    (("federation.fraction=0.34",), "changes more slowly than with fedavg; objective.initialisation=aggregate"),
    (("federation.fraction=0.34", "objective.mode=regularised"), "have not trained yet slow down the sum"),
    (("federation.fraction=0.34", "objective.initialisation=aggregate"), ""),
    (("federation.fraction=0.34", "objective.mode=fedavg"), ""),
    ((), ""),
])  # fmt: skip
def test_a_low_fraction_is_reported(tmp_path: Path, words: tuple[str, ...], message: str):
    config = small(tmp_path, *words, sites=6, samples=20)
    lines = strategy_of(resolve(config)).warnings(resolve(config))
    assert bool(lines) == bool(message) and all(message in line and "2 of 6 sites" in line for line in lines)


def test_only_exact_begins_at_the_aggregate(tmp_path: Path):
    config = small(tmp_path, "objective.mode=regularised", "objective.initialisation=aggregate")
    with pytest.raises(UserError, match="aggregate works only with mode=exact; take shared or own"):
        strategy_of(resolve(config)).check(resolve(config))
