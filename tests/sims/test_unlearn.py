"""Requests to forget, as a user meets them: unlearn, readmit and verify, on runs that are there."""

import contextlib
import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.sims.api import run as api_run
from fedloom.sims.operations.readmit import readmit
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.operations.verify import verify_certificate
from fedloom.sims.report.forgetting import forgetting_table
from fedloom.sims.report.sites import sites_table
from tests.sims.commands import FEDLOOM, ONE, SMALL, TWO, Command, events, last_line, refused
from tests.sims.other_data import cancer

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_a_site_is_forgotten_verified_and_readmitted(fedloom: Command, run: Path):
    said = fedloom("unlearn", run, ONE, "--request-id", "r1", "--reason", "asked by mail")
    assert said.code == 0, said.err
    assert said.out.count(f"Request 'r1' is verified: the contributions of {ONE} are removed; no measurement shows") == 1
    file, page = run / "certificates/r1.json", run / "certificates/r1.html"
    assert str(page) in said.out
    written, text = file.read_text(), page.read_text()
    done = json.loads(written)
    assert (done["sites"], done["reason"]) == ([ONE], "asked by mail")
    networks = [done["evidence"][stage]["network"] for stage in ("before", "after")]
    assert networks[0] != networks[1] and all(network in text for network in networks)
    assert done["exact"]["digest_after"]["sum"] in text and "What is exact" in text and "What is not exact" in text
    summary = json.loads((run / "summary.json").read_text())
    assert summary["unlearned"] == [ONE] and ONE not in summary["accuracy"] and summary["status"] == "finished"
    assert [site["name"] for site in summary["sites"]] == ["site-0000", TWO]
    assert summary["digest"] == done["exact"]["digest_after"]
    assert not (run / "states" / f"{ONE}.safetensors").exists() and (run / "states" / f"{TWO}.safetensors").is_file()
    assert (run / "report.html").is_file()
    assert check(run) == []

    said = fedloom("verify", file, run)
    assert said.code == 0 and "r1.json: match" in said.out
    assert "| accuracy after on digits | match |" in said.out
    assert fedloom("verify", file).out == fedloom("verify", run, "r1").out == said.out
    refused(fedloom("verify", run, "r9"), "r9.json: this certificate does not exist; requests of this run that have one: r1")
    refused(fedloom("verify", run, "../certificates/r1"), "'../certificates/r1' is not the id of a request")
    changed = json.loads(json.dumps(done))
    changed["evidence"]["after"]["accuracy"]["digits"] += 0.05
    for wrong, what in (({**done, "sites": [TWO]}, "sites"), (changed, "accuracy after on digits")):
        file.write_text(json.dumps(wrong))
        said = fedloom("verify", file, run)
        assert said.code == 1 and "r1.json: mismatch" in said.out and f"| {what} | mismatch |" in said.out
    said = fedloom("ledger", run, "--check")
    assert said.code == 1 and "certificates/r1.json: differs from what the server wrote" in said.out
    file.write_text(written)

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "ledger.lock"}
    again = fedloom("unlearn", run, ONE, "--request-id", "r1", "--json")
    assert again.code == 0 and f"Request 'r1' was verified before: the contributions of {ONE} are removed; no" in again.out
    assert last_line(again) == done
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "ledger.lock"} == before

    other = fedloom("unlearn", run, ONE, TWO, "--request-id", "r1")
    refused(other, f"request 'r1' does not forget {TWO}; use another --request-id")
    other = fedloom("unlearn", run, ONE, "--request-id", "r1", "--repair", "2")
    refused(other, "request 'r1' exists with another value of --repair; use another --request-id")

    said = fedloom("readmit", run, ONE)
    assert said.code == 0 and "can participate again" in said.out and "No rounds remain" in said.out
    said = fedloom("verify", file, run)
    assert said.code == 1 and "it was readmitted since" in said.out
    refused(fedloom("unlearn", run, ONE, "--request-id", "r1"), f"request 'r1' forgot {ONE}, but it was readmitted since")
    assert fedloom("ledger", run, "--check").code == 0
    refused(fedloom("readmit", run, ONE), "is not forgotten")
    listed = fedloom("ledger", run).out
    assert "readmitted" in listed and "asked by mail" in listed


def test_pages_and_records_from_before_the_request_are_named(fedloom: Command, run: Path, tmp_path: Path):
    page = tmp_path / "before.html"
    assert fedloom("compare", run, "--html", page).code == 0
    assert "If a run forgets a site later, write the page again." in page.read_text()
    (run / "csv").mkdir()
    said = fedloom("unlearn", run, ONE)
    assert said.code == 0, said.err
    assert (
        f"Comparison pages written before ({page}), and trackers' records ({run / 'csv'}), still show the earlier results"
        in said.out
    )
    assert fedloom("compare", run, "--html", page).code == 0 and f"has forgotten {ONE}" in page.read_text()
    (run / "csv").rmdir()
    (tmp_path / "compared.json").unlink()
    said = fedloom("unlearn", run, TWO)
    assert said.out.strip().endswith(". If a comparison page shows this run, write the page again.")


def test_without_a_key_verify_says_that_the_signature_is_not_checked(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    file, what = run / "certificates/r1.json", "signature not checked; give --key"
    said = fedloom("verify", file)
    assert said.code == 0 and f"| {what} | not checked | it fits the key in the file next to the certificate, " in said.out
    assert "which proves only consistency" in said.out
    assert what not in fedloom("verify", file, run, "--key", fedloom("key").out.strip()).out
    signature = file.with_suffix(".sig")
    signature.write_text(signature.read_text().replace('"signature": "', '"signature": "AAAA'))
    said = fedloom("verify", file)
    assert said.code == 1 and f"| {what} | mismatch | it does not fit the key" in said.out
    signature.unlink()
    said = fedloom("verify", file)
    assert said.code == 0 and "signature" not in said.out


def test_a_network_that_still_holds_the_site_is_not_a_match(fedloom: Command, run: Path):
    """What was there before the request is put back, from a copy, say."""
    before = (run / "states/aggregate.safetensors").read_bytes()
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    certificate, after = run / "certificates/r1.json", (run / "states/aggregate.safetensors").read_bytes()
    (run / "states/aggregate.safetensors").write_bytes(before)
    said = fedloom("verify", certificate, run)
    assert said.code == 1 and "| states/aggregate.safetensors | mismatch |" in said.out
    (run / "states/aggregate.safetensors").write_bytes(after)
    (run / "states/copy.safetensors").write_bytes(before)
    said = fedloom("verify", certificate, run)
    assert said.code == 0 and "| states/copy.safetensors | not checkable |" in said.out


def test_a_ledger_whose_events_are_broken_does_not_match(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    assert "| the ledger's events follow each other | match |" in fedloom("verify", run / "certificates/r1.json", run).out
    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")  # it refuses changes of events
        db.execute("UPDATE events SET time = '2020-01-01T00:00:00Z' WHERE id = 1")
    said = fedloom("verify", run / "certificates/r1.json", run)
    assert said.code == 1 and "| the ledger's events follow each other | mismatch |" in said.out
    assert "does not match its digest" in said.out


def test_a_baseline_with_the_site_that_is_put_back_is_not_a_match(fedloom: Command, finished_run: Path, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1", "--retrain").code == 0
    certificate = run / "certificates/r1.json"
    assert (run / "retrained/r1").is_dir() and fedloom("verify", certificate, run).code == 0
    shutil.copytree(finished_run, run / "baselines/fedavg")
    said = fedloom("verify", certificate, run)
    assert said.code == 1 and f"| this machine stores nothing of {ONE} | mismatch | it has baselines/fedavg |" in said.out


def test_unlearn_answers_in_json_and_repairs(fedloom: Command, run: Path):
    said = fedloom("unlearn", run, ONE, "--repair", 1, "--json")
    assert said.code == 0, said.err
    done = last_line(said)
    assert (run / "certificates" / f"{done['request']}.json").is_file()
    assert json.loads((run / "certificates" / f"{done['request']}.json").read_text()) == done
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(one["round"], one["replies"]) for one in rounds] == [(1, 3), (2, 3), (3, 2)]
    assert fedloom("ledger", run, "--check").code == 0
    assert fedloom("verify", run / "certificates" / f"{done['request']}.json", run).code == 0


def test_unlearn_compares_with_a_network_that_was_trained_without_the_site(fedloom: Command, run: Path):
    (run / "retrained").mkdir()
    (run / "retrained/earlier").mkdir()
    done = last_line(fedloom("unlearn", run, ONE, "--request-id", "r1", "--retrain", "--json"))
    retrained = done["evidence"]["retrained"]
    assert retrained["distance"] and 0 <= retrained["accuracy"]["digits"] <= 1 and retrained["disagreement"] is not None
    assert "retrained/earlier" in done["erased"]
    page = (run / "certificates/r1.html").read_text()
    assert "relative distance of the weights" in page and "different predicted classes" in page and "retrain True" in page
    with Ledger.open(run / "retrained/r1", server=False) as ledger:
        last = ledger.last_round()
        assert list(ledger.sites()) == ["site-0000", TWO]
        assert last is not None and last.round == 2
    assert not [path for path in run.rglob("*") if ONE in path.name]
    assert check(run) == check(run / "retrained/r1") == []


def test_without_the_images_to_measure_with_nothing_is_forgotten_unless_that_is_said(fedloom: Command, tmp_path: Path):
    data = tmp_path / "usps.npz"
    pixels, labels = np.random.default_rng(0).integers(0, 256, (90, 16, 16), np.uint8), np.arange(90, dtype=np.uint8) % 10
    np.savez(data, X_train=pixels, y_train=labels, X_test=pixels, y_test=labels)
    words = ["sites=[{domain: usps, count: 2}]", f"data={{root: {tmp_path}, size: 8}}", f"run.root={tmp_path}", "--quiet"]
    assert fedloom("run", "digits", *SMALL, "rounds=1", *words).code == 0
    run, before = tmp_path / "digits", events(tmp_path / "digits")
    data.unlink()

    def unlearn(*words: str) -> str:
        """By another process, which knows the images no more."""
        done = subprocess.run([FEDLOOM, "unlearn", run, ONE, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        return done.stderr

    said = unlearn()
    assert "usps" in said and "Nothing is forgotten yet" in said and "--without-data forgets" in said
    assert events(run) == before
    unlearn("--without-data", "--request-id", "r")
    done = json.loads((run / "certificates/r.json").read_text())
    assert done["sites"] == [ONE] and done["evidence"]["after"]["accuracy"] == {}


def test_retraining_that_was_killed_continues(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    from fedloom.server.rounds.loop import RoundLoop
    from fedloom.server.run import training_run

    whole = training_run.one_round

    def killed(loop: RoundLoop, round: int, *more: Any) -> dict:
        if round == 2:
            raise KeyboardInterrupt
        return whole(loop, round, *more)

    with monkeypatch.context() as broken:
        broken.setattr(training_run, "one_round", killed)
        assert fedloom("unlearn", run, ONE, "--request-id", "r1", "--retrain").code == 130
    with Ledger.open(run / "retrained/r1", server=False) as ledger:
        assert [row.round for row in ledger.rounds()] == [0, 1]
    said = fedloom("unlearn", run, ONE, "--request-id", "r1", "--retrain")
    assert said.code == 0, said.err
    assert fedloom("verify", run / "certificates/r1.json", run).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["site-001"], "did you mean 'site-0001'"),
        ([ONE, ONE], "named twice"),
        (["site-0000", ONE, TWO], "no site would be left"),
        ([ONE, "--request-id", "../r1"], "request id: got '../r1'"),
        ([ONE, "--back", "0.3"], "--back: has no effect without --restore; add --restore N"),
        ([ONE, "--restore", "1", "--back", "nan"], "--back: got nan, takes a number from 0 to 1"),
        ([ONE, "--restore", "9" * 20], "--restore: got 99999999999999999999, takes a whole number from 0 to 999999"),
        ([ONE, "--reason", "\udcff withdrawn"], "is not valid UTF-8 text"),
    ],
)
def test_what_cannot_be_forgotten_is_one_line_and_changes_nothing(
    fedloom: Command, run: Path, words: list[str], message: str
):
    before = events(run)
    refused(fedloom("unlearn", run, *words), message)
    assert events(run) == before
    assert fedloom("ledger", run, "--check").code == 0


def test_a_certificate_that_is_missing_is_reported_in_plain_words(fedloom: Command, run: Path):
    refused(fedloom("verify", run / "certificates/r9.json", run), "r9.json: this certificate does not exist")


@pytest.mark.parametrize("fusion", ["parts", "refit"])
def test_the_certificate_holds_when_nothing_is_left_of_what_was_given(fedloom: Command, tmp_path: Path, fusion: str):
    networks = "networks: [{name: mlp, widths: [8, 6]}, {name: mlp, widths: [6]}]"
    sites = f"sites=[{{domain: digits, count: 2, samples: 60, {networks}}}]"
    words = [sites, "network={name: mlp, widths: [8, 6]}", "rounds=1", "training.epochs=1", "strategy.probe.samples=20",
             f"strategy.fusion={fusion}", *SMALL[1:3], *SMALL[4:], f"run.root={tmp_path}"]  # fmt: skip
    assert fedloom("run", "different_depths", *words).code == 0
    run = tmp_path / "different_depths"
    assert fedloom("unlearn", run, "site-0000", "--request-id", "one").code == 0
    assert fedloom("readmit", run, "site-0000").code == 0
    assert fedloom("unlearn", run, ONE, "--request-id", "two").code == 0
    said = fedloom("verify", run / "certificates/two.json", run)
    assert said.code == 0 and "two.json: match" in said.out
    done = json.loads((run / "certificates/two.json").read_text())
    assert done["evidence"]["after"]["accuracy"]["digits"] < 0.3  # as at the start


def test_a_site_that_has_the_rows_of_a_value_is_named_with_it(tmp_path: Path):
    sites = [{"domain": cancer(tmp_path), "count": 3, "partition": {"name": "column", "column": "hospital"}}]
    few = {"rounds": 1, "network": {"name": "mlp", "widths": [4]}, "objective": "fedavg", "strategy": "fedavg"}
    place = {"run": {"root": str(tmp_path), "name": "hospitals"}, "engine": {"name": "inline"}}
    result = api_run({**few, **place, "sites": sites})
    assert [row[0] for row in forgetting_table(result.summary).rows][1] == "site-0001 (hospital=B)"
    assert "site-0001 (hospital=B)" in [row[0] for row in sites_table(result.summary).rows]
    folder = tmp_path / "hospitals"
    with pytest.raises(UserError, match=r"unknown site 'hospital=D'; .*known: site-0000 \(hospital=A\), site-0001 \(h"):
        unlearn(folder, UnlearningRequest(["hospital=D"]))
    text, certificate = unlearn(folder, UnlearningRequest(["hospital=B"], "r1"))
    assert (
        certificate["parts"] == {"site-0001": "hospital=B"}
        and "the contributions of site-0001 (hospital=B) are removed" in text
    )
    assert "site-0001 (hospital=B)" in (tmp_path / "hospitals/certificates/r1.html").read_text(encoding="utf-8")
    table, matches = verify_certificate(tmp_path / "hospitals/certificates/r1.json", tmp_path / "hospitals")
    assert matches and "sites site-0001 (hospital=B)" in table.plain()
    assert "<td>site-0001 (hospital=B)</td>" in (folder / "report.html").read_text(encoding="utf-8")
    for site, fits in {"B": True, "hospital=B": True, "hospital=A": False}.items():
        assert verify_certificate(folder / "certificates/r1.json", folder, sites=[site]).good == fits
    assert "site-0001 can participate again" in readmit(folder, ["B"])


def test_a_running_server_removes_the_values_of_a_forgotten_site_from_metrics(tmp_path: Path):
    def ask(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            with Ledger.open(tmp_path / "asked", server=False) as ledger:
                ledger.receive("r1", "unlearn", [ONE], "", {})

    result = api_run("digits", *SMALL, "rounds=3", "engine.name=inline", "evaluation.where=sites",
                     "run.name=asked", f"run.root={tmp_path}", on_round=ask)  # fmt: skip
    folder = Path(result.folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert ["loss" in record for record in records] == [False, False, True]
    assert all(ONE not in record.get(key, {}) for record in records for key in ("loss", "validation"))
    assert verify_certificate(folder / "certificates" / "r1.json", folder).good
    changed = [{**records[0], "loss": {ONE: 0.5}}, *records[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in changed))
    table = verify_certificate(folder / "certificates" / "r1.json", folder).table
    assert ["mismatch", "it has values in metrics.jsonl"] in [row[1:] for row in table.rows]
