"""Requests whose server dies at any step, taken up again: the certificate is that of a request that was not disturbed."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom.server.run_folder.layout
import fedloom.server.unlearning.certificate
import fedloom.server.unlearning.fulfilment
from fedloom.conf import Config, UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.blobs import Blobs
from fedloom.server.ledger.membership import Membership
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.server.unlearning.requests import KIND
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, WatchedApp, folder
from tests.server.runs import copied, findings, method_of, to_resume
from tests.server.unlearnings import ONE, SITES, TWO, asked, configured, fulfil, further, kinds, run


class Crashed(BaseException):
    """Raised where a server dies."""


def crash(*_: Any, **__: Any) -> Any:
    raise Crashed


def crash_after(function: Any) -> Any:
    def crashing(*given: Any, **named: Any) -> Any:
        function(*given, **named)
        raise Crashed

    return crashing


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run"), "federation.history=all"))


@pytest.fixture(scope="module", params=[{}, {"rollback": True}], ids=["plain", "rollback"])
def smooth(request: pytest.FixtureRequest, finished: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A request's options, and its certificate where nothing happens."""
    config = copied(finished, tmp_path_factory.mktemp("smooth"))
    with Ledger.open(folder(config), server=False) as ledger:
        ledger.receive("r1", KIND, [ONE], "", request.param)
    run(to_resume(config))
    yield request.param, of(config)


def of(config: Config) -> dict[str, Any]:
    """What a certificate says, but for times and numbers of events."""
    given = read(folder(config) / CERTIFICATES / "r1.json")
    return {key: given[key] for key in ("sites", "options", "exact", "not_exact", "erased", "evidence")}


PLACES = {
    "before the rollback": (Membership, "roll_back", crash),
    "before the subtraction": (Membership, "forget", crash),
    "before the blobs go": (Blobs, "remove", crash),
    "before the deletion": (fedloom.server.unlearning.fulfilment, "left_of", crash),
    "within the deletion": (
        fedloom.server.run_folder.layout,
        "shutil",
        SimpleNamespace(rmtree=crash_after(shutil.rmtree)),
    ),
    "before the certificate": (fedloom.server.unlearning.fulfilment, "certificate", crash),
    "before it is written": (fedloom.server.unlearning.certificate, "write_bytes", crash),
    "after it is written": (
        fedloom.server.unlearning.certificate,
        "write_bytes",
        crash_after(fedloom.server.unlearning.certificate.write_bytes),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_request_whose_server_dies_ends_as_if_it_had_not(
    finished: Config, smooth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    options, expected = smooth
    config = copied(finished, tmp_path)
    with Ledger.open(folder(config), server=False) as ledger:
        ledger.receive("r1", KIND, [ONE], "", options)
    with monkeypatch.context() as broken, contextlib.suppress(Crashed):
        broken.setattr(*PLACES[place])
        run(to_resume(config))
    assert [found for found in check(folder(config)) if found.severity == "problem"] == []
    run(to_resume(config))
    assert of(config) == expected
    with Ledger.open(folder(config), server=False) as ledger:
        assert kinds(ledger, "r1") == ["received", "applied", "verified"]
    assert not list((folder(config) / "sites").glob(f"*/{ONE}"))
    assert all(finding.verdict != "mismatch" for finding in findings(config))
    assert check(folder(config)) == []


class AskingLate(Recorder):
    """Queues a request while the finished networks are measured."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def note(self, text: str) -> None:
        if "measuring" in text:
            with Ledger.open(self.path, server=False) as reader:
                reader.receive("r1", KIND, [ONE], "", {})


def test_a_request_that_comes_after_the_last_round_is_fulfilled_before_the_run_ends(tmp_path: Path):
    config = configured(tmp_path, "baselines=[fedavg]")
    heard = AskingLate(folder(config))
    run(config, heard)
    assert heard.messages == [f"Request 'r1' is verified: the contributions of {ONE} are removed."]
    assert check(folder(config)) == []


def test_rolling_back_past_a_readmission_is_refused(finished: Config, tmp_path: Path):
    """The older sums lack the readmitted site, which takes part now."""
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE, TWO]))
        for site, rounds in ((TWO, 3), (ONE, 4)):
            method.state.readmit([site])
            further(method, config, rounds, WatchedApp())
        with pytest.raises(UserError, match="a site was readmitted after round 2; the sum of that round is without it"):
            method.state.check_forgetting([TWO], rollback=True)
        with pytest.raises(UserError, match="after round 1 is not stored"):
            method.ledger.check_roll_back(1)
        method.ledger.check_roll_back(4)


def test_sites_that_went_back_have_lost_no_store(tmp_path: Path):
    """lost_store=stop is for stores that are lost without a reason."""
    config = run(configured(tmp_path, "federation.history=all", "federation.lost_store=stop"))
    with Ledger.open(folder(config), server=False) as ledger:
        ledger.receive("r1", KIND, [ONE], "", {"rollback": True})
    run(to_resume(config))
    assert all(finding.verdict != "mismatch" for finding in findings(config))


def test_only_those_that_take_part_have_to_be_there(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [f"site-000{SITES - 1}"]))
        federation = method.joined(InlineGrid(SITES - 1, store_folder(config)))
    assert len(federation.nodes) == SITES - 1


class Interrupting(Recorder):
    def round_started(self, round: int, asked: int) -> None:
        if round == 2:
            raise KeyboardInterrupt


def test_the_summary_of_an_interrupted_run_knows_who_is_forgotten(tmp_path: Path):
    config = configured(tmp_path, "rounds=3")
    with pytest.raises(KeyboardInterrupt):
        run(config, Interrupting())
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE]))
    with pytest.raises(KeyboardInterrupt):
        run(to_resume(config), Interrupting())
    summary = RunFolder(folder(config)).summary()
    assert (summary["status"], summary["unlearned"], summary["rounds"]) == ("interrupted", [ONE], 3)
    assert len(summary["sites"]) == SITES - 1
