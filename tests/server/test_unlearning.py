"""Forgetting on request: what is left is the sum of the others, bit for bit, and nothing of the site is kept."""

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch

from fedloom.clients.storage.states import write_state
from fedloom.conf import Config, UserError
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.slots import SlotUpdate
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.run.training_run import one_round
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, WatchedApp, folder, started, sum_of_contributions
from tests.server.runs import copied, method_of
from tests.server.unlearnings import (
    ONE,
    SITES,
    THREE,
    TWO,
    added_up,
    asked,
    configured,
    forget,
    fulfil,
    further,
    kinds,
    run,
)


@pytest.fixture(scope="module", params=["shared", "own"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run"), f"objective.initialisation={request.param}"))


def tables(path: Path) -> dict[str, list]:
    """All that the ledger holds."""
    with Ledger.open(path, server=False) as ledger:
        names = ("runs", "sites", "rounds", "contributions", "requests", "events")
        return {name: ledger._query(f"SELECT * FROM {name} ORDER BY 1, 2") for name in names}


def test_the_sum_is_that_of_the_remaining_contributions_whatever_the_order(finished: Config, tmp_path: Path):
    orders = [*([list(order)] for order in permutations([ONE, THREE])), [[ONE], [THREE]], [[THREE], [ONE]]]
    digests = {forget(copied(finished, tmp_path / str(place)), *order) for place, order in enumerate(orders)}
    assert len(digests) == 1


@pytest.mark.parametrize("initialisation", ["own", "shared"])
def test_before_any_round_the_sum_is_that_of_a_run_without_the_site(tmp_path: Path, initialisation: str):
    config = configured(tmp_path, f"objective.initialisation={initialisation}")
    aggregate = started(config, at=tmp_path / "all")
    aggregate.membership.forget([ONE, THREE], {})
    others = started(config, only=["site-0000", TWO], at=tmp_path / "others")
    assert aggregate.digest() == others.digest()
    aggregate.readmit([THREE])
    assert aggregate.digest() == started(config, only=["site-0000", TWO, THREE], at=tmp_path / "back").digest()
    aggregate.readmit([ONE])
    assert aggregate.digest() == started(config, at=tmp_path / "again").digest() == {"sum": sum_of_contributions(aggregate)}


def test_nothing_of_the_site_is_left_in_the_folder(tmp_path: Path):
    config = run(configured(tmp_path, "baselines=[independent]"))
    path = folder(config)
    for staged in (f"{ONE}.safetensors", f".{ONE}.safetensors-x"):  # finished and half written
        write_state(path / "staging" / staged, {"w": torch.zeros(1)})
    write_state(path / "retrained" / "earlier" / "states" / "x.safetensors", {"w": torch.zeros(1)})
    with method_of(config) as method:
        blob = method.ledger.history(ONE)[-1].blob
        unlearning = method.unlearning()
        done = fulfil(unlearning, asked(unlearning, "r1", [ONE]))
        assert method.ledger.history(ONE) == []
        assert not method.ledger.blobs.path(blob).exists()
        referred = {one.blob for one in method.ledger.all_latest().values()} | set(
            method.ledger.rounds()[-1].states.values()
        )
        assert method.ledger.blobs.names() == referred
    assert not [found for found in path.rglob("*") if ONE in str(found.relative_to(path))]
    stores = [found for found in done["erased"] if found.startswith("sites/")]
    assert len(stores) == 2  # its own and the baseline's
    others = {
        "staging/site-0001.safetensors",
        "staging/.site-0001.safetensors-x",
        "states",
        "baselines",
        "retrained/earlier",
        "losses.json",
    }
    assert set(done["erased"]) - set(stores) == others
    assert not any((path / name).exists() for name in others)


def test_forgotten_sites_are_not_asked_until_they_are_readmitted(finished: Config, tmp_path: Path):
    config, client = copied(finished, tmp_path), WatchedApp()
    with method_of(config) as method:
        unlearning = method.unlearning()
        fulfil(unlearning, asked(unlearning, "r1", [ONE]))
        further(method, config, 3, client)
        assert [(order.site, order.round, order.members) for order in client.orders] == [(s, 3, 3) for s in (0, 2, 3)]
        method.state.readmit([ONE])
        initial = method.state.slots.contribution("sum", ONE)
        fresh = started(config, at=tmp_path / "fresh")
        assert digest(initial) == digest(fresh.slots.contribution("sum", ONE))
        assert added_up(method) == method.state.digest()["sum"]
        client.orders.clear()
        further(method, config, 4, client)
        assert [order.site for order in client.orders] == [0, 1, 2, 3]
        assert [order.base for order in client.orders] == [3, 0, 3, 3]
        assert method.ledger.history(ONE)[-1].round == 4
        assert added_up(method) == method.state.digest()["sum"]
    assert check(folder(config)) == []


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["site-001"], "did you mean 'site-0001'"),
        ([TWO], "'site-0002' is already forgotten"),
        ([ONE, ONE], "'site-0001' is named twice"),
        (["site-0000", ONE, THREE], "no site would be left"),
    ],
)
def test_what_cannot_be_done_is_refused_and_does_not_wait(finished: Config, tmp_path: Path, sites: list[str], message: str):
    config = copied(finished, tmp_path)
    forget(config, [TWO])
    before = tables(folder(config))
    with method_of(config) as method, pytest.raises(UserError, match=message):
        asked(method.unlearning(), "r2", sites)
    assert tables(folder(config)) == before


@pytest.mark.parametrize("id", ["../r1", "a/b", ".r1", "", "x" * 101])
def test_a_request_has_a_name_that_can_name_its_files(finished: Config, tmp_path: Path, id: str):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        with pytest.raises(UserError, match="request id"):
            asked(method.unlearning(), id, [ONE])
        assert method.ledger.waiting() == []


def test_fedavg_cannot_subtract_and_says_so(tmp_path: Path):
    config = run(configured(tmp_path, "objective.mode=fedavg"))
    with method_of(config) as method:
        with pytest.raises(UserError, match=r"stores no contributions, .* train again without it"):
            asked(method.unlearning(), "r1", [ONE])
        assert method.ledger.waiting() == []
        with pytest.raises(UserError, match="stores no contributions"):
            method.state.membership.forget([ONE], {})


def test_the_same_request_again_changes_nothing(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        first = fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE], "asked by mail"))
        assert kinds(method.ledger, "r1") == ["received", "applied", "verified"]
        assert list(first["times"]) == ["received", "applied"]
    before, file = tables(folder(config)), folder(config) / CERTIFICATES / "r1.json"
    text = file.read_bytes()
    for sites in ([ONE], [TWO]):  # its sites are those that it was received with
        with method_of(config) as method:
            again = asked(method.unlearning(), "r1", sites)
            assert (again.state, again.sites) == ("verified", (ONE,))
            assert not method.unlearning().take(pytest.fail)
        assert json.loads(text) == json.loads(json.dumps(first))
        assert tables(folder(config)) == before
        assert file.read_bytes() == text


def test_a_forgotten_site_leaves_no_trace_in_the_rounds_that_follow(tmp_path: Path):
    """Two runs that differ in the forgotten site's contribution alone go on with the same sums."""
    sums = []
    for name in ("one", "other"):
        config = configured(tmp_path / name, "training.rate=0.01")
        with method_of(config) as method:
            aggregate = method.state
            if name == "other":
                state = {key: tensor + 1 for key, tensor in aggregate.slots.contribution("sum", ONE).items()}
                aggregate.slots.put([SlotUpdate("sum", ONE, state, 1)], 1)
                aggregate.commit(1, {})
            aggregate.membership.forget([ONE], {})
            federation = ClientChannel(InlineGrid(SITES, store_folder(config)), config.roster, 0)
            federation.join(5.0)
            loop = RoundLoop(config, "run", federation, aggregate, method.evaluator, Recorder())
            one_round(loop, 2)
            sums.append((aggregate.digest(), digest(aggregate.slots.kept["shared"])))
    assert sums[0] == sums[1]
