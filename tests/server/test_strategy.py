"""Sum aggregation at the server: what the sum is, and that forgetting is never having had, bit for bit."""

import itertools
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from fedloom.clients.networks.base import HEAD
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import MEAN, ROUND, SITE, STAR, SUBSET
from fedloom.clients.storage.store import SiteStore
from fedloom.conf import UserError
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import digest
from fedloom.server.ledger import LedgerError
from fedloom.server.run.checks import check
from fedloom.sims.benchmarks.soak_replies import changed, entry
from fedloom.sims.engines.adapter import store_folder
from tests.server.parts import (
    WatchedApp,
    contribution,
    extractor,
    given,
    on_disk,
    sent_in,
    set_up,
    small,
    staged,
    started,
    sum_of_contributions,
)
from tests.server.strategies import LAYER, SUMMING, N, everyone, histories, hypothesis_on_disk, many, play, records, shapes


@pytest.mark.parametrize("mode", SUMMING)
@pytest.mark.parametrize("initialisation", ["shared", "own"])
@hypothesis.given(history=histories, data=st.data())
@hypothesis_on_disk
def test_forgetting_sites_is_never_having_had_them_bit_for_bit(tmp_path_factory, mode, initialisation, history, data):
    root = tmp_path_factory.mktemp("run")
    config = many(root, mode, f"objective.initialisation={initialisation}")
    gone = data.draw(st.lists(st.sampled_from(range(1, N)), unique=True, min_size=1), label="gone")
    names = [everyone()[place].name for place in gone]
    rest = [site.name for site in everyone() if site.name not in names]
    whole, never = started(config, at=root / "whole"), started(config, only=rest, at=root / "never")
    play(whole, config, history)
    play(never, config, history)
    before = digest(whole.slots.total("sum").totals)
    forgotten = whole.slots.sum_without("sum", names)
    assert digest(forgotten.totals) == digest(never.slots.total("sum").totals) != before
    assert forgotten.addends == never.slots.total("sum").addends == len(rest)
    network, other = whole.without(names), never.aggregate().state
    assert network is not None
    names_of = list(never.slots.total("sum").totals)
    assert len(names_of) == 6
    assert all(torch.equal(network.state[name], other[name]) for name in names_of)
    assert digest(whole.slots.total("sum").totals) == before  # it is a view: nothing was taken out of the run


@hypothesis.given(history=histories, data=st.data())
@hypothesis_on_disk
def test_sites_are_forgotten_to_the_same_bits_in_any_order(tmp_path_factory, history, data):
    config = many(tmp_path_factory.mktemp("run"))
    aggregate = started(config)
    play(aggregate, config, history)
    gone = data.draw(st.lists(st.sampled_from([site.name for site in everyone()]), unique=True, min_size=2))
    digests = {
        digest(aggregate.slots.sum_without("sum", list(order)).totals)
        for order in itertools.islice(itertools.permutations(gone), 6)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("mode", [*SUMMING, "fedavg"])
@hypothesis.given(history=histories, data=st.data())
@hypothesis_on_disk
def test_the_order_of_arrival_does_not_change_a_bit(tmp_path_factory, mode, history, data):
    root = tmp_path_factory.mktemp("run")
    config = many(root, mode)
    one, other = started(config, at=root / "one"), started(config, at=root / "other")
    play(one, config, history)
    play(other, config, [data.draw(st.permutations(arrivals)) for arrivals in history])
    assert one.digest() == other.digest()
    assert digest(one.aggregate().state) == digest(other.aggregate().state)
    assert digest(one.slots.kept["shared"]) == digest(other.slots.kept["shared"])


@pytest.mark.parametrize("mode", SUMMING)
@hypothesis.given(history=histories)
@hypothesis_on_disk
def test_the_sum_is_that_of_the_contributions_whoever_answers(tmp_path_factory, mode, history):
    config = many(tmp_path_factory.mktemp("run"), mode)
    aggregate = started(config)
    play(aggregate, config, history)
    assert digest(aggregate.slots.total("sum").totals) == sum_of_contributions(aggregate)
    answered = {place for arrivals in history for place in arrivals}
    for place, site in enumerate(everyone()):
        last = max((n for n, arrivals in enumerate(history, start=1) if place in arrivals), default=0)
        assert aggregate.slots.base(site.name) == last
        state = records(config, site.name, last)[SITE] if place in answered else shapes()
        kept = aggregate.slots.contribution("sum", site.name)
        assert digest(kept) == digest({name: quantise(state, aggregate.slots.bits)[name] for name in kept})
    assert all(aggregate.checks()[0].values())
    assert len(aggregate.checks()[0]) == 4


@pytest.mark.parametrize("mode", SUMMING)
def test_the_sum_is_that_of_the_contributions_after_a_real_run_with_samples_and_drops(tmp_path: Path, mode):
    config = small(tmp_path, f"objective.mode={mode}", "federation.fraction=0.5", "rounds=3", sites=5, samples=20)
    client = WatchedApp(changed(SITE, entry(LAYER, float("nan"))), place=2, rounds=(1, 2, 3))
    run = set_up(config, client).all_rounds()
    asked = {order.site for order in client.orders}
    assert len(client.orders) == 9  # three of five, three times
    assert 2 in asked
    assert any(record["dropped"] for record in run.listener.records)
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)
    assert all(run.aggregate.checks()[0].values())
    assert run.aggregate.slots.base(everyone()[2].name) == 0


def test_the_checks_find_a_sum_that_was_tampered_with(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    assert all(aggregate.checks()[0].values())
    aggregate.slots.total("sum").totals[LAYER].view(-1)[0] += 1  # 2 ** -32
    checks = aggregate.checks()[0]
    assert not checks["sum_of_contributions"]
    assert not checks["subtraction_exact"]


def test_the_checks_find_a_contribution_that_was_tampered_with(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    kept = contribution(aggregate, "site-0001")
    kept[LAYER].view(-1)[0] -= 1
    aggregate.slots.contributions.stage("site-0001", 2, {"sum": kept}, samples=10)
    aggregate.slots.contributions.commit(2, aggregate.slots._states(), aggregate.digest(), {})
    assert not aggregate.checks()[0]["sum_of_contributions"]


def test_a_contribution_whose_file_was_changed_is_named(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    path = aggregate.slots.contributions.file("site-0001")
    assert path is not None
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    aggregate.slots.reload()  # a server that starts again has nothing in memory
    with pytest.raises(LedgerError, match=rf"{path.name}: is damaged"):
        aggregate.without(["site-0001"])


def test_exact_the_mean_moves_by_the_mean_of_the_steps_of_two_real_sites(tmp_path: Path):
    config = small(tmp_path, "rounds=1", sites=2)
    run = set_up(config)
    begin = run.aggregate.aggregate().state
    run.all_rounds()
    after = run.aggregate.aggregate().state
    stores = [SiteStore(store_folder(config), "run", site.name) for site in config.roster]
    ends, start = [store.load(1) for store in stores], initial_state(config)
    assert not torch.equal(ends[0][LAYER], ends[1][LAYER])
    for name in extractor(begin):
        mean_step = sum((end[name] - start[name] for end in ends), torch.zeros(())) / 2
        assert (after[name] - (begin[name] + mean_step)).abs().max() <= 1e-6
        assert (after[name] - begin[name]).abs().max() > 1e-4  # it did move
    for name in (name for name in begin if name.startswith(HEAD)):
        assert (after[name] - (ends[0][name] + ends[1][name]) / 2).abs().max() <= 1e-6


def test_regularised_the_aggregate_is_the_sum_of_convolutions_and_the_stars_other_weights(tmp_path: Path):
    config = many(tmp_path, "regularised", "network.affine=true", "network.standardise=false")
    aggregate = started(config)
    play(aggregate, config, [list(range(N))])
    replies = [records(config, site.name, 1) for site in everyone()]
    state = aggregate.aggregate().state
    for name, tensor in state.items():
        if tensor.ndim == 4:
            expected = torch.stack([reply[SITE][name] for reply in replies]).sum(0)
        else:
            expected = torch.stack([reply[ROUND][name] for reply in replies]).mean(0)
        assert torch.allclose(tensor, expected, atol=1e-5), name
    star = aggregate.models()["star"].state
    for name, tensor in star.items():
        assert torch.allclose(tensor, torch.stack([reply[ROUND][name] for reply in replies]).mean(0), atol=1e-5)


def test_the_sum_can_have_the_mean_of_the_sites_own_norms(tmp_path: Path):
    config = many(tmp_path, "regularised", "network.affine=true", "network.standardise=false", "strategy.norms=sites")
    aggregate = started(config)
    play(aggregate, config, [list(range(N))])
    names = [site.name for site in everyone()]
    for gone in ([], names[:1], names[1:-1]):
        left = [name for name in names if name not in gone]
        found = aggregate.without(gone) if gone else aggregate.aggregate()
        assert found is not None
        replies = [records(config, name, 1)[SITE] for name in left]
        for name, tensor in extractor(found.state).items():
            whole = torch.stack([reply[name] for reply in replies])
            expected = whole.sum(0) if tensor.ndim == 4 else whole.mean(0)
            assert torch.allclose(tensor, expected, atol=1e-5), name


def test_norms_of_the_sites_are_for_the_regularised_mode_alone(tmp_path: Path):
    with pytest.raises(UserError, match=r"strategy\.norms: sites works only with objective\.mode=regularised"):
        check(many(tmp_path, "exact", "strategy.norms=sites"))


def test_a_run_starts_with_the_sum_of_the_initial_networks(tmp_path: Path):
    shared = started(many(tmp_path))
    bits = shared.slots.bits
    assert digest(shared.aggregate().state) == digest(dequantise(quantise(initial_state(shared.config), bits), bits))
    config = many(tmp_path, "exact", "objective.initialisation=own")
    own = started(config, at=tmp_path / "own")
    states = [initial_state(config, site.name) for site in everyone()]
    for name in extractor(states[0]):
        mean = torch.stack([state[name] for state in states]).mean(0)
        assert torch.allclose(own.aggregate().state[name], mean, atol=1e-6)
    star = started(many(tmp_path, "regularised"), at=tmp_path / "star")
    assert torch.allclose(star.models()["star"].state[LAYER], N * initial_state(config)[LAYER], atol=1e-6)  # Eq. 2 holds


@pytest.mark.parametrize("mode", [*SUMMING, "fedavg"])
def test_what_the_sites_get_is_what_their_objective_reads(tmp_path: Path, mode):
    config = many(tmp_path, mode)
    aggregate = started(config)
    play(aggregate, config, [[0, 3]])
    sent = sent_in(aggregate, 2)
    assert set(sent) == ({MEAN, STAR} if mode == "regularised" else {MEAN})
    expected = aggregate.slots.total("sum").mean() if mode != "fedavg" else aggregate.slots.kept["shared"]
    assert all(torch.equal(sent[MEAN][name], tensor) for name, tensor in expected.items())
    assert all(
        torch.equal(tensor, aggregate.slots.kept["shared"][name])
        for name, tensor in sent[MEAN].items()
        if name.startswith(HEAD)
    )


def test_leave_one_out_means_are_sent_as_configured_and_are_the_means_without_the_site(tmp_path: Path):
    chosen = []
    for subsets, probability, number in [(16, 0.5, N), (2, 0.5, 2), (9, 1.0, N), (2, 0.0, 0)]:
        config = many(tmp_path, "exact", f"strategy.subsets={subsets}", f"objective.subset_probability={probability}")
        aggregate = started(config, at=tmp_path / f"{subsets}-{probability}")
        for round in (1, 2, 3):
            sent = sent_in(aggregate, round)
            names = {name.removeprefix(SUBSET) for name in sent if name.startswith(SUBSET)}
            assert len(names) == number
            chosen.append((subsets, frozenset(names)))
    assert len({names for subsets, names in chosen if subsets == 2 and names}) > 1  # other sites in other rounds
    config = many(tmp_path, "exact", "objective.subset_probability=1", "objective.initialisation=own")
    aggregate = started(config)
    play(aggregate, config, [[0, 1]])
    sent = sent_in(aggregate, 2)
    states = {
        site.name: dequantise(aggregate.slots.contribution("sum", site.name), aggregate.slots.bits) for site in everyone()
    }
    for left, record in sent.items():
        if left.startswith(SUBSET):
            others = [state[LAYER] for name, state in states.items() if name != left.removeprefix(SUBSET)]
            mean = torch.stack(others).mean(0)
            assert torch.allclose(record[LAYER], mean, atol=1e-6)


@pytest.mark.parametrize("mode", ["independent", "fedavg", "regularised"])
def test_leave_one_out_means_are_for_the_exact_mode_alone(tmp_path: Path, mode):
    sent = sent_in(started(many(tmp_path, mode, "objective.subset_probability=1")), 1)
    assert not any(name.startswith(SUBSET) for name in sent)


def test_samples_weigh_the_round_average_but_not_the_sum(tmp_path: Path):
    weights = {0: 10, 3: 30}
    averages = {}
    for weighting in ("equal", "samples"):
        config = many(tmp_path, "exact", f"strategy.weighting={weighting}")
        aggregate = started(config, at=tmp_path / weighting)
        there = [(everyone()[place], samples) for place, samples in weights.items()]
        assert staged(aggregate, 1, [given(site, records(config, site.name, 1), samples) for site, samples in there]) == {}
        aggregate.commit(1, {})
        averages[weighting] = aggregate
    first, second = (records(config, f"site-000{place}", 1)[ROUND] for place in weights)
    for name in first:
        equal, weighted = (averages[how].slots.kept["shared"][name] for how in ("equal", "samples"))
        assert torch.allclose(equal, (first[name] + second[name]) / 2, atol=1e-6)
        assert torch.allclose(weighted, 0.25 * first[name] + 0.75 * second[name], atol=1e-6)
    assert averages["equal"].digest() == averages["samples"].digest()


def test_fedavg_is_the_mean_of_the_replies_and_can_forget_nobody(tmp_path: Path):
    config = many(tmp_path, "fedavg")
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 4]])
    replies = [records(config, f"site-000{place}", 1)[ROUND] for place in (0, 1, 4)]
    for name, tensor in aggregate.aggregate().state.items():
        assert torch.allclose(tensor, torch.stack([reply[name] for reply in replies]).mean(0), atol=1e-6)
    assert aggregate.without(["site-0000"]) is None
    assert list(aggregate.models()) == ["fedavg"]
    assert aggregate.display_name == "fedavg"


def test_the_last_site_cannot_be_forgotten(tmp_path: Path):
    aggregate = started(many(tmp_path))
    names = [site.name for site in aggregate.setup.sites]
    assert aggregate.without(names[:-1]) is not None
    assert aggregate.without(names) is None


def test_an_unknown_mode_is_refused_by_its_key(tmp_path: Path):
    with pytest.raises(UserError, match=r"objective\.mode: got 'exat', takes one of: exact"):
        started(many(tmp_path, "exat"))


def test_forgetting_an_unknown_or_repeated_site_is_refused(tmp_path: Path):
    aggregate = started(many(tmp_path))
    with pytest.raises(UserError, match=r"unknown site 'site-00x0'; did you mean 'site-0004'"):
        aggregate.without(["site-00x0"])
    with pytest.raises(UserError, match="'site-0001' is named twice"):
        aggregate.without(["site-0001", "site-0001"])


def test_a_round_is_committed_once_and_keeps_its_contribution(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0]])
    kept, before = contribution(aggregate, "site-0000"), on_disk(aggregate)
    aggregate.slots.contributions.stage("site-0000", 1, {"sum": records(config, "site-0000", 1)[SITE]}, samples=10)
    with pytest.raises(LedgerError, match="round 1 cannot follow the committed round 1"):
        aggregate.slots.contributions.commit(1, aggregate.slots._states(), aggregate.digest(), {})
    aggregate.slots.contributions.abandon()
    assert on_disk(aggregate) == before
    assert digest(aggregate.slots.contribution("sum", "site-0000")) == digest(kept)
