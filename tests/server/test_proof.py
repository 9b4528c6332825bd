"""The proof of a request: verify.py, verify.html and openssl accept it, and reject each change of it."""

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.conf import Config, UserError
from fedloom.server.ledger.tables import START, canonical, link
from fedloom.server.unlearning.goals import PARTS
from fedloom.server.unlearning.signing import operator_key, public_line, public_pem, spki
from fedloom.sims.report.proofs import write_proof
from tests.server.parts import WatchedApp, folder
from tests.server.runs import method_of
from tests.server.unlearnings import ONE, TWO, asked, configured, fulfil, further, run

Event = dict[str, Any]
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that has forgotten a site, and went on for a round."""
    config = run(configured(tmp_path_factory.mktemp("run")))
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE], "consent withdrawn"))
        further(method, config, method.unlearning().last_round() + 1, WatchedApp())
    return config


@pytest.fixture
def proof(forgotten: Config, tmp_path: Path) -> Path:
    """The files of the proof."""
    with zipfile.ZipFile(write_proof(folder(forgotten), "r1", tmp_path / "proof.zip")) as archive:
        archive.extractall(tmp_path / "proof")
    return tmp_path / "proof"


def verified(proof: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run verify.py as its reader does, without this package."""
    return subprocess.run([sys.executable, "-I", "verify.py", *map(str, options)], cwd=proof, capture_output=True, text=True)


def failed(said: str) -> list[str]:
    return [line.removeprefix("FAIL").strip() for line in said.splitlines() if line.startswith("FAIL")]


def events_of(proof: Path) -> list[Event]:
    lines = (proof / "chain.jsonl").read_text().splitlines()
    return [{**event, "body": json.loads(event["body"])} for event in map(json.loads, lines)]


def linked(events: list[Event]) -> list[Event]:
    """Return these events with ids and digests that fit."""
    previous, chain = START, []
    for number, event in enumerate(events, 1):
        previous = link(previous, number, event["time"], event["kind"], canonical(event["body"]))
        chain.append({**event, "id": number, "digest": previous})
    return chain


def resealed(proof: Path, content: dict[str, Any], events: list[Event]) -> None:
    """Make a false proof as the operator could: every digest fits, and the true key signs all."""
    place = next(number for number, event in enumerate(events) if event["kind"] == "forgotten")
    content["ledger"] = {"event": place + 1, "digest": linked(events)[place]["digest"]}
    certificate = rfc8785.dumps(content)
    for event in events:
        if event["kind"] == "certified":
            event["body"]["sha256"] = hashlib.sha256(certificate).hexdigest()
    lines = [json.dumps({**event, "body": canonical(event["body"])}) for event in linked(events)]
    (proof / "certificate.json").write_bytes(certificate)
    (proof / "chain.jsonl").write_text("".join(f"{line}\n" for line in lines))
    signed(proof, operator_key())


def signed(proof: Path, key: Ed25519PrivateKey) -> None:
    (proof / "operator.pem").write_text(public_pem(key))
    (proof / "certificate.sig").write_bytes(key.sign((proof / "certificate.json").read_bytes()))
    names = [line.partition("  ")[2] for line in (proof / "SHA256SUMS").read_text().splitlines()]
    sums = "".join(f"{hashlib.sha256((proof / name).read_bytes()).hexdigest()}  {name}\n" for name in names).encode()
    (proof / "SHA256SUMS").write_bytes(sums)
    (proof / "SHA256SUMS.sig").write_bytes(key.sign(sums))


def test_a_proof_is_accepted_and_equal_proofs_have_equal_bytes(forgotten: Config, proof: Path, tmp_path: Path):
    said = verified(proof)
    assert (said.returncode, failed(said.stdout), said.stderr) == (0, [], ""), said.stdout
    assert "All checks passed.\n" in said.stdout and "the operator signed the list of all files" in said.stdout
    again = write_proof(folder(forgotten), "r1", tmp_path / "again.zip")
    assert again.read_bytes() == (tmp_path / "proof.zip").read_bytes()
    content = json.loads((proof / "certificate.json").read_bytes())
    assert rfc8785.dumps(content) == (proof / "certificate.json").read_bytes()
    assert list(content["goals"]) == sorted(content["goals"]) and len(content["goals"]) == 5
    assert all(set(goal) == set(PARTS) and all(goal.values()) for goal in content["goals"].values())


def test_the_published_key_and_the_files_of_contributions_are_checked(forgotten: Config, proof: Path, tmp_path: Path):
    mine, another = tmp_path / "mine.pub", tmp_path / "another.pub"
    mine.write_text(public_line(operator_key()))
    another.write_text(public_line(Ed25519PrivateKey.generate()))
    assert verified(proof, "--key", mine).returncode == 0
    assert failed(verified(proof, "--key", another).stdout) == ["the key in the proof is the operator's published key"]


def test_the_sum_is_computed_again_without_our_software(forgotten: Config, tmp_path: Path):
    config = run(configured(tmp_path))
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE]))
    with zipfile.ZipFile(write_proof(folder(config), "r1", tmp_path / "p.zip")) as archive:
        archive.extractall(tmp_path / "p")
    blobs = shutil.copytree(folder(config) / "blobs", tmp_path / "blobs")
    said = verified(tmp_path / "p", "--contributions", blobs)
    assert said.returncode == 0 and "their exact sum is the certificate's" in said.stdout, said.stdout
    content = json.loads((tmp_path / "p/certificate.json").read_bytes())
    one, other = [blobs / f"{blob}.safetensors" for blob in list(content["exact"]["remaining"].values())[:2]]
    one.write_bytes(other.read_bytes())
    said = verified(tmp_path / "p", "--contributions", blobs)
    assert said.returncode == 1 and "files of contributions are those of the certificate" in failed(said.stdout)[0]


def test_openssl_checks_the_signature_with_the_command_in_the_readme(proof: Path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    command = next(line for line in (proof / "README.txt").read_text().splitlines() if line.startswith("openssl"))
    assert subprocess.run(command.split(), cwd=proof, capture_output=True).returncode == 0
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", "operator.pem", "-outform", "DER"], cwd=proof, capture_output=True
    ).stdout
    assert hashlib.sha256(der).hexdigest() in (proof / "README.txt").read_text()
    (proof / "certificate.json").write_bytes((proof / "certificate.json").read_bytes().replace(b"consent", b"request"))
    assert subprocess.run(command.split(), cwd=proof, capture_output=True).returncode != 0


Facts = tuple[dict[str, Any], list[Event]]


def last_round(events: list[Event]) -> Event:
    return next(event for event in reversed(events) if event["kind"] == "round")


def any_row(events: list[Event]) -> dict[str, Any]:
    return next(iter(last_round(events)["body"]["contributions"].values()))


def used_again(content: dict[str, Any], events: list[Event]) -> None:
    last_round(events)["body"]["contributions"][ONE] = any_row(events)


def used_in_an_event_of_an_unknown_kind(content: dict[str, Any], events: list[Event]) -> None:
    events.append({**events[-1], "kind": "merged", "body": {"contributions": {ONE: any_row(events)}}})


def used_with_the_readmission_of_another(content: dict[str, Any], events: list[Event]) -> None:
    body = {"sites": [TWO], "contributions": {ONE: any_row(events)}, "digest": {}}
    events.append({**events[-1], "kind": "readmitted", "body": body})


def another_sum(content: dict[str, Any], events: list[Event]) -> None:
    content["exact"]["sum_of_remaining"] = "0" * 64


def no_sites(content: dict[str, Any], events: list[Event]) -> None:
    content["sites"] = []
    for event in events:
        if event["kind"] in ("forgotten", "received"):
            event["body"]["sites"] = []


def another_reason(content: dict[str, Any], events: list[Event]) -> None:
    content["reason"] = "none"


def another_run(content: dict[str, Any], events: list[Event]) -> None:
    content["run"] = "another"


def no_times(content: dict[str, Any], events: list[Event]) -> None:
    content["times"] = {}


def another_start(content: dict[str, Any], events: list[Event]) -> None:
    content["exact"]["digest_before"] = {"sum": "0" * 64}


def better_before(content: dict[str, Any], events: list[Event]) -> None:
    content["evidence"]["before"]["membership"] = {}


def nothing_deleted(content: dict[str, Any], events: list[Event]) -> None:
    content["erased"] = []


def one_less(content: dict[str, Any], events: list[Event]) -> None:
    content["exact"]["remaining"].pop(TWO)


def another_left(content: dict[str, Any], events: list[Event]) -> None:
    """The event removes another site, too; the certificate does not say so."""
    next(event for event in events if event["kind"] == "forgotten")["body"]["sites"].append(TWO)


NOT_USED, REMAINING = "no later event of the chain has a contribution of site-0001", "the remaining contributions are"
FALSE: dict[Callable[[dict[str, Any], list[Event]], None], set[str]] = {
    used_again: {NOT_USED},
    used_in_an_event_of_an_unknown_kind: {NOT_USED},
    used_with_the_readmission_of_another: {NOT_USED},
    another_sum: {"the digest of the remaining sum is in the chain"},
    no_sites: {"that event forgot the certificate's sites", REMAINING},
    another_reason: {"the request's sites, reason and options"},
    another_run: {"the chain is of the certificate's run"},
    no_times: {"the request was received at", "the request was applied at"},
    another_start: {"the digests before it are the certificate's"},
    better_before: {"what was measured before it"},
    nothing_deleted: {"what was deleted is the certificate's"},
    one_less: {REMAINING},
    another_left: {"that event forgot the certificate's sites", REMAINING, "the request left all other sites'"},
}


def damaged(name: str, old: bytes, new: bytes) -> Change:
    def change(proof: Path) -> None:
        content = (proof / name).read_bytes()
        assert old in content
        (proof / name).write_bytes(content.replace(old, new, 1))

    return change


def by_another_key(proof: Path) -> None:
    signed(proof, Ed25519PrivateKey.generate())


def cut(proof: Path) -> None:
    lines = (proof / "chain.jsonl").read_text().splitlines(keepends=True)
    (proof / "chain.jsonl").write_text("".join(lines[:-1]))


def without_the_list(proof: Path) -> None:
    cut(proof)
    sums = (proof / "SHA256SUMS").read_text().splitlines(keepends=True)
    (proof / "SHA256SUMS").write_text("".join(line for line in sums if "chain" not in line))


BROKEN: dict[str, tuple[Change, set[str]]] = {
    "certificate": (damaged("certificate.json", b"consent", b"request"),
                    {"the operator signed the certificate", "certificate.json is as", "the chain has the sha256",
                     "the request's sites, reason and options"}),
    "page": (damaged("certificate.html", b"site-0001", b"site-0002"), {"certificate.html is as"}),
    "readme": (damaged("README.txt", b"sha256 is ", b"sha256 is 0"), {"readme.txt is as"}),
    "chain": (damaged("chain.jsonl", b"samples", b"sample5"), {"chain.jsonl is as", "the chain of"}),
    "cut": (cut, {"chain.jsonl is as"}),
    "list": (without_the_list, {"the operator signed the list", "chain.jsonl is in the list"}),
}  # fmt: skip


def same_findings(found: list[str], expected: set[str]) -> bool:
    """Whether each of the findings begins with an expected one, and all of these were found."""
    begins = [{words for words in expected if line.lower().startswith(words)} for line in found]
    return all(begins) and set().union(*begins) == expected


@pytest.mark.parametrize("change", FALSE, ids=lambda change: change.__name__)
def test_a_false_proof_of_the_operator_is_rejected_for_its_reason(proof: Path, change: Callable[..., None]):
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    change(content, events)
    resealed(proof, content, events)
    said = verified(proof)
    assert said.returncode == 1 and same_findings(failed(said.stdout), FALSE[change]), said.stdout + said.stderr


@pytest.mark.parametrize(("change", "found"), BROKEN.values(), ids=BROKEN)
def test_a_changed_file_is_found(proof: Path, change: Change, found: set[str]):
    change(proof)
    said = verified(proof)
    assert said.returncode == 1 and same_findings(failed(said.stdout), found), said.stdout


def test_a_proof_by_another_key_is_found_by_the_published_key_alone(proof: Path, tmp_path: Path):
    (tmp_path / "published.pem").write_text(public_pem(operator_key()))
    by_another_key(proof)
    assert verified(proof).returncode == 0
    said = verified(proof, "--key", tmp_path / "published.pem")
    assert same_findings(failed(said.stdout), {"the key in the proof is the operator's published key"})


def test_the_program_imports_no_file_of_the_proof_and_writes_no_control_characters(proof: Path):
    (proof / "json.py").write_text("print('All checks passed.'); raise SystemExit(0)")
    content = json.loads((proof / "certificate.json").read_bytes())
    (proof / "certificate.json").write_bytes(rfc8785.dumps({**content, "run": "\x1b[2J\x1b[8m"}))
    said = subprocess.run([sys.executable, "verify.py"], cwd=proof, capture_output=True, text=True)
    assert said.returncode == 1 and "FAILED" in said.stdout and "\x1b" not in said.stdout
    assert "json.py is not part of the proof" in said.stdout


def test_repeated_keys_and_numbers_that_json_does_not_have_are_refused(proof: Path):
    for old, new in ((b'{"at_sites"', b'{"run":"x","at_sites"'), (b'"format":1', b'"format":NaN')):
        content = (proof / "certificate.json").read_bytes()
        assert old in content
        (proof / "certificate.json").write_bytes(content.replace(old, new))
        said = verified(proof)
        assert said.returncode == 2 and len(said.stderr.splitlines()) == 1
        (proof / "certificate.json").write_bytes(content)


def test_a_readmission_stands_in_the_verdict(proof: Path):
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    body = {"sites": [ONE], "contributions": {ONE: any_row(events)}, "digest": {}}
    events.append({**events[-1], "kind": "readmitted", "body": body})
    resealed(proof, content, events)
    assert f"All checks passed. But {ONE} participates again" in verified(proof).stdout


@pytest.mark.parametrize("name", ["certificate.json", "chain.jsonl", "operator.pem", "certificate.sig"])
def test_a_file_that_is_missing_or_damaged_is_named_in_one_line(proof: Path, name: str):
    (proof / name).write_bytes(b"{" * 30)
    said = verified(proof)
    assert said.returncode in (1, 2) and "Traceback" not in said.stderr and len(said.stderr.splitlines()) <= 1
    (proof / name).unlink()
    said = verified(proof)
    assert said.returncode == 2 and name in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_site_finds_its_own_contributions_in_the_proof(proof: Path):
    said = verified(proof, "--site", ONE).stdout
    assert f"the request removed the last contribution of {ONE}" in said and not failed(said)
    assert f"the last contribution of {TWO} is still in the sum" in verified(proof, "--site", TWO).stdout
    assert failed(verified(proof, "--site", "unknown").stdout) == ["the last contribution of unknown is still in the sum"]


def test_no_proof_without_a_signed_certificate_of_a_request_of_this_run(forgotten: Config, tmp_path: Path):
    for request, words in (("r2", "does not exist"), ("../r1", "is not the id of a request")):
        with pytest.raises(UserError, match=words):
            write_proof(folder(forgotten), request, tmp_path / "p.zip")
    unsigned = shutil.copytree(folder(forgotten), tmp_path / "copy")
    (unsigned / "certificates/r1.sig").unlink()
    with pytest.raises(UserError, match="is not signed"):
        write_proof(unsigned, "r1", tmp_path / "p.zip")


def test_no_proof_of_a_changed_certificate_or_ledger_or_by_another_key(
    forgotten: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, words in (("certificate", "differs from what the server wrote"), ("ledger", "the chain is broken at event 2")):
        copy = shutil.copytree(folder(forgotten), tmp_path / name)
        if name == "certificate":
            path = copy / "certificates/r1.json"
            path.write_bytes(path.read_bytes().replace(b"consent", b"request"))
        else:
            with closing(sqlite3.connect(copy / "ledger.sqlite")) as db, db:
                db.execute("DROP TRIGGER events_stay")
                db.execute("UPDATE events SET time = 'x' WHERE id = 2")
        with pytest.raises(UserError, match=words):
            write_proof(copy, "r1", tmp_path / "p.zip")
    monkeypatch.setenv("FEDLOOM_KEY", str(tmp_path / "new.key"))
    with pytest.raises(UserError, match="another key has signed it"):
        write_proof(folder(forgotten), "r1", tmp_path / "p.zip")


# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with playwright.sync_playwright() as found:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # which Chromium refuses for root
        browser = found.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser.new_context(offline=True).new_page()
        browser.close()


def seen(page: Any, proof: Path, *files: Path) -> tuple[str, list[str]]:
    """The verdict and the failed checks of the page for these files."""
    page.goto(f"file://{proof}/verify.html")
    page.set_input_files("#files", [str(file) for file in files])
    page.wait_for_selector('#verdict:not(:has-text("Checking")):not(:has-text("No proof"))')
    return page.inner_text("#verdict"), [
        item.text_content().removeprefix("FAILED") for item in page.locator(".failed").all()
    ]


def test_the_page_accepts_the_zip_and_its_files(page: Any, proof: Path):
    assert seen(page, proof, proof.parent / "proof.zip") == ("All checks passed.", [])
    assert seen(page, proof, *proof.iterdir()) == ("All checks passed.", [])
    assert "certificate.json is missing" in seen(page, proof, proof / "chain.jsonl")[0]


def test_a_zip_with_folders_or_repeated_files_is_refused(page: Any, proof: Path, tmp_path: Path):
    for number, name in enumerate(("sub/certificate.json", "certificate.json")):
        false = shutil.copy(tmp_path / "proof.zip", tmp_path / f"false-{number}.zip")
        with zipfile.ZipFile(false, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr(name, "{}")
        assert "a folder, or a file twice" in seen(page, proof, Path(false))[0]
    assert "one zip file alone" in seen(page, proof, tmp_path / "proof.zip", tmp_path / "false-0.zip")[0]


@pytest.mark.parametrize("name", [*[change.__name__ for change in FALSE], *BROKEN])
def test_the_page_finds_what_the_program_finds(page: Any, proof: Path, name: str):
    false = {change.__name__: change for change in FALSE}
    if name in false:
        content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
        false[name](content, events)
        resealed(proof, content, events)
        expected = FALSE[false[name]]
    else:
        BROKEN[name][0](proof)
        expected = BROKEN[name][1]
    verdict, found = seen(page, proof, *proof.iterdir())
    assert "FAILED" in verdict and same_findings(found, expected), found


def test_the_page_compares_the_published_key(page: Any, proof: Path):
    seen(page, proof, proof.parent / "proof.zip")
    page.fill("#key", "0" * 64)
    page.locator("#key").blur()
    page.wait_for_selector("#verdict:has-text('FAILED')")
    page.fill("#key", hashlib.sha256(spki(operator_key().public_key())).hexdigest())
    page.locator("#key").blur()
    page.wait_for_selector("#verdict:has-text('passed')")
