"""Forgetting on request: what is left is the sum of the others, bit for bit; it can be taken up again, and checked."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import server.unlearning
from clients.states import write_state
from conf import Config, UserError
from conf.sites import roster
from fusion.exact import digest
from server.audit import check
from server.certificate import CERTIFICATES, Finding, verify
from server.evaluate import Evaluator
from server.experiment import open_ledger, run_experiment
from server.federation import Federation
from server.ledger import Ledger, Request
from server.method import Method
from server.rounds import RoundLoop
from server.runfolder import RunFolder
from server.strategies.sum_aggregation import SumAggregate
from server.unlearning import KIND, Unlearning, receive
from sims.engines.adapter import store_folder
from sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, WatchedApp, folder, small, started, sum_of_contributions

SITES = 4
ONE, TWO, THREE = "site-0001", "site-0002", "site-0003"


def configured(root: Path, *words: str) -> Config:
    return small(root, *words, sites=SITES, samples=20)


@pytest.fixture(scope="module", params=["shared", "own"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run"), f"objective.initialisation={request.param}"))


def run(config: Config, listener: Recorder | None = None, client: WatchedApp | None = None) -> Config:
    run_experiment(InlineGrid(SITES, store_folder(config), client or WatchedApp()), config, listener or Recorder())
    return config


def copied(config: Config, root: Path) -> Config:
    """A copy of a run to work on."""
    RunFolder(root / "digits").path.parent.mkdir(parents=True, exist_ok=True)
    _copy(folder(config), root / "digits")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, root=str(root)))


def _copy(here: Path, there: Path) -> None:
    for path in here.rglob("*"):
        if path.is_file():
            (there / path.relative_to(here)).parent.mkdir(parents=True, exist_ok=True)
            (there / path.relative_to(here)).write_bytes(path.read_bytes())


@contextmanager
def method_of(config: Config) -> Iterator[Method]:
    with open_ledger(config, RunFolder(folder(config))) as ledger:
        yield Method(config, RunFolder(folder(config)), ledger, Evaluator(config))


def further(method: Method, config: Config, rounds: int, client: WatchedApp) -> None:
    """Train some more rounds."""
    method.config = dataclasses.replace(config, rounds=rounds)
    method.evaluator = Evaluator(method.config)
    federation = Federation(InlineGrid(SITES, store_folder(config), client), roster(config), 0)
    federation.join(5.0)
    method.train(federation, Recorder())


def summed(method: Method) -> SumAggregate:
    assert isinstance(method.aggregation, SumAggregate)
    return method.aggregation


def tables(path: Path) -> dict[str, list]:
    """All that the ledger holds."""
    with Ledger.open(path, server=False) as ledger:
        names = ("runs", "sites", "rounds", "contributions", "requests", "events")
        return {name: ledger._query(f"SELECT * FROM {name} ORDER BY 1, 2") for name in names}


def kinds(ledger: Ledger, id: str) -> list[str]:
    """The events about a request."""
    return [event.kind for event in ledger.events() if event.body.get("id") == id]


def added_up(method: Method) -> str:
    """The digest of the remaining contributions' sum, added up by torch alone."""
    states = [method.ledger.blobs.get(one.blob) for one in method.ledger.all_latest().values()]
    mode = summed(method).mode
    return digest(mode.summed_part({name: sum(state[name] for state in states) for name in states[0]}))  # type: ignore[misc]


def asked(unlearning: Unlearning, id: str, sites: list[str], reason: str = "") -> Request:
    return receive(unlearning.ledger, id, sites, reason, {})


def forget(config: Config, *requests: list[str]) -> str:
    """Forget these sites, request by request; the digest of the sum."""
    with method_of(config) as method:
        unlearning = method.unlearning()
        for sites in requests:
            unlearning.fulfil(asked(unlearning, "-".join(sites), sites))
        assert added_up(method) == method.aggregation.digest()["sum"]
        assert {site.name for site in method.aggregation.members()} == method.ledger.all_latest().keys()
    assert check(folder(config)) == []
    with Ledger.open(folder(config), server=False) as ledger:
        last = ledger.last_round()
    assert last is not None
    return last.digest["sum"]


def test_the_sum_is_that_of_the_remaining_contributions_whatever_the_order(finished: Config, tmp_path: Path):
    orders = [*([list(order)] for order in permutations([ONE, THREE])), [[ONE], [THREE]], [[THREE], [ONE]]]
    digests = {forget(copied(finished, tmp_path / str(place)), *order) for place, order in enumerate(orders)}
    assert len(digests) == 1


@pytest.mark.parametrize("initialisation", ["own", "shared"])
def test_before_any_round_the_sum_is_that_of_a_run_without_the_site(tmp_path: Path, initialisation: str):
    config = configured(tmp_path, f"objective.initialisation={initialisation}")
    aggregate = started(config, at=tmp_path / "all")
    aggregate.forget([ONE, THREE], {})
    others = started(config, only=["site-0000", TWO], at=tmp_path / "others")
    assert aggregate.digest() == others.digest()
    aggregate.readmit([THREE])
    assert aggregate.digest() == started(config, only=["site-0000", TWO, THREE], at=tmp_path / "back").digest()
    aggregate.readmit([ONE])
    assert aggregate.digest() == started(config, at=tmp_path / "again").digest() == {"sum": sum_of_contributions(aggregate)}


def test_nothing_of_the_site_is_left_in_the_folder(tmp_path: Path):
    config = run(configured(tmp_path, "baselines=[independent]"))
    path = folder(config)
    staged = path / "staging" / ONE / "round-000002.safetensors"
    write_state(staged, {"w": torch.zeros(1)})
    write_state(path / "retrained" / "earlier" / "states" / "x.safetensors", {"w": torch.zeros(1)})
    with method_of(config) as method:
        blob = method.ledger.history(ONE)[-1].blob
        unlearning = method.unlearning()
        done = unlearning.fulfil(asked(unlearning, "r1", [ONE]))
        assert method.ledger.history(ONE) == []
        assert not method.ledger.blobs.path(blob).exists()
        referred = {one.blob for one in method.ledger.all_latest().values()} | set(
            method.ledger.rounds()[-1].states.values()
        )
        assert method.ledger.blobs.names() == referred
    assert not [found for found in path.rglob("*") if ONE in str(found.relative_to(path))]
    stores = [found for found in done["erased"] if found.startswith("sites/")]
    assert len(stores) == 2  # its own and the baseline's
    others = {"staging/site-0001", "states", "baselines", "retrained/earlier"}
    assert set(done["erased"]) - set(stores) == others
    assert not any((path / name).exists() for name in others)


def test_forgotten_sites_are_not_asked_until_they_are_readmitted(finished: Config, tmp_path: Path):
    config, client = copied(finished, tmp_path), WatchedApp()
    with method_of(config) as method:
        unlearning = method.unlearning()
        unlearning.fulfil(asked(unlearning, "r1", [ONE]))
        further(method, config, 3, client)
        assert [(order.site, order.round, order.members) for order in client.orders] == [(s, 3, 3) for s in (0, 2, 3)]
        summed(method).readmit([ONE])
        initial = summed(method).contribution(ONE)
        fresh = started(config, at=tmp_path / "fresh")
        assert digest(initial) == digest(fresh.contribution(ONE))
        assert added_up(method) == method.aggregation.digest()["sum"]
        client.orders.clear()
        further(method, config, 4, client)
        assert [order.site for order in client.orders] == [0, 1, 2, 3]
        assert [order.base for order in client.orders] == [3, 0, 3, 3]
        assert method.ledger.history(ONE)[-1].round == 4
        assert added_up(method) == method.aggregation.digest()["sum"]
    assert check(folder(config)) == []


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        (["site-001"], "did you mean 'site-0001'"),
        ([TWO], "'site-0002' is forgotten already"),
        ([ONE, ONE], "'site-0001' is named twice"),
        (["site-0000", ONE, THREE], "no site would be left"),
    ],
)
def test_what_cannot_be_done_is_refused_and_does_not_wait(finished: Config, tmp_path: Path, sites: list[str], told: str):
    config = copied(finished, tmp_path)
    forget(config, [TWO])
    before = tables(folder(config))
    with method_of(config) as method, pytest.raises(UserError, match=told):
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
        with pytest.raises(UserError, match="sums nothing: no site's part can be subtracted; train again without it"):
            asked(method.unlearning(), "r1", [ONE])
        assert method.ledger.waiting() == []
        with pytest.raises(UserError, match="mode fedavg"):
            method.aggregation.forget([ONE], {})


def test_the_same_request_again_changes_nothing(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        first = method.unlearning().fulfil(asked(method.unlearning(), "r1", [ONE], "asked by mail"))
        assert kinds(method.ledger, "r1") == ["received", "applied", "verified"]
        assert list(first["times"]) == ["received", "applied"]
    before, file = tables(folder(config)), folder(config) / CERTIFICATES / "r1.json"
    text = file.read_bytes()
    for sites in ([ONE], [TWO]):  # its sites are those that it was received with
        with method_of(config) as method:
            again = method.unlearning().fulfil(asked(method.unlearning(), "r1", sites))
            assert again == json.loads(text) == json.loads(json.dumps(first))
        assert tables(folder(config)) == before
        assert file.read_bytes() == text


class Crashed(Exception):
    """Raised where a server dies."""


def crash(*_: Any) -> Any:
    raise Crashed


@pytest.mark.parametrize("where", ["erase", "certificate", "write_bytes"])
def test_a_crash_after_the_subtraction_is_taken_up_again(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    config = copied(finished, tmp_path)
    with monkeypatch.context() as broken, contextlib.suppress(Crashed), method_of(config) as method:
        broken.setattr(server.unlearning, where, crash)
        method.unlearning().fulfil(asked(method.unlearning(), "r1", [ONE]))
    assert check(folder(config)) == []
    with method_of(config) as method:
        assert kinds(method.ledger, "r1") == ["received", "applied"]
        after = method.aggregation.digest()
        done = method.unlearning().fulfil(asked(method.unlearning(), "r1", [ONE]))
        assert method.aggregation.digest() == after == done["exact"]["digest_after"]
        assert kinds(method.ledger, "r1") == ["received", "applied", "verified"]
        assert set(done["evidence"]["before"]["membership"]) == {ONE}
    assert not list((folder(config) / "sites").glob(f"*/{ONE}"))
    assert all(finding.verdict == "match" for finding in findings(config))


@pytest.mark.parametrize("state", ["received", "applied"])
def test_a_run_that_goes_on_takes_up_what_a_crash_has_left(finished: Config, tmp_path: Path, state: str):
    config, heard = copied(finished, tmp_path), Recorder()
    with method_of(config) as method:
        request = asked(method.unlearning(), "r1", [ONE])
        if state == "applied":
            method.unlearning().apply(request)
    run(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)), heard)
    assert heard.messages == [f"request 'r1' verified: {ONE} forgotten"]
    assert not list((folder(config) / "sites").glob(f"*/{ONE}"))
    assert all(finding.verdict == "match" for finding in findings(config))
    assert check(folder(config)) == []


def findings(config: Config, name: str = "r1") -> list[Finding]:
    with Ledger.open(folder(config), server=False) as ledger:
        return verify(folder(config) / CERTIFICATES / f"{name}.json", ledger)


@pytest.fixture
def certified(finished: Config, tmp_path: Path) -> tuple[Config, dict[str, Any]]:
    """A run that has forgotten a site, and the certificate."""
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        return config, method.unlearning().fulfil(asked(method.unlearning(), "r1", [ONE], "asked"))


def test_the_certificate_says_what_was_done_and_measured(finished: Config, certified: tuple[Config, dict[str, Any]]):
    config, done = certified
    with Ledger.open(folder(finished), server=False) as before, Ledger.open(folder(config), server=False) as after:
        old, new = before.last_round(), after.last_round()
        assert old is not None and new is not None
        assert done["exact"]["digest_before"] == old.digest != new.digest
        assert done["exact"]["digest_after"] == new.digest == {"sum": done["exact"]["sum_of_remaining"]}
        assert done["exact"]["remaining"] == {name: one.blob for name, one in before.all_latest().items() if name != ONE}
        assert done["run"] == after.run().run
    assert (done["sites"], done["reason"]) == ([ONE], "asked")
    assert {"head", "other sites' networks", "copies"} <= done["not_exact"].keys()
    evidence = done["evidence"]
    assert evidence["samples"] == {"digits": 50}
    for stage in ("before", "after"):
        assert 0 <= evidence[stage]["accuracy"]["digits"] <= 1
        for attack in evidence[stage]["membership"][ONE].values():
            assert (attack["members"], attack["others"]) == (20, 50)
            assert attack["low"] <= attack["auc"] <= attack["high"]
    assert evidence["relearning"][ONE].keys() == {"forgotten", "fresh"}
    target = 0.9 * evidence["before"]["accuracy"]["digits"]
    assert all(one["target"] == pytest.approx(target) for one in evidence["relearning"][ONE].values())


def put(*place: str) -> Callable[[dict[str, Any]], None]:
    """A forgery: something else at that place."""

    def change(given: dict[str, Any]) -> None:
        for name in place[:-1]:
            given = given[name]
        old = given[place[-1]]
        given[place[-1]] = {"list": [TWO], "dict": {}, "str": "0" * 64}[type(old).__name__]

    return change


FORGED = [["run"], ["sites"], ["ledger", "digest"], ["exact", "digest_before"], ["exact", "digest_after", "sum"],
          ["exact", "sum_of_remaining"], ["exact", "remaining"]]  # fmt: skip


def test_a_certificate_is_verified_and_a_forged_one_is_not(certified: tuple[Config, dict[str, Any]]):
    config, done = certified
    file = folder(config) / CERTIFICATES / "r1.json"
    assert {finding.verdict for finding in findings(config)} == {"match"}
    for place in FORGED:
        forged = json.loads(json.dumps(done))
        put(*place)(forged)
        file.write_text(json.dumps(forged))
        assert "mismatch" in {finding.verdict for finding in findings(config)}, place
    for text in ("", "{", "[]", "{}", '{"exact": 3}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"r1\.json: is no certificate of fedloom"):
            findings(config)


def test_after_further_rounds_the_sum_then_is_not_checkable(certified: tuple[Config, dict[str, Any]]):
    config, _ = certified
    with method_of(config) as method:
        further(method, config, 3, WatchedApp())
    verdicts = {finding.what: finding.verdict for finding in findings(config)}
    assert verdicts.pop("sum of the remaining contributions then") == "not checkable"
    assert set(verdicts.values()) == {"match"}


def test_a_site_that_was_readmitted_is_a_mismatch(certified: tuple[Config, dict[str, Any]]):
    config, _ = certified
    with method_of(config) as method:
        summed(method).readmit([ONE])
    wrong = {finding.what for finding in findings(config) if finding.verdict == "mismatch"}
    assert {f"{ONE} takes no part", f"nothing is kept of {ONE}"} <= wrong


class Asking(Recorder):
    """A listener that queues requests while round 1 is trained, as another process would."""

    def __init__(self, path: Path, requests: dict[str, list[str]]) -> None:
        super().__init__()
        self.path, self.requests = path, requests

    def reply(self, site: str, ok: bool, reason: str) -> None:
        super().reply(site, ok, reason)
        while self.requests:
            id, sites = self.requests.popitem()
            with Ledger.open(self.path, server=False) as reader:
                assert reader.receive(id, KIND, sites, "", {}).state == "received"


def test_a_request_that_comes_while_a_round_is_trained_is_fulfilled_before_the_next(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=3"), WatchedApp()
    heard = Asking(folder(config), {"r1": [ONE]})
    run(config, heard, client)
    assert [(order.round, order.site) for order in client.orders] == [
        *((1, site) for site in range(4)), *((round, site) for round in (2, 3) for site in (0, 2, 3))
    ]  # fmt: skip
    assert heard.messages == [f"request 'r1' verified: {ONE} forgotten"]
    assert heard.asked == [4, 3, 3]
    summary = RunFolder(folder(config)).summary()
    assert summary["unlearned"] == [ONE]
    assert ONE not in summary["accuracy"]
    assert not (folder(config) / "states" / f"{ONE}.safetensors").exists()
    verdicts = [finding.verdict for finding in findings(config)]
    assert "mismatch" not in verdicts and "not checkable" in verdicts
    assert check(folder(config)) == []


def test_two_requests_for_one_site_do_not_stop_the_run(tmp_path: Path):
    config = configured(tmp_path)
    heard = Asking(folder(config), {"r2": [ONE], "r1": [ONE]})
    run(config, heard)
    assert heard.messages[0] == f"request 'r1' verified: {ONE} forgotten"
    assert heard.messages[1].startswith(f"request 'r2' is refused: the site '{ONE}' is forgotten already")
    assert len(heard.messages) == 2  # once, not before every round
    with Ledger.open(folder(config), server=False) as ledger:
        assert ledger.waiting(applied=True) == []
        request = ledger.request("r2")
        assert request and request.state == "refused" and ONE in (request.result or {})["reason"]
    assert check(folder(config)) == []
    assert RunFolder(folder(config)).summary()["status"] == "finished"


def test_certifying_does_not_erase_a_site_that_was_readmitted_meanwhile(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        unlearning = method.unlearning()
        request = unlearning.apply(asked(unlearning, "r1", [ONE]))
        summed(method).readmit([ONE])
        store = folder(config) / "sites" / "run" / ONE
        store.mkdir(parents=True, exist_ok=True)
        unlearning.certify(request)
        assert store.is_dir()


def test_a_forgotten_site_leaves_no_trace_in_the_rounds_that_follow(tmp_path: Path):
    """Two runs that differ in the forgotten site's contribution alone go on with the same sums."""
    sums = []
    for name in ("one", "other"):
        config = configured(tmp_path / name, "training.rate=0.01")
        with method_of_new(config) as method:
            aggregate = summed(method)
            if name == "other":
                state = {key: tensor + 1 for key, tensor in aggregate.contribution(ONE).items()}
                aggregate.sum.replace(aggregate.mode.summed_part(aggregate.contribution(ONE)),
                                      aggregate.mode.summed_part(state))  # fmt: skip
                aggregate.contributions.stage(ONE, 1, state, 1)
                aggregate.contributions.commit(1, aggregate.states(), aggregate.digest(), {})
            aggregate.forget([ONE], {})
            federation = Federation(InlineGrid(SITES, store_folder(config)), roster(config), 0)
            federation.join(5.0)
            loop = RoundLoop(config, "run", federation, aggregate, method.evaluator, Recorder())
            loop.one(2)
            sums.append((aggregate.digest(), digest(aggregate.shared)))
    assert sums[0] == sums[1]


@contextmanager
def method_of_new(config: Config) -> Iterator[Method]:
    RunFolder(folder(config)).open(config)
    with method_of(config) as method:
        yield method
