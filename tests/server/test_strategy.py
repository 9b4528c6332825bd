"""Sum aggregation at the server: forgetting is never having had, bit for bit, and bad replies leave no trace."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clients.initial import initial_state
from clients.messages import MEAN, ROUND, SITE, STAR, SUBSET
from clients.objectives.modes import HEAD
from clients.states import round_file, write_state
from clients.store import SiteStore
from conf import Config, UserError
from conf.sites import Site, roster
from fusion.exact import State, dequantise, digest, quantise
from server.ledger import LedgerError
from server.strategies import ReplyError
from server.strategies.sum_aggregation import SumAggregate
from sims.engines.adapter import store_folder
from tests.server.parts import (
    WatchedApp,
    changed,
    committed,
    entry,
    extractor,
    folder,
    made_up,
    on_disk,
    set_up,
    small,
    started,
    sum_of_contributions,
)

SUMMING = ["exact", "regularised", "independent"]
N = 5
LAYER = "extractor.0.weight"


def many(root: Path, mode: str = "exact", *overrides: str) -> Config:
    return small(root, f"objective.mode={mode}", *overrides, sites=N)


@functools.cache
def everyone() -> list[Site]:
    """The five sites; they are the same in all configurations here."""
    return roster(many(Path()))


@functools.cache
def shapes(affine: bool = False) -> State:
    return initial_state(many(Path(), "exact", f"network.affine={str(affine).lower()}"))


def records(config: Config, name: str, round: int) -> dict[str, State]:
    """A made-up reply of a site, of the names and shapes that the mode asks for."""
    return _records(config.objective["mode"], config.network["affine"], name, round)


@functools.cache
def _records(mode: str, affine: bool, name: str, round: int) -> dict[str, State]:
    like = shapes(affine)
    mine, shared = made_up(like, name, round, SITE), made_up(like, name, round, ROUND)
    head = {key: tensor for key, tensor in shared.items() if key.startswith(HEAD)}
    return {
        "exact": {SITE: extractor(mine), ROUND: head},
        "regularised": {SITE: extractor(mine), ROUND: shared},
        "independent": {SITE: mine, ROUND: head},
        "fedavg": {ROUND: shared},
    }[mode]


def play(aggregate: SumAggregate, config: Config, rounds: list[list[int]]) -> None:
    """Fold and commit made-up replies; each round lists the sites that answer, in the order of their arrival."""
    members = {site.name for site in aggregate.setup.sites}
    for number, arrivals in enumerate(rounds, start=1):
        for place in arrivals:
            site = everyone()[place]
            if site.name in members:
                aggregate.fold(site, number, records(config, site.name, number), samples=10)
        aggregate.commit(number, {})


# Each round: which sites answer, and in which order; site 0 always does, so that each round has a reply.
histories = st.lists(st.permutations(range(1, N)).flatmap(
    lambda order: st.integers(0, N - 1).map(lambda count: [0, *order[:count]])
), min_size=1, max_size=3)  # fmt: skip
hypothesis_on_disk = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("mode", SUMMING)
@pytest.mark.parametrize("initialisation", ["shared", "own"])
@given(history=histories, data=st.data())
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
    before = digest(whole.sum.totals)
    forgotten = whole.sum_without(names)
    assert digest(forgotten.totals) == digest(never.sum.totals) != before
    assert forgotten.addends == never.sum.addends == len(rest)
    network, other = whole.without(names), never.aggregate()
    assert network is not None
    summed = [name for name, tensor in never.first(rest[0]).items() if never.mode.summed(name, tensor)]
    assert len(summed) == 6
    assert all(torch.equal(network[name], other[name]) for name in summed)
    assert digest(whole.sum.totals) == before  # it is a view: nothing was taken out of the run


@given(history=histories, data=st.data())
@hypothesis_on_disk
def test_sites_are_forgotten_to_the_same_bits_in_any_order(tmp_path_factory, history, data):
    config = many(tmp_path_factory.mktemp("run"))
    aggregate = started(config)
    play(aggregate, config, history)
    gone = data.draw(st.lists(st.sampled_from([site.name for site in everyone()]), unique=True, min_size=2))
    digests = {
        digest(aggregate.sum_without(list(order)).totals) for order in itertools.islice(itertools.permutations(gone), 6)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("mode", [*SUMMING, "fedavg"])
@given(history=histories, data=st.data())
@hypothesis_on_disk
def test_the_order_of_arrival_does_not_change_a_bit(tmp_path_factory, mode, history, data):
    root = tmp_path_factory.mktemp("run")
    config = many(root, mode)
    one, other = started(config, at=root / "one"), started(config, at=root / "other")
    play(one, config, history)
    play(other, config, [data.draw(st.permutations(arrivals)) for arrivals in history])
    assert one.digest() == other.digest()
    assert digest(one.aggregate()) == digest(other.aggregate())
    assert digest(one.shared) == digest(other.shared)


@pytest.mark.parametrize("mode", SUMMING)
@given(history=histories)
@hypothesis_on_disk
def test_the_sum_is_that_of_the_contributions_whoever_answers(tmp_path_factory, mode, history):
    config = many(tmp_path_factory.mktemp("run"), mode)
    aggregate = started(config)
    play(aggregate, config, history)
    assert digest(aggregate.sum.totals) == sum_of_contributions(aggregate)
    answered = {place for arrivals in history for place in arrivals}
    for place, site in enumerate(everyone()):
        last = max((n for n, arrivals in enumerate(history, start=1) if place in arrivals), default=0)
        assert aggregate.base(site) == last
        state = records(config, site.name, last)[SITE] if place in answered else shapes()
        kept = aggregate.contribution(site.name)
        assert digest(kept) == digest({name: quantise(state, aggregate.bits)[name] for name in kept})
    assert all(aggregate.checks().values())
    assert len(aggregate.checks()) == 4


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
    assert all(run.aggregate.checks().values())
    assert run.aggregate.base(everyone()[2]) == 0


def test_the_checks_find_a_sum_that_was_tampered_with(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    assert all(aggregate.checks().values())
    aggregate.sum.totals[LAYER].view(-1)[0] += 1  # 2 ** -32
    checks = aggregate.checks()
    assert not checks["sum_of_contributions"]
    assert not checks["subtraction_exact"]


def test_the_checks_find_a_contribution_that_was_tampered_with(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    kept = aggregate.contribution("site-0001")
    kept[LAYER].view(-1)[0] -= 1
    aggregate.contributions.stage("site-0001", 2, kept, samples=10)
    aggregate.contributions.commit(2, aggregate.states(), aggregate.digest(), {})
    assert not aggregate.checks()["sum_of_contributions"]


def test_a_contribution_whose_file_was_changed_is_named(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    path = aggregate.contributions.file("site-0001")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(LedgerError, match=rf"{path.name}: is damaged"):
        aggregate.without(["site-0001"])


def test_exact_the_mean_moves_by_the_mean_of_the_steps_of_two_real_sites(tmp_path: Path):
    config = small(tmp_path, "rounds=1", sites=2)
    run = set_up(config)
    begin = run.aggregate.aggregate()
    run.all_rounds()
    after = run.aggregate.aggregate()
    stores = [SiteStore(store_folder(config), "run", site.name) for site in roster(config)]
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
    state = aggregate.aggregate()
    for name, tensor in state.items():
        if tensor.ndim == 4:
            expected = torch.stack([reply[SITE][name] for reply in replies]).sum(0)
        else:
            expected = torch.stack([reply[ROUND][name] for reply in replies]).mean(0)
        assert torch.allclose(tensor, expected, atol=1e-5), name
    star = aggregate.extra()["star"]
    for name, tensor in star.items():
        assert torch.allclose(tensor, torch.stack([reply[ROUND][name] for reply in replies]).mean(0), atol=1e-5)


def test_a_run_starts_with_the_sum_of_the_initial_networks(tmp_path: Path):
    shared = started(many(tmp_path))
    assert digest(shared.aggregate()) == digest(dequantise(shared.initial, shared.bits))
    config = many(tmp_path, "exact", "objective.initialisation=own")
    own = started(config, at=tmp_path / "own")
    states = [initial_state(config, site.name) for site in everyone()]
    for name in extractor(states[0]):
        mean = torch.stack([state[name] for state in states]).mean(0)
        assert torch.allclose(own.aggregate()[name], mean, atol=1e-6)
    star = started(many(tmp_path, "regularised"), at=tmp_path / "star")
    assert torch.allclose(star.extra()["star"][LAYER], N * initial_state(config)[LAYER], atol=1e-6)  # Eq. 2 holds


@pytest.mark.parametrize("mode", [*SUMMING, "fedavg"])
def test_what_the_sites_get_is_what_their_objective_reads(tmp_path: Path, mode):
    config = many(tmp_path, mode)
    aggregate = started(config)
    play(aggregate, config, [[0, 3]])
    sent = {name: record.to_torch_state_dict() for name, record in aggregate.records(2).items()}
    assert set(sent) == ({MEAN, STAR} if mode == "regularised" else {MEAN})
    expected = aggregate.sum.mean() if mode != "fedavg" else aggregate.shared
    assert all(torch.equal(sent[MEAN][name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(tensor, aggregate.shared[name]) for name, tensor in sent[MEAN].items() if name.startswith(HEAD))


def test_leave_one_out_means_are_sent_as_configured_and_are_the_means_without_the_site(tmp_path: Path):
    chosen = []
    for subsets, probability, number in [(16, 0.5, N), (2, 0.5, 2), (9, 1.0, N), (2, 0.0, 0)]:
        config = many(tmp_path, "exact", f"strategy.subsets={subsets}", f"objective.subset_probability={probability}")
        aggregate = started(config, at=tmp_path / f"{subsets}-{probability}")
        for round in (1, 2, 3):
            sent = aggregate.records(round)
            names = {name.removeprefix(SUBSET) for name in sent if name.startswith(SUBSET)}
            assert len(names) == number
            chosen.append((subsets, frozenset(names)))
    assert len({names for subsets, names in chosen if subsets == 2 and names}) > 1  # other sites in other rounds
    config = many(tmp_path, "exact", "objective.subset_probability=1", "objective.initialisation=own")
    aggregate = started(config)
    play(aggregate, config, [[0, 1]])
    sent = aggregate.records(2)
    states = {site.name: dequantise(aggregate.contribution(site.name), aggregate.bits) for site in everyone()}
    for left, record in sent.items():
        if left.startswith(SUBSET):
            others = [state[LAYER] for name, state in states.items() if name != left.removeprefix(SUBSET)]
            mean = torch.stack(others).mean(0)
            assert torch.allclose(record.to_torch_state_dict()[LAYER], mean, atol=1e-6)


@pytest.mark.parametrize("mode", ["independent", "fedavg", "regularised"])
def test_leave_one_out_means_are_for_the_exact_mode_alone(tmp_path: Path, mode):
    sent = started(many(tmp_path, mode, "objective.subset_probability=1")).records(1)
    assert not any(name.startswith(SUBSET) for name in sent)


def test_samples_weigh_the_round_average_but_not_the_sum(tmp_path: Path):
    weights = {0: 10, 3: 30}
    averages = {}
    for weighting in ("equal", "samples"):
        config = many(tmp_path, "exact", f"strategy.weighting={weighting}")
        aggregate = started(config, at=tmp_path / weighting)
        for place, samples in weights.items():
            site = everyone()[place]
            aggregate.fold(site, 1, records(config, site.name, 1), samples)
        aggregate.commit(1, {})
        averages[weighting] = aggregate
    first, second = (records(config, f"site-000{place}", 1)[ROUND] for place in weights)
    for name in first:
        equal, weighted = (averages[how].shared[name] for how in ("equal", "samples"))
        assert torch.allclose(equal, (first[name] + second[name]) / 2, atol=1e-6)
        assert torch.allclose(weighted, 0.25 * first[name] + 0.75 * second[name], atol=1e-6)
    assert averages["equal"].digest() == averages["samples"].digest()


def without(record: str):
    return lambda reply: {name: state for name, state in reply.items() if name != record}


def replaced(record: str, name: str, make):
    return lambda reply: {**reply, record: {**reply[record], name: make(reply[record][name])}}


def lacking(record: str, name: str):
    return lambda reply: {**reply, record: {key: tensor for key, tensor in reply[record].items() if key != name}}


def poked(record: str, name: str, number: float):
    return lambda reply: {**reply, record: entry(name, number)(reply[record])}


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


BIAS, WEIGHT = "head.bias", "head.weight"
BAD = [
    (without(SITE), r"no record 'site'"),
    (without(ROUND), r"no record 'round'"),
    (lambda reply: {}, r"no record"),
    (lacking(SITE, LAYER), rf"record 'site' lacks the tensor '{LAYER}'"),
    (lacking(ROUND, BIAS), rf"record 'round' lacks the tensor '{BIAS}'"),
    (lambda reply: {**reply, SITE: {}}, r"record 'site' lacks the tensor 'extractor\.0\.weight'"),
    (replaced(SITE, LAYER, flat), rf"record 'site', tensor '{LAYER}': shape \[36\], expected \[4, 1, 3, 3\]"),
    (replaced(ROUND, WEIGHT, lambda tensor: tensor.T), rf"record 'round', tensor '{WEIGHT}': shape \[16, 10\]"),
    (replaced(ROUND, BIAS, lambda tensor: tensor[None]), rf"tensor '{BIAS}': shape \[1, 10\]"),
    (poked(SITE, LAYER, float("nan")), rf"'{LAYER}' has entries that are not finite"),
    (poked(SITE, LAYER, -float("inf")), rf"'{LAYER}' has entries that are not finite"),
    (poked(ROUND, BIAS, float("inf")), rf"'{BIAS}' has entries that are not finite"),
    (poked(SITE, LAYER, 2.0**30), rf"'{LAYER}' has an entry of size"),
    (poked(ROUND, WEIGHT, -1e30), rf"'{WEIGHT}' has an entry of size"),
    (lambda reply: {**reply, SITE: {**reply[SITE], "extra": torch.ones(1)}}, r"record 'site' has an unknown .*'extra'"),
    (
        lambda reply: {**reply, ROUND: {**reply[ROUND], LAYER: reply[SITE][LAYER]}},
        rf"record 'round' has an unknown tensor '{LAYER}'",
    ),
]


@pytest.mark.parametrize(("spoil", "line"), BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_reply_that_cannot_be_used_is_refused_by_name_and_leaves_no_trace(tmp_path: Path, spoil, line, first):
    config = many(tmp_path)
    spoilt, clean = started(config, at=tmp_path / "spoilt"), started(config, at=tmp_path / "clean")
    for aggregate in (spoilt, clean):
        play(aggregate, config, [[0, 1]])
    before, kept = digest(spoilt.sum.totals), on_disk(spoilt)
    victim, other = everyone()[1], everyone()[2]
    good = records(config, other.name, 2)
    if not first:
        spoilt.fold(other, 2, good, 10)
        kept = on_disk(spoilt)
    with pytest.raises(ReplyError, match=line):
        spoilt.fold(victim, 2, spoil(records(config, victim.name, 2)), 10)
    assert digest(spoilt.sum.totals) == before
    assert on_disk(spoilt) == kept
    if first:
        spoilt.fold(other, 2, good, 10)
    clean.fold(other, 2, good, 10)
    spoilt.commit(2, {})
    clean.commit(2, {})
    assert spoilt.digest() == clean.digest()
    assert digest(spoilt.shared) == digest(clean.shared)
    assert digest(spoilt.sum.totals) == sum_of_contributions(spoilt)
    assert on_disk(spoilt) == on_disk(clean)


@pytest.mark.parametrize("mode", ["exact", "fedavg", "independent", "regularised"])
def test_an_absurd_number_of_samples_is_refused_and_leaves_no_trace(tmp_path: Path, mode):
    config = many(tmp_path, mode, "strategy.weighting=samples")
    spoilt, clean = started(config, at=tmp_path / "spoilt"), started(config, at=tmp_path / "clean")
    first, second = everyone()[:2]
    with pytest.raises(ReplyError, match="would overflow the exact sum"):
        spoilt.fold(first, 1, records(config, first.name, 1), samples=10**15)
    for aggregate in (spoilt, clean):
        aggregate.fold(second, 1, records(config, second.name, 1), samples=10)
        aggregate.commit(1, {})
    assert spoilt.digest() == clean.digest()
    assert digest(spoilt.shared) == digest(clean.shared)
    assert on_disk(spoilt) == on_disk(clean)
    if spoilt.mode.sums:
        assert digest(spoilt.sum.totals) == sum_of_contributions(spoilt)


def test_a_partial_sum_without_the_contributions_files_stops_the_round_and_leaves_no_trace(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    play(aggregate, config, [[0, 1]])
    site, kept, before = everyone()[1], on_disk(aggregate), aggregate.digest()
    parts = {name: quantise(state, aggregate.bits) for name, state in records(config, site.name, 2).items()}
    with pytest.raises(UserError, match=r"site-0001/round-000002\.safetensors: was not written; federation\.partial_sums"):
        aggregate.fold_partial(site, 2, parts, addends=1, samples=10)
    aggregate.abandon()
    assert (on_disk(aggregate), aggregate.digest()) == (kept, before)
    # where it was written, it is moved into the ledger
    change = {name: tensor - aggregate.contribution(site.name)[name] for name, tensor in parts[SITE].items()}
    write_state(round_file(Path(aggregate.staging()), site.name, 2), parts[SITE])
    aggregate.fold_partial(site, 2, {ROUND: parts[ROUND], SITE: change}, addends=1, samples=10)
    aggregate.commit(2, {})
    assert digest(aggregate.contribution(site.name)) == digest(parts[SITE])
    assert aggregate.digest()["sum"] == sum_of_contributions(aggregate)
    assert not list(Path(aggregate.staging()).rglob("*.safetensors"))


@pytest.mark.parametrize("mode", ["exact", "regularised", "fedavg"])
def test_an_abandoned_round_leaves_state_and_disk_as_they_were(tmp_path: Path, mode):
    config = many(tmp_path, mode)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    before, shared, kept = aggregate.digest(), digest(aggregate.shared), on_disk(aggregate)
    bases = [aggregate.base(site) for site in everyone()]
    for place in (1, 2, 3):
        site = everyone()[place]
        aggregate.fold(site, 2, records(config, site.name, 2), 10)
    aggregate.abandon()
    assert (aggregate.digest(), digest(aggregate.shared)) == (before, shared)
    assert committed(aggregate).items() <= kept.items()
    aggregate.ledger.prune()
    assert on_disk(aggregate)["files"] == kept["files"]
    assert [aggregate.base(site) for site in everyone()] == bases
    again = started(config, at=tmp_path / "again")
    play(again, config, [[0, 1, 2], [3, 4]])
    for place in (3, 4):
        site = everyone()[place]
        aggregate.fold(site, 2, records(config, site.name, 2), 10)
    aggregate.commit(2, {})
    assert aggregate.digest() == again.digest()
    assert digest(aggregate.shared) == digest(again.shared)


def test_what_is_folded_counts_only_after_the_commit(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    site = everyone()[0]
    before, mean = aggregate.digest(), digest(aggregate.aggregate())
    aggregate.fold(site, 1, records(config, site.name, 1), 10)
    assert (aggregate.digest(), digest(aggregate.aggregate()), aggregate.base(site)) == (before, mean, 0)
    assert digest(aggregate.contribution(site.name)) == digest(extractor(aggregate.initial))
    aggregate.commit(1, {})
    assert aggregate.digest() != before
    assert aggregate.base(site) == 1
    mine = quantise(records(config, site.name, 1)[SITE], aggregate.bits)
    assert digest(aggregate.contribution(site.name)) == digest(mine)


@pytest.mark.parametrize("history", ["latest", "all"])
def test_the_latest_contribution_of_each_site_stays_on_disk_or_all_of_them(tmp_path: Path, history):
    config = many(tmp_path, "exact", f"federation.history={history}")
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2], [0, 1], [0]])
    rounds = {site.name: [one.round for one in aggregate.ledger.history(site.name)] for site in everyone()}
    every = {"site-0000": [0, 1, 2, 3], "site-0001": [0, 1, 2], "site-0002": [0, 1], "site-0003": [0], "site-0004": [0]}
    assert rounds == (every if history == "all" else {name: kept[-1:] for name, kept in every.items()})
    given = {aggregate.ledger.blobs.put(aggregate.mode.site_part(aggregate.initial))}
    for name in rounds:
        for one in aggregate.ledger.history(name):
            assert one.samples == (10 if one.round else 0)
            if one.round:
                mine = quantise(records(config, name, one.round)[SITE], aggregate.bits)
                assert digest(aggregate.ledger.blobs.get(one.blob)) == digest(mine)
                given.add(one.blob)
    assert len(given) == 1 + sum(bool(round) for kept in rounds.values() for round in kept)
    states = [set(row.states.values()) for row in aggregate.ledger.rounds()]
    assert [len(names) for names in states] == ([2, 2, 2, 2] if history == "all" else [0, 0, 0, 2])
    assert {path.stem for path in (folder(config) / "blobs").iterdir()} == given.union(*states)


def test_fedavg_is_the_mean_of_the_replies_and_can_forget_nobody(tmp_path: Path):
    config = many(tmp_path, "fedavg")
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 4]])
    replies = [records(config, f"site-000{place}", 1)[ROUND] for place in (0, 1, 4)]
    for name, tensor in aggregate.aggregate().items():
        assert torch.allclose(tensor, torch.stack([reply[name] for reply in replies]).mean(0), atol=1e-6)
    assert aggregate.without(["site-0000"]) is None
    assert aggregate.site("site-0000") is None
    assert aggregate.row() == "fedavg"


def test_the_last_site_cannot_be_forgotten(tmp_path: Path):
    aggregate = started(many(tmp_path))
    names = [site.name for site in aggregate.setup.sites]
    assert aggregate.without(names[:-1]) is not None
    assert aggregate.without(names) is None


def test_an_unknown_mode_is_refused_by_its_key(tmp_path: Path):
    with pytest.raises(UserError, match=r"unknown objective\.mode 'exat'; did you mean 'exact'\?"):
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
    kept, before = aggregate.contribution("site-0000"), on_disk(aggregate)
    aggregate.contributions.stage("site-0000", 1, kept, samples=10)
    with pytest.raises(LedgerError, match="round 1 cannot follow round 1"):
        aggregate.contributions.commit(1, aggregate.states(), aggregate.digest(), {})
    aggregate.contributions.abandon()
    assert on_disk(aggregate) == before
    assert digest(aggregate.contribution("site-0000")) == digest(kept)
