"""The certificate: what it says, what a forged one is found out by, and how it is made after a crash."""

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.clients.protocol.signatures import Identity, erased_words
from fedloom.conf import Config, UserError
from fedloom.server.ledger import Ledger
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.server.unlearning.scope import scope
from fedloom.server.unlearning.signing import key_path, operator_key, public_line, public_pem
from fedloom.server.unlearning.verification import deleted
from fedloom.sims.operations.verify import verify_certificate
from fedloom.sims.report.certificates import write_html
from tests.node_keys import write_node_key
from tests.server.parts import WatchedApp, folder
from tests.server.runs import copied, findings, method_of
from tests.server.unlearnings import ONE, TWO, asked, configured, fulfil, further, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run")))


@pytest.fixture
def certified(finished: Config, tmp_path: Path) -> tuple[Config, dict[str, Any]]:
    """A run that has forgotten a site, and the certificate."""
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        return config, fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE], "asked"))


def test_attacks_stand_in_one_order(tmp_path: Path):
    given = json.loads((Path(__file__).parent / "formats/4/certificates/before.json").read_text())
    stages = [given["evidence"][stage]["membership"]["site-0003"] for stage in ("before", "after")]
    assert list(stages[0]) != list(stages[1])
    (tmp_path / "before.json").write_text(json.dumps(given))
    page = write_html(tmp_path / "before.json").read_text()
    assert re.findall(r">(loss|logistic)<", page) == ["logistic", "loss"] * 2


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


def test_the_certificate_says_what_was_tested_and_what_no_one_looked_for(certified: tuple[Config, dict[str, Any]]):
    config, done = certified
    scope = done["scope"]
    assert any(f"examples of {ONE}" in what for what in scope["tested"])
    assert not any("distance" in what for what in scope["tested"])
    assert any("--retrain" in what for what in scope["not_tested"])
    assert any("backdoor" in what and "wakes" in what for what in scope["not_tested"])
    page = write_html(folder(config) / CERTIFICATES / "r1.json").read_text()
    assert "What was tested, and what was not" in page and "BadFU" in page


def test_a_certificate_without_measurements_says_that_the_network_was_not_looked_at():
    found = scope(
        {"before": {}, "after": {"accuracy": {}, "membership": {}, "not_measured": "the images are the sites' own"}}
    )
    assert found["tested"] == []
    assert "was not measured" in found["not_tested"][0]
    assert not any("--retrain" in what for what in found["not_tested"])


def test_the_certificate_says_what_the_ledger_keeps_of_the_forgotten_and_nothing_more_is_kept(
    finished: Config, certified: tuple[Config, dict[str, Any]]
):
    config, done = certified
    assert "the sum" in done["exact"]["statement"] and "weights are deleted from the ledger" in done["exact"]["statement"]
    assert "in it or in the ledger" not in done["exact"]["statement"]
    reason = done["not_exact"]["events of the ledger"]
    assert all(word in reason for word in ("round", "number of samples", "sha256", "chain", "could prove that it was sent"))
    with Ledger.open(folder(finished), server=False) as before, Ledger.open(folder(config), server=False) as after:
        given = {one.blob for one in before.history(ONE)}
        kept = [event.body["contributions"][ONE] for event in after.events("round") if ONE in event.body["contributions"]]
        assert given and given <= {one["blob"] for one in kept}
        assert {key for one in kept for key in one} == {"blob", "samples", "round", "bits"}
        assert not given & after.blobs.names()
    page = write_html(folder(config) / CERTIFICATES / "r1.json").read_text(encoding="utf-8")
    assert html.escape(reason) in page and html.escape(done["exact"]["statement"]) in page


def put(*place: str) -> Callable[[dict[str, Any]], None]:
    """A forgery: something else at that place."""

    def change(given: dict[str, Any]) -> None:
        for name in place[:-1]:
            given = given[name]
        old = given[place[-1]]
        given[place[-1]] = {"list": [TWO], "dict": {}, "str": "0" * 64}[type(old).__name__]

    return change


FORGED = [["run"], ["sites"], ["ledger", "digest"], ["exact", "digest_before"], ["exact", "digest_after", "sum"],
          ["exact", "sum_of_remaining"], ["exact", "remaining"], ["exact", "statement"], ["exact", "tensors"], ["reason"],
          ["options"], ["erased"], ["times"], ["not_exact"], ["evidence", "before"], ["evidence", "after"]]  # fmt: skip


def test_a_certificate_is_verified_and_a_forged_one_is_not(certified: tuple[Config, dict[str, Any]]):
    config, done = certified
    file = folder(config) / CERTIFICATES / "r1.json"
    assert {finding.verdict for finding in findings(config)} == {"match"}
    for place in FORGED:
        forged = json.loads(json.dumps(done))
        put(*place)(forged)
        file.write_text(json.dumps(forged))
        assert "mismatch" in {finding.verdict for finding in findings(config)}, place
    odd = [{**done, part: 3} for part in ("sites", "options", "evidence", "exact", "run")]
    odd += [{**done, "exact": {**done["exact"], **part}} for part in (
        {"sum_of_remaining": None}, {"remaining": {"x": [1]}}, {"tensors": [{}]}, {"digest_after": {"a": [2]}})]  # fmt: skip
    odd += [{**done, "sites": [[1]]}, {**done, "sites": [{}]}, {**done, "times": {"a": [1]}}]
    odd += [{**done, "at_sites": said} for said in ([1], None, {ONE: 5}, {ONE: "x"})]
    for text in ("", "{", "[]", "{}", "[" * 200_000, '{"exact": 3}', *map(json.dumps, odd)):
        file.write_text(text)
        with pytest.raises(UserError, match=r"r1\.json: is not a certificate of fedloom"):
            findings(config)


def test_what_is_put_back_of_a_forgotten_site_is_found(finished: Config, tmp_path: Path):
    """From a copy of the run's folder, say: its contributions, its network, what workers staged of it."""
    config = copied(finished, tmp_path)
    copy, here = tmp_path / "copy", folder(config)
    shutil.copytree(here, copy)
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE], "asked"))
    gone = [path for path in copy.rglob("*") if path.is_file() and not (here / path.relative_to(copy)).exists()]
    assert len([path for path in gone if path.parent.name == "blobs"]) > 0
    with Ledger.open(copy, server=False) as ledger:
        gave = {event.body["contributions"][ONE]["blob"] for event in ledger.events("round")}
    put_back = [path for path in gone if path.stem in gave or path.name == f"{ONE}.safetensors"]
    half = copy / "staging" / f".{ONE}.safetensors-x"
    put_back += [half]
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"x")
    for path in put_back:
        target = here / path.relative_to(copy)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        wrong = [finding.what for finding in findings(config) if finding.verdict == "mismatch"]
        assert wrong == [f"this machine stores nothing of {ONE}"], path
        target.unlink()
        if target.parent.name == ONE:
            target.parent.rmdir()
    assert {finding.verdict for finding in findings(config)} == {"match"}


def test_the_word_of_a_site_is_for_one_request(tmp_path: Path):
    write_node_key(tmp_path)
    identity = Identity(str(tmp_path / "key"))
    word = dict(identity.sign(*erased_words("run", ONE, 3, 900, request="r1")) or {})
    old = dict(identity.sign(*erased_words("run", ONE, 3, 900, request="")) or {})
    deleted_files = {"files": 3, "bytes": 900}
    assert deleted("run", "r1", ONE, {**deleted_files, **word}).verdict == "match"
    assert deleted("run", "r2", ONE, {**deleted_files, **word}).verdict == "mismatch"
    assert deleted("run", "r1", ONE, {**deleted_files, **old}).verdict == "not checkable"
    assert deleted("run", "r1", ONE, {"signature": "zz", "key": "x", **deleted_files}).verdict == "mismatch"


def test_a_check_says_what_a_certificate_is_about_and_compares_it(certified: tuple[Config, dict[str, Any]], tmp_path: Path):
    config, done = certified
    path, key = folder(config) / CERTIFICATES / f"{done['request']}.json", public_line(operator_key())
    renamed = tmp_path / "2026-99.json"
    for suffix in (".json", ".sig"):
        for there in (tmp_path / path.name, renamed):
            there.with_suffix(suffix).write_bytes(path.with_suffix(suffix).read_bytes())
    table, good = verify_certificate(tmp_path / path.name, None, key)
    text = table.plain()
    assert good and all(word in text for word in (done["request"], done["run"], *done["sites"], *done["times"].values()))
    table, good = verify_certificate(renamed, None, key)
    assert not good and f"request '{done['request']}' | mismatch | the file's name: '2026-99'" in table.plain()
    assert not verify_certificate(renamed, folder(config))[1]
    assert verify_certificate(renamed, None, key, done["request"], done["sites"])[1]
    table, good = verify_certificate(tmp_path / path.name, None, key, sites=["site-0009"])
    assert not good and "asked for: site-0009" in table.plain()
    assert not verify_certificate(tmp_path / path.name, None, key, request="other")[1]


def test_a_certificate_is_signed_and_checked_without_the_run(
    certified: tuple[Config, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, done = certified
    path = folder(config) / CERTIFICATES / f"{done['request']}.json"
    ours, there = public_line(operator_key()), tmp_path / path.name
    assert key_path().stat().st_mode & 0o077 == 0
    for one in (path, path.with_suffix(".sig")):
        (tmp_path / one.name).write_bytes(one.read_bytes())
    assert verify_certificate(there, None, ours)[1]
    (tmp_path / "key.pub").write_text(ours)
    assert verify_certificate(there, None, str(tmp_path / "key.pub"))[1]
    (tmp_path / "key.pem").write_text(public_pem(operator_key()))
    assert verify_certificate(there, None, str(tmp_path / "key.pem"))[1]
    # another one's key, a changed file, no signature
    monkeypatch.setenv("FEDLOOM_KEY", str(tmp_path / "other"))
    assert not verify_certificate(there, None, public_line(operator_key()))[1]
    there.write_text(path.read_text().replace("asked", "never asked", 1))
    assert not verify_certificate(there, None, ours)[1]
    there.write_bytes(path.read_bytes())
    there.with_suffix(".sig").write_text("{")
    assert not verify_certificate(there, None, ours)[1]
    there.with_suffix(".sig").unlink()
    assert not verify_certificate(there, None, ours)[1]
    for odd, message in [
        ("", "verify: needs the run.s folder"),
        ("nowhere", "the file 'nowhere' does not exist"),
        ("a b", "ssh-ed25519"),
    ]:
        with pytest.raises(UserError, match=message):
            verify_certificate(there, None, odd)
    (tmp_path / "other").write_text("nonsense")
    with pytest.raises(UserError, match="is not a private key"):
        operator_key()


def test_a_network_that_relearns_badly_is_certified_all_the_same(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = copied(finished, tmp_path)
    monkeypatch.setattr("fedloom.server.unlearning.evidence.REGAIN", 10.0)  # more than there is: it is trained
    with method_of(config) as method:
        unlearning = method.unlearning()
        unlearning.config = dataclasses.replace(config, training=dataclasses.replace(config.training, rate=1e38))
        done = fulfil(unlearning, asked(unlearning, "r1", [ONE]))
    assert "no longer finite" in done["evidence"]["relearning"][ONE]["not_measured"]


def test_what_was_averaged_beside_the_sum_is_named(tmp_path: Path):
    """N* was trained with the site, and stays."""
    config = run(configured(tmp_path, "objective.mode=regularised", "rounds=1"))
    with method_of(config) as method:
        done = fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE]))
    assert "N* and all tensors that are not summed" in done["not_exact"]


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
        method.state.readmit([ONE])
    wrong = {finding.what: finding.reason for finding in findings(config) if finding.verdict == "mismatch"}
    assert {f"{ONE} does not participate", f"this machine stores nothing of {ONE}"} <= wrong.keys()
    assert wrong[f"{ONE} does not participate"] == "it was readmitted since, as the ledger says"


def test_certifying_does_not_erase_a_site_that_was_readmitted_meanwhile(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path)
    with method_of(config) as method:
        unlearning = method.unlearning()
        request = unlearning.apply(asked(unlearning, "r1", [ONE]))
        method.state.readmit([ONE])
        store = folder(config) / "sites" / "run" / ONE
        store.mkdir(parents=True, exist_ok=True)
        unlearning.certify(request)
        assert store.is_dir()
