"""Requests to a server at work: taken up between two rounds."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import Config
from fedloom.fusion.exact import ExactSum
from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import check
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.certificate import CERTIFICATES, read, sums_of
from fedloom.server.unlearning.fulfilment import APPLYING
from fedloom.server.unlearning.requests import KIND
from tests.server.parts import Recorder, WatchedApp, folder
from tests.server.runs import copied, findings, method_of, to_resume, verdicts
from tests.server.unlearnings import ONE, SITES, TWO, asked, configured, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("state", ["received", "applied"])
def test_a_run_that_continues_takes_up_what_a_crash_has_left(finished: Config, tmp_path: Path, state: str):
    config, heard = copied(finished, tmp_path), Recorder()
    with method_of(config) as method:
        request = asked(method.unlearning(), "r1", [ONE])
        if state == "applied":
            method.unlearning().apply(request)
    run(to_resume(config), heard)
    assert heard.messages == [f"Request 'r1' is verified: the contributions of {ONE} are removed."]
    assert not list((folder(config) / "sites").glob(f"*/{ONE}"))
    assert all(finding.verdict == "match" for finding in findings(config))
    assert check(folder(config)) == []


def test_a_certificate_is_verified_beside_a_server_that_commits_meanwhile(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        unlearning = method.unlearning()
        unlearning.certify(unlearning.apply(asked(unlearning, "r1", [ONE])))

        def late(ledger: Ledger) -> dict[str, ExactSum]:
            monkeypatch.undo()
            method.state.membership.forget([TWO], {})
            return sums_of(ledger)

        monkeypatch.setattr("fedloom.server.unlearning.verification.sums_of", late)
        assert verdicts(config) == {"match", "not checkable"}
        assert len(method.state.members()) == SITES - 2


class Asking(Recorder):
    """A listener that queues requests while a round is trained, as another process would; the options are r1's."""

    def __init__(self, path: Path, requests: dict[str, list[str]], during: int = 1, **options: Any) -> None:
        super().__init__()
        self.path, self.requests, self.during, self.options = path, requests, during, options

    def reply(self, site: str, ok: bool, reason: str) -> None:
        super().reply(site, ok, reason)
        if len(self.asked) == self.during:
            self.queue()

    def queue(self) -> None:
        while self.requests:
            id, sites = self.requests.popitem()
            with Ledger.open(self.path, server=False) as reader:
                assert reader.receive(id, KIND, sites, "", self.options if id == "r1" else {}).state == "received"


def test_a_request_that_comes_while_a_round_is_trained_is_fulfilled_before_the_next(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=3"), WatchedApp()
    heard = Asking(folder(config), {"r1": [ONE]})
    run(config, heard, client)
    assert [(order.round, order.site) for order in client.orders] == [
        *((1, site) for site in range(4)), *((round, site) for round in (2, 3) for site in (0, 2, 3))
    ]  # fmt: skip
    assert heard.messages == [f"Request 'r1' is verified: the contributions of {ONE} are removed."]
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
    assert heard.messages[0] == f"Request 'r1' is verified: the contributions of {ONE} are removed."
    assert heard.messages[1].startswith(f"Request 'r2' is refused: the site '{ONE}' is already forgotten")
    assert len(heard.messages) == 2  # once, not before every round
    with Ledger.open(folder(config), server=False) as ledger:
        assert ledger.waiting(applied=True) == []
        request = ledger.request("r2")
        assert request and request.state == "refused" and ONE in (request.result or {})["reason"]
    assert check(folder(config)) == []
    assert RunFolder(folder(config)).summary()["status"] == "finished"


def asked_of(client: WatchedApp) -> list[tuple[int, list[int]]]:
    """Which sites were asked, round by round."""
    return [(round, [one.site for one in orders]) for round, orders in groupby(client.orders, lambda one: one.round)]


def test_repair_continues_beyond_the_last_round_and_is_certified_then(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=2"), WatchedApp()
    heard = Asking(folder(config), {"r1": [ONE]}, repair=3)
    run(config, heard, client)
    assert asked_of(client) == [(1, [0, 1, 2, 3]), (2, [0, 2, 3]), (3, [0, 2, 3]), (4, [0, 2, 3])]
    applied = f"Request 'r1' is applied: the contributions of {ONE} are removed. The certificate follows after round 4."
    assert heard.messages == [applied, f"Request 'r1' is verified: the contributions of {ONE} are removed."]  # fmt: skip
    assert [record["round"] for record in RunFolder(folder(config)).metrics().values()] == [1, 2, 3, 4]
    assert RunFolder(folder(config)).summary()["rounds"] == 4
    with Ledger.open(folder(config), server=False) as ledger:
        assert len({row.digest["sum"] for row in ledger.rounds()}) == 5  # the rate is not 0 beyond the last round
    assert "mismatch" not in verdicts(config)
    assert check(folder(config)) == []


def test_a_rollback_trains_the_rounds_again_and_has_the_bits_of_a_network_retrained_without_the_site(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=3", "federation.history=all"), WatchedApp()
    heard = Asking(folder(config), {"r1": [ONE]}, during=2, rollback=True, retrain=True)
    run(config, heard, client)
    all_sites, others = [0, 1, 2, 3], [0, 2, 3]
    again = [(1, others), (2, others)]
    assert asked_of(client) == [(1, all_sites), (2, all_sites), *again, *again, (3, others)]  # its own, the other network's
    assert heard.messages[0].endswith(f"the contributions of {ONE} are removed. The certificate follows after round 2.")
    assert heard.messages[-1] == f"Request 'r1' is verified: the contributions of {ONE} are removed."
    done = read(folder(config) / CERTIFICATES / "r1.json")
    assert set(done["not_exact"]) == {"events of the ledger", "copies"}  # nothing that is left has seen the site
    retrained = done["evidence"]["retrained"]
    assert retrained["disagreement"] == 0.0
    assert set(retrained["distance"].values()) == {0.0}
    assert [record["replies"] for record in RunFolder(folder(config)).metrics().values()] == [3, 3, 3]
    assert "mismatch" not in verdicts(config)
    assert check(folder(config)) == []


def test_requests_wait_for_the_rounds_of_a_rollback_before_them(tmp_path: Path):
    """Right after going back, the network that they are measured on would know nothing."""
    config, client = configured(tmp_path, "rounds=3", "federation.history=all"), WatchedApp()
    heard = Asking(folder(config), {"r2": [TWO], "r1": [ONE]}, during=2, rollback=True)
    run(config, heard, client)
    assert asked_of(client)[2:] == [(1, [0, 2, 3]), (2, [0, 2, 3]), (3, [0, 3])]
    assert [text.split(":")[0] for text in heard.messages] == [
        "Request 'r1' is applied", "Request 'r1' is verified", "Request 'r2' is verified"]  # fmt: skip
    with Ledger.open(folder(config), server=False) as ledger:
        request = ledger.request("r2")
        assert request and request.result and request.result["round"] == 2
    assert check(folder(config)) == []


class LateAsking(Asking):
    """Queues them when the run is measured, baselines and all."""

    def note(self, text: str) -> None:
        if text.startswith("measuring"):
            self.queue()


def test_a_request_that_is_refused_at_the_very_end_leaves_the_baselines_as_they_are(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=2", "baselines=[fedavg]"), WatchedApp()
    heard = LateAsking(folder(config), {"r1": [ONE]}, during=0, rollback=True)
    run(config, heard, client)
    assert heard.messages[0].startswith("Request 'r1' is refused: ")
    assert len(client.orders) == 2 * 2 * SITES  # of the sum and of the baseline, once
    summary = RunFolder(folder(config)).summary()
    assert summary["status"] == "finished" and "fedavg" in summary["accuracy"]
    assert check(folder(config)) == []


def test_a_rollback_for_which_nothing_was_kept_is_refused_and_the_run_continues(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=3"), WatchedApp()
    heard = Asking(folder(config), {"r1": [ONE]}, during=2, rollback=True)
    run(config, heard, client)
    assert len(client.orders) == 3 * SITES
    assert len(heard.messages) == 1 and heard.messages[0].startswith("Request 'r1' is refused: ")
    assert "federation.history=all" in heard.messages[0]
    assert RunFolder(folder(config)).summary()["status"] == "finished"
    assert check(folder(config)) == []


class Stopping(Asking):
    """Is interrupted when a round is over."""

    def __init__(self, path: Path, requests: dict[str, list[str]], after: int, **options: Any) -> None:
        super().__init__(path, requests, **options)
        self.after = after

    def round_done(self, record: dict[str, Any]) -> None:
        super().round_done(record)
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, 4])
def test_a_run_that_was_stopped_under_repair_continues_with_it(tmp_path: Path, after: int):
    whole, stopped = (configured(tmp_path / name, "rounds=2") for name in ("whole", "stopped"))
    run(whole, Asking(folder(whole), {"r1": [ONE]}, repair=3))
    with pytest.raises(KeyboardInterrupt):
        run(stopped, Stopping(folder(stopped), {"r1": [ONE]}, after, repair=3))
    heard = Recorder()
    run(to_resume(stopped), heard)
    assert heard.messages == [f"Request 'r1' is verified: the contributions of {ONE} are removed."]
    one, other = (RunFolder(folder(config)).summary() for config in (whole, stopped))
    assert one["digest"] == other["digest"]
    assert one["accuracy"] == other["accuracy"]
    assert check(folder(stopped)) == []


class Cancelling(Asking):
    """Cancels a request as soon as the server says that it begins to work on it, or before."""

    def queue(self) -> None:
        super().queue()
        with Ledger.open(self.path, server=False) as reader:
            if (request := reader.request("r1")) and request.state == "received":
                reader.cancel("r1", "dpo")


def test_a_cancelled_request_is_refused_and_the_run_continues(tmp_path: Path):
    config, client = configured(tmp_path, "rounds=2"), WatchedApp()
    heard = Cancelling(folder(config), {"r1": [ONE]})
    run(config, heard, client)
    assert len(client.orders) == 2 * SITES and heard.messages == []
    with Ledger.open(folder(config), server=False) as ledger:
        request = ledger.request("r1")
        assert request and request.state == "refused"
        assert request.result == {"reason": "cancelled by dpo", "cancelled": "dpo"}
        with pytest.raises(LedgerError, match=r"^request 'r1': is already cancelled, by dpo$"):
            ledger.cancel("r1", "dpo")
    assert check(folder(config)) == []


@pytest.mark.parametrize("when", ["_before", "check_forgetting"])
def test_a_request_that_is_cancelled_while_the_server_looks_at_it_is_not_applied(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    config, heard = copied(finished, tmp_path), list[str]()
    with method_of(config) as method:
        unlearning = method.unlearning()
        asked(unlearning, "r1", [ONE])
        owner = unlearning if when == "_before" else unlearning.state
        original = getattr(owner, when)

        def late(*words: Any, **options: Any) -> Any:
            with Ledger.open(folder(config), server=False) as reader:
                reader.cancel("r1", "dpo")
            monkeypatch.undo()
            return original(*words, **options)

        monkeypatch.setattr(owner, when, late)
        assert not unlearning.take(heard.append)
        assert heard == ["Request 'r1' was cancelled."]
        assert len(method.state.members()) == SITES
    assert check(folder(config)) == []


def test_a_request_that_the_server_has_begun_to_apply_cannot_be_cancelled(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        asked(method.unlearning(), "r1", [ONE])
        assert method.ledger.begin("r1", APPLYING, {})
        with Ledger.open(folder(config), server=False) as reader, pytest.raises(LedgerError, match="has begun to apply"):
            reader.cancel("r1", "dpo")
    run(to_resume(config))
    assert verdicts(config) == {"match"}
