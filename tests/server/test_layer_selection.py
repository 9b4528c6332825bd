"""Layer selection with all sites at once: shared layers are means by belief, and forgetting is exact."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.clients.objectives.layer_selection.objective import LayerSelection
from fedloom.clients.objectives.layer_selection.session import (
    CHOSEN,
    COUNTS,
    MASS,
    NETWORK,
    OWN_PARTS,
    SELECTION,
    SHARED_PARTS,
    below,
    composed,
)
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check as audit
from fedloom.server.rounds.schedules import Participation
from fedloom.server.strategies.layer_selection import LEAST_MASS, PARTS, PROGRESS, SELECTED, SHARED, LayerSelectionStrategy
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server.arithmetics import one_core, same
from tests.server.parts import Given, LastFirstGrid, Recorder, folder, started
from tests.server.parts import given as reply_of
from tests.server.resumes import Stopped, Stopper
from tests.server.runs import copied, method_of, to_resume
from tests.server.selections import (
    LAYERS,
    OTHER,
    RESNET,
    TASKS,
    A,
    B,
    C,
    Done,
    Noting,
    accuracy_of,
    configured,
    found,
    left,
    masses,
    own_state,
    run,
    selection_of,
)
from tests.server.test_unlearning_live import Asking


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Three sites of 60, 50 and 40 images, two rounds; beside it all layers shared, and none."""
    return run(configured(tmp_path_factory.mktemp("together"), "baselines=[all,none]"))


def put_of(reply: dict[str, State]) -> State:
    """What enters the sum for a reply: parameters times masses, and masses."""
    mine = masses(reply)
    mass = reply[SELECTION][MASS]
    return {**{name: one * mine[name.rpartition(".")[0]] for name, one in reply[SITE].items()}, MASS: mass}


def exact_mean(puts: list[tuple[State, int]], bits: int) -> State:
    """The mean of these, each so many times, in exact integers, divided by its masses."""
    total = ExactSum(bits)
    for state, images in puts:
        total.add(quantise(state, bits), images)
    mean = total.mean()
    mass = dict(zip(LAYERS, mean.pop(MASS), strict=True))
    return {name: one / mass[name.rpartition(".")[0]] for name, one in mean.items()}


def test_shared_layers_are_the_mean_by_images_and_belief_bit_for_bit(done: Done) -> None:
    replies = [done.client.of(place, 2)[1] for place in range(3)]
    with method_of(done.config) as method:
        view = method.state.view()
        expected = exact_mean([(put_of(one), images) for one, images in zip(replies, (60, 50, 40), strict=True)], view.bits)
        assert same(view.server_state(SHARED), expected)
    plain = sum(masses(one)[LAYERS[0]] * images for one, images in zip(replies, (60, 50, 40), strict=True))
    by_hand = sum(one[SITE][f"{LAYERS[0]}.weight"].double() * masses(one)[LAYERS[0]] * images
                  for one, images in zip(replies, (60, 50, 40), strict=True)) / plain  # fmt: skip
    torch.testing.assert_close(expected[f"{LAYERS[0]}.weight"].double(), by_hand, atol=1e-6, rtol=1e-5)
    assert len({round(masses(one)[LAYERS[0]], 3) for one in replies}) == 3
    assert all(done.summary["checks"].values()) and not audit(folder(done.config))


def test_every_site_is_sent_what_all_share_and_nothing_of_its_own_network_leaves_it(done: Done) -> None:
    sent = [done.client.of(place, 2)[0] for place in range(3)]
    assert all(same(one[MEAN], sent[0][MEAN]) and set(one) == {MEAN} for one in sent)
    assert set(sent[0][MEAN]) == {f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")}
    names = {name for blob in (folder(done.config) / "blobs").glob("*") for name in read_state(blob)}
    assert not [name for name in names if "head" in name or "hidden" in name or "network/" in name]


def test_accuracies_are_those_of_the_sites_networks_with_the_layers_that_they_chose(done: Done) -> None:
    with method_of(done.config) as method:
        shared = method.state.view().server_state(SHARED)
    last = [row[-1] for row in found(done)["accuracy"]]
    assert last == [pytest.approx(accuracy_of(done, place, shared)) for place in range(3)]
    said = done.summary["accuracy"]["personal"]  # which once were those before the last mean
    assert list(said.values()) == [*last, pytest.approx(sum(last) / 3)]  # of 60 test examples each
    chosen = ["".join(map(str, own_state(done, place)[CHOSEN].tolist())) for place in range(3)]
    assert found(done)["configuration"] == chosen


def test_a_network_is_composed_as_its_site_chose_whatever_it_counted_itself(done: Done) -> None:
    """With the counts of all others the best configuration may be another one than by its own; once the latter was used."""
    config, own = done.config, own_state(done, 0)
    own |= {CHOSEN: torch.tensor([0, 1]), COUNTS: torch.tensor([9.0, 0.0, 0.0, 0.0])}
    site, objective = config.roster[0], objective_of(config)
    assert isinstance(objective, LayerSelection)
    network = architecture_of(config, site).build()
    found = composed(objective, Task(resolve(config), site, 2, 3, network, {}, lambda: own, torch_generator(0, "t")), {})
    assert found is not None and found[1] == (0, 1)
    for layer, kept in zip(LAYERS, (NETWORK, SHARED_PARTS), strict=True):
        assert torch.equal(found[0][f"{layer}.weight"], own[f"{kept}{layer}.weight"])


def test_a_site_continues_with_what_it_adds_to_shared_layers(tmp_path: Path) -> None:
    done = run(configured(tmp_path, "objective.learner.name=tf", "rounds=1", tasks=TASKS[:1]))
    config, own, site = done.config, own_state(done, 0, 1), done.config.roster[0]
    network = architecture_of(config, site).build()
    session = (
        objective_of(config)
        .session(Task(resolve(config), site, 2, 1, network, {}, lambda: own, torch_generator(0, "t")))
        .local_state()
    )
    assert session is not None
    assert all(same(below(session, part), below(own, part)) for part in (OWN_PARTS, NETWORK))
    factor = own[f"{OWN_PARTS}{LAYERS[0]}.factor0"]
    assert not torch.equal(factor, torch.eye(len(factor)))


def test_all_and_none_stand_beside_it_in_one_run(done: Done) -> None:
    assert list(done.summary["layer_selection"]) == ["learned", "all", "none"]
    assert found(done, "all")["configuration"] == ["11"] * 3 and found(done, "none")["configuration"] == ["00"] * 3
    assert found(done, "all")["shared"][0] == [[1.0, 1.0], [1.0, 1.0]]
    assert set(done.summary["accuracy"]) == {"personal", "all", "none"}
    with Ledger.open(folder(done.config) / "baselines" / "none", server=False) as ledger:
        last = ledger.last_round()
        assert last is not None
        assert same(ledger.blobs.get(last.states[SHARED]), done.client.of(0, 1)[0][MEAN])  # it never moves


def test_facts_tell_what_travels(done: Done) -> None:
    one = found(done)
    assert one["groups"] == [[layer] for layer in LAYERS] and one["own"] == [[1, 2]] * 3
    assert one["bytes"] == 4 * (4 * 9 + 4 + 6 * 4 * 9 + 6) < one["fedavg_bytes"]
    assert one["shared"][0][-1] == [round(mass, 4) for mass in masses(done.client.of(0, 2)[1]).values()]


def played(config: Config, given: list[list[float]]) -> tuple[State, State]:
    """What is shared before and after a round in which these masses are replied; a site's parameters are its number."""
    aggregate, sites = started(config), config.roster
    before = aggregate.view().server_state(SHARED)
    say = [{MASS: torch.tensor(mass), CHOSEN: torch.ones(2)} for mass in given]
    replies = [reply_of(site, {SITE: {name: torch.full_like(one, site.index + 1.0) for name, one in before.items()},
                               SELECTION: one}) for site, one in zip(sites, say, strict=True)]  # fmt: skip
    exchange = Given(replies, sent={MEAN: {}})
    aggregate.strategy.round(aggregate.round_context(1, Participation(sites, 1), exchange))
    assert exchange.dropped == {}
    assert isinstance(aggregate.strategy, LayerSelectionStrategy)
    return before, aggregate.strategy.shared(aggregate.view())


def test_a_layer_that_no_one_shares_stays_and_one_that_hardly_anybody_shares_is_not_noise(tmp_path: Path) -> None:
    """Once masses of a few units of the exact sum gave parameters that were mostly rounding."""
    config = configured(tmp_path, "strategy.every=0", "rounds=9")
    before, after = played(config, [[0.5, 0.0], [0.25, LEAST_MASS / 2], [0.0, 2.0**-31]])
    for part in ("weight", "bias"):
        name, other = (f"{layer}.{part}" for layer in LAYERS)
        torch.testing.assert_close(after[name], torch.full_like(after[name], (0.5 * 1 + 0.25 * 2) / 0.75))
        assert torch.equal(after[other], before[other])


def test_forgetting_leaves_the_sum_that_never_held_the_site_and_erases_its_progress(done: Done, tmp_path: Path) -> None:
    config = copied(done.config, tmp_path)
    unlearn(folder(config), UnlearningRequest([A], id="r1"))
    with method_of(config) as method:
        view, strategy = method.state.view(), method.state.strategy
        puts = [(put_of(done.client.of(place, 2)[1]), images) for place, images in ((1, 50), (2, 40))]
        never = ExactSum(view.bits)
        for state, images in puts:
            never.add(quantise(state, view.bits), images)
        assert same(view.slots.total(PARTS).totals, never.totals) and view.slots.total(PARTS).addends == 90
        assert same(view.server_state(SHARED), exact_mean(puts, view.bits))
        table = view.server_state(PROGRESS)
        assert (table[MASS][:, 0] == -1).all() and not table["total"][:, 0].any() and not table["right"][:, 0].any()
        assert (table[MASS][:, 1:] >= 0).all() and table["total"][-1, 1:].all()
        [facts] = strategy.summary_entries(view)["layer_selection"].values()
        assert facts["sites"] == [B, C] and not view.has(SELECTED, A)
        residue, measured = strategy.residue(view)
        assert "accuracies" in measured.location
        assert "other sites" in residue.location
    summary = json.loads((folder(config) / "summary.json").read_text())
    assert all(A not in json.dumps(one) for one in summary["layer_selection"].values()) and not audit(folder(config))


def test_after_one_round_there_is_no_residue(tmp_path: Path) -> None:
    one = run(configured(tmp_path, "rounds=1"))
    with method_of(one.config) as method:
        assert method.state.residue([A]) == []


def test_a_layer_that_the_forgotten_site_alone_shared_restarts(tmp_path: Path) -> None:
    """Once it stayed as the forgotten site had trained it."""
    fault = selection_of(lambda state: {**state, MASS: torch.tensor([0.5, 0.0])})
    both = Noting(fault, 1, (1, 2))
    done = run(configured(tmp_path, tasks=TASKS[:2]), both)
    with method_of(done.config) as method:
        start = done.client.of(0, 1)[0][MEAN]
        before = method.state.view().server_state(SHARED)
        method.state.membership.forget([A], {}, None)
        after = method.state.view().server_state(SHARED)
        own = done.client.of(1, 2)[1][SITE]
        for part in ("weight", "bias"):
            name, other = (f"{layer}.{part}" for layer in LAYERS)
            assert torch.equal(after[other], start[other]) and not torch.equal(before[other], start[other])
            torch.testing.assert_close(after[name], own[name], atol=1e-6, rtol=1e-5)


def test_when_all_that_trained_are_forgotten_nothing_is_left_but_the_start(tmp_path: Path) -> None:
    done = run(configured(tmp_path, "federation.fraction=0.5", "rounds=1", "objective.prior=tasks", tasks=TASKS[:2]))
    [(place, _)] = done.client.orders
    with method_of(done.config) as method:
        before = method.state.view().server_state(SHARED)
        method.state.membership.forget([(A, B)[place]], {}, None)
        view = method.state.view()
        assert same(view.server_state(SHARED), done.client.of(place, 1)[0][MEAN]) and not same(
            before, view.server_state(SHARED)
        )
        [facts] = method.state.strategy.summary_entries(view)["layer_selection"].values()
        assert facts["sites"] == facts["accuracy"] == []


def test_one_site_alone_is_a_federation_too(tmp_path: Path) -> None:
    done = run(configured(tmp_path, tasks=TASKS[:1]))
    with method_of(done.config) as method:
        own, shared = done.client.of(0, 2)[1][SITE], method.state.view().server_state(SHARED)
        assert all(torch.allclose(shared[name], one, atol=1e-6) for name, one in own.items())


def test_replies_may_come_in_any_order(tmp_path: Path) -> None:
    """Once a site's prior held the counts of those that had replied before it was asked."""
    one, other = (configured(tmp_path / name, "objective.prior=tasks") for name in ("one", "other"))
    run(one, grid=LastFirstGrid)
    run(configured(tmp_path / "other", "objective.prior=tasks", "federation.window=1"))
    assert left(one) == left(other)


def test_with_the_prior_of_all_tasks_a_site_hears_the_counts_of_all_others(tmp_path: Path) -> None:
    done = run(configured(tmp_path, "objective.prior=tasks"))
    counts = [done.client.of(place, 1)[1][SELECTION][COUNTS] for place in range(3)]
    assert [int(one.sum()) for one in counts] == [6, 6, 6]
    for place in range(3):
        assert COUNTS not in done.client.of(place, 1)[0]
        sent = done.client.of(place, 2)[0][COUNTS][COUNTS]
        assert torch.equal(sent.long(), sum(counts) - counts[place])
    with method_of(done.config) as method:
        shared = method.state.view().server_state(SHARED)
    assert [row[-1] for row in found(done)["accuracy"]] == [
        pytest.approx(accuracy_of(done, place, shared)) for place in range(3)
    ]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(done: Done, tmp_path: Path) -> None:
    config = configured(tmp_path, "baselines=[all,none]")
    with pytest.raises(Stopped):
        run(config, listener=Stopper(1))
    run(to_resume(config))
    assert left(config) == left(done.config)


def test_where_some_sites_are_asked_those_asked_last_count(tmp_path: Path) -> None:
    done = run(configured(tmp_path, "federation.fraction=0.5", "rounds=3"))
    with method_of(done.config) as method:
        view = method.state.view()
        last = [place for place, round in done.client.orders if round == 3]
        assert len(last) == 2 and len({place for place, _ in done.client.orders}) == 3
        puts = [(put_of(done.client.of(place, 3)[1]), (60, 50, 40)[place]) for place in last]
        assert same(view.server_state(SHARED), exact_mean(puts, view.bits))
    assert all(row[-1] is not None for row in found(done)["accuracy"])
    assert any(None in [one for pair in rows for one in pair] for rows in found(done)["shared"])


def test_a_site_that_lost_its_store_restarts(tmp_path: Path) -> None:
    config, heard = configured(tmp_path), Recorder()
    with pytest.raises(Stopped):
        run(config, listener=Stopper(1))
    [gone] = store_folder(config).glob(f"*/{B}")
    shutil.rmtree(gone)
    done = run(to_resume(config), listener=heard)
    assert heard.messages[-1] == f"round 2: {B} has lost its own state after round 1; it starts again from the beginning"
    assert done.summary["status"] == "finished" and all(done.summary["checks"].values())
    assert int(own_state(done, 1)[COUNTS].sum()) == 6 and int(own_state(done, 0)[COUNTS].sum()) == 12


@pytest.mark.parametrize("words", [
    ["data.heads=own"],
    ["data.heads=task", "objective.m_steps=1000"],
    ["objective.search={name: sampled, part: 0.0, draws: 3}", "engine.compile=true"],
    ["objective.search={name: pruned, left_out: 0.3}", "objective.prior=posteriors"],
    ["objective.mode=alternating", "objective.certainty=0.4", "objective.search.name=exact"],
    [RESNET, "objective.groups=[7,6,6]", "evaluation.statistics=batch", "objective.learner.name=tf"],
    [OTHER % ("[4, 6]", "batch"), "evaluation.statistics=recomputed", "objective.learner.name=df_cnn"],
    ["network={name: mlp, widths: [8, 6]}", "strategy.every=2"],
])  # fmt: skip
def test_whatever_may_be_combined_runs_and_all_sums_hold(tmp_path: Path, words: list[str]) -> None:
    done = run(configured(tmp_path, "training.steps=2", *words))
    assert done.summary["status"] == "finished" and all(done.summary["checks"].values())
    assert all(0 < mass < 1 for row in next(iter(done.summary["layer_selection"].values()))["shared"] for mass in row[-1])


def test_on_ray_it_is_the_same_bit_by_bit(done: Done, tmp_path: Path) -> None:
    """Sites are trained one by one in a cohort too."""
    config = configured(tmp_path, "engine.name=ray", "engine.workers=1", "engine.vectorise=3")
    assert simulate(config)["layer_selection"] == {"learned": found(done)}


@pytest.mark.parametrize(("options", "orders"), [
    ({}, [(0, 2), (2, 2), (0, 3), (2, 3)]),
    ({"rollback": True}, [(0, 1), (2, 1), (0, 2), (2, 2), (0, 3), (2, 3)]),
    ({"repair": 3}, [(0, 2), (2, 2), (0, 3), (2, 3), (0, 4), (2, 4)]),
])  # fmt: skip
def test_a_request_that_comes_while_it_runs_is_fulfilled_between_rounds(tmp_path: Path, options, orders) -> None:
    config, client = configured(tmp_path, "rounds=3", "objective.prior=tasks", "federation.history=all"), Noting()
    done = run(config, client, Asking(folder(config), {"r1": [B]}, **options))
    assert client.orders[3:] == orders
    assert found(done)["sites"] == [A, C] and all(done.summary["checks"].values()) and not audit(folder(config))
    if options.get("rollback"):
        assert same(client.sent[3][MEAN], client.sent[0][MEAN]) and COUNTS not in client.sent[3]
    else:
        assert torch.equal(client.sent[3][COUNTS][COUNTS].long(), client.replied[2][SELECTION][COUNTS])  # B's are gone
