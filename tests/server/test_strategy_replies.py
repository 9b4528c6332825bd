"""Replies to sum aggregation: bad ones leave no trace, good ones count after the commit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import ROUND, SITE, to_arrays
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.storage.states import staged_file, write_state
from fedloom.conf import UserError
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import digest
from fedloom.sims.benchmarks.soak_replies import entry
from tests.server.parts import (
    committed,
    contribution,
    extractor,
    folder,
    given,
    on_disk,
    staged,
    started,
    sum_of_contributions,
    summed,
)
from tests.server.strategies import LAYER, everyone, many, play, records


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
    (replaced(SITE, LAYER, flat), rf"record 'site', tensor '{LAYER}': shape \[72\], expected \[8, 1, 3, 3\]"),
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
    victim, other = everyone()[1], everyone()[2]
    good, bad = given(other, records(config, other.name, 2)), given(victim, spoil(records(config, victim.name, 2)))
    dropped = staged(spoilt, 2, [bad, good] if first else [good, bad])
    assert dropped.keys() == {victim.name}
    assert re.search(line, dropped[victim.name])
    assert staged(clean, 2, [good]) == {}
    spoilt.commit(2, {})
    clean.commit(2, {})
    assert spoilt.digest() == clean.digest()
    assert digest(spoilt.slots.kept["shared"]) == digest(clean.slots.kept["shared"])
    assert summed(spoilt) == sum_of_contributions(spoilt)
    assert on_disk(spoilt) == on_disk(clean)


@pytest.mark.parametrize("mode", ["exact", "fedavg", "independent", "regularised"])
def test_an_absurd_number_of_samples_is_refused_and_leaves_no_trace(tmp_path: Path, mode):
    config = many(tmp_path, mode, "strategy.weighting=samples", "federation.largest_weight=0", "federation.scale_bits=48")
    spoilt, clean = started(config, at=tmp_path / "spoilt"), started(config, at=tmp_path / "clean")
    first, second = everyone()[:2]
    absurd = given(first, records(config, first.name, 1), samples=2**31 - 1)
    good = given(second, records(config, second.name, 1))
    assert "would overflow the exact sum" in staged(spoilt, 1, [absurd, good])[first.name]
    assert staged(clean, 1, [good]) == {}
    for aggregate in (spoilt, clean):
        aggregate.commit(1, {})
    assert spoilt.digest() == clean.digest()
    assert digest(spoilt.slots.kept["shared"]) == digest(clean.slots.kept["shared"])
    assert on_disk(spoilt) == on_disk(clean)
    if mode != "fedavg":
        assert summed(spoilt) == sum_of_contributions(spoilt)


@pytest.mark.parametrize("mode", ["exact", "regularised"])  # sums of all tensors, and of the convolutions alone
def test_a_partial_sum_without_the_contributions_files_stops_the_round_and_leaves_no_trace(tmp_path: Path, mode: str):
    config = many(tmp_path, mode, "network.affine=true")
    aggregate = started(config)
    play(aggregate, config, [[0, 1]])
    site, kept, before = everyone()[1], on_disk(aggregate), aggregate.digest()
    reply = given(site, records(config, site.name, 2))
    parts = {name: quantise(state, aggregate.slots.bits) for name, state in records(config, site.name, 2).items()}
    change = {name: tensor - contribution(aggregate, site.name)[name] for name, tensor in parts[SITE].items()}
    sums, once = {ROUND: to_arrays(parts[ROUND]), SITE: to_arrays(change)}, {ROUND: 1, SITE: 1}
    partial = PartialSum("run", 2, frozenset({"1"}), {site.name: 10}, addends=once, records=sums, new=to_arrays(parts[SITE]))
    with pytest.raises(UserError, match=r"staging/site-0001\.safetensors: was not written; federation\.partial_sums"):
        staged(aggregate, 2, [replace(reply, partial=partial)])
    aggregate.abandon()
    assert (on_disk(aggregate), aggregate.digest()) == (kept, before)
    # where it was written, it is moved into the ledger
    staging = aggregate.slots.contributions.staging
    write_state(staged_file(staging, site.name), records(config, site.name, 2)[SITE])
    assert staged(aggregate, 2, [replace(reply, partial=partial)]) == {}
    aggregate.commit(2, {})
    assert digest(contribution(aggregate, site.name)) == digest(parts[SITE])
    assert aggregate.digest()["sum"] == sum_of_contributions(aggregate)
    known = aggregate.slots.sum_of("sum", [site.name]).totals  # of the round
    aggregate.slots.reload()
    assert digest(known) == digest(aggregate.slots.sum_of("sum", [site.name]).totals)
    assert not list(staging.rglob("*.safetensors"))


@pytest.mark.parametrize("mode", ["exact", "regularised", "fedavg"])
def test_an_abandoned_round_leaves_state_and_disk_as_they_were(tmp_path: Path, mode):
    config = many(tmp_path, mode)
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2]])
    before, shared, kept = aggregate.digest(), digest(aggregate.slots.kept["shared"]), on_disk(aggregate)
    bases = [aggregate.slots.base(site.name) for site in everyone()]
    one, two, three, four = (given(site, records(config, site.name, 2)) for site in everyone()[1:])
    staged(aggregate, 2, [one, two, three])
    aggregate.abandon()
    assert (aggregate.digest(), digest(aggregate.slots.kept["shared"])) == (before, shared)
    assert committed(aggregate).items() <= kept.items()
    aggregate.ledger.prune()
    assert on_disk(aggregate)["files"] == kept["files"]
    assert [aggregate.slots.base(site.name) for site in everyone()] == bases
    again = started(config, at=tmp_path / "again")
    play(again, config, [[0, 1, 2], [3, 4]])
    staged(aggregate, 2, [three, four])
    aggregate.commit(2, {})
    assert aggregate.digest() == again.digest()
    assert digest(aggregate.slots.kept["shared"]) == digest(again.slots.kept["shared"])


def test_what_is_put_counts_in_the_round_and_for_good_after_the_commit(tmp_path: Path):
    config = many(tmp_path)
    aggregate = started(config)
    site = everyone()[0]
    before, kept = aggregate.digest(), committed(aggregate)
    staged(aggregate, 1, [given(site, records(config, site.name, 1))])
    mine = quantise(records(config, site.name, 1)[SITE], aggregate.slots.bits)
    assert digest(contribution(aggregate, site.name)) == digest(mine)
    assert (committed(aggregate), aggregate.slots.base(site.name)) == (kept, 0)
    aggregate.commit(1, {})
    assert aggregate.digest() != before
    assert aggregate.slots.base(site.name) == 1
    assert digest(contribution(aggregate, site.name)) == digest(mine)


@pytest.mark.parametrize("history", ["latest", "all"])
def test_the_latest_contribution_of_each_site_stays_on_disk_or_all_of_them(tmp_path: Path, history):
    config = many(tmp_path, "exact", f"federation.history={history}")
    aggregate = started(config)
    play(aggregate, config, [[0, 1, 2], [0, 1], [0]])
    rounds = {site.name: [one.round for one in aggregate.ledger.history(site.name)] for site in everyone()}
    every = {"site-0000": [0, 1, 2, 3], "site-0001": [0, 1, 2], "site-0002": [0, 1], "site-0003": [0], "site-0004": [0]}
    assert rounds == (every if history == "all" else {name: kept[-1:] for name, kept in every.items()})
    blobs = {aggregate.ledger.blobs.put(extractor(initial_state(config)))}
    for name in rounds:
        for one in aggregate.ledger.history(name):
            assert one.samples == (10 if one.round else 0)
            if one.round:  # float32, as it came: the integers follow from it
                assert digest(aggregate.ledger.blobs.get(one.blob)) == digest(records(config, name, one.round)[SITE])
                blobs.add(one.blob)
    assert len(blobs) == 1 + sum(bool(round) for kept in rounds.values() for round in kept)
    states = [set(row.states.values()) for row in aggregate.ledger.rounds()]
    assert [len(names) for names in states] == ([2, 2, 2, 2] if history == "all" else [0, 0, 0, 2])
    assert {path.stem for path in (folder(config) / "blobs").iterdir()} == blobs.union(*states)
