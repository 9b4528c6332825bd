"""The proof of a request: verify.py, verify.html and openssl accept it, and reject each change of it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.conf import Config, UserError
from fedloom.server.ledger.tables import START, canonical, link
from fedloom.server.unlearning.goals import PARTS
from fedloom.server.unlearning.signing import key_path, operator_key, public_line
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


def linked(proof: Path, events: list[Event]) -> None:
    """Write these events with digests that fit, as whoever has the ledger could."""
    previous, lines = START, []
    for number, event in enumerate(events, 1):
        text = canonical(event["body"])
        previous = link(previous, number, event["time"], event["kind"], text)
        lines.append(json.dumps({**event, "id": number, "body": text, "digest": previous}))
    (proof / "chain.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_proof_is_accepted_and_equal_proofs_have_equal_bytes(forgotten: Config, proof: Path, tmp_path: Path):
    said = verified(proof)
    assert (said.returncode, failed(said.stdout), said.stderr) == (0, [], ""), said.stdout
    assert "All checks passed." in said.stdout and "the operator signed the whole chain" in said.stdout
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


def reason(proof: Path) -> None:
    path = proof / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b"consent", b"request"))


def resigned(proof: Path) -> None:
    """Another certificate by another key, which also signs the chain."""
    key, content = Ed25519PrivateKey.generate(), json.loads((proof / "certificate.json").read_bytes())
    content["exact"]["remaining"].pop(TWO)
    (proof / "certificate.json").write_bytes(rfc8785.dumps(content))
    (proof / "certificate.sig").write_bytes(key.sign((proof / "certificate.json").read_bytes()))
    (proof / "chain.sig").write_bytes(key.sign((proof / "chain.jsonl").read_bytes()))
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    (proof / "operator.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def edited(proof: Path) -> None:
    """An event with another number of samples, and no other digest."""
    path = proof / "chain.jsonl"
    path.write_text(path.read_text().replace('\\"samples\\":', '\\"samples\\": ', 1))


def used_again(proof: Path) -> None:
    """A later round that uses the forgotten site, in a chain that fits; nobody has signed it."""
    events = events_of(proof)
    last = next(event for event in reversed(events) if event["kind"] == "round")
    last["body"]["contributions"][ONE] = next(iter(last["body"]["contributions"].values()))
    linked(proof, events)
    (proof / "chain.sig").unlink()


def cut(proof: Path) -> None:
    linked(proof, events_of(proof)[:-1])


def another_left(proof: Path) -> None:
    """The request removed another site's contribution too, in a chain that fits up to the certificate's event."""
    events = events_of(proof)
    place = next(number for number, event in enumerate(events) if event["kind"] == "forgotten")
    for event in events[:place]:
        event["body"].get("contributions", {}).pop(TWO, None)
    linked(proof, events)
    (proof / "chain.sig").unlink()


def swapped(proof: Path) -> None:
    (proof / "certificate.sig").write_bytes((proof / "chain.sig").read_bytes())


CHANGES: dict[Change, list[str]] = {
    reason: ["the operator signed the certificate", "the chain has the sha256 of this certificate"],
    resigned: ["the chain has the sha256 of this certificate", "the remaining contributions are the certificate's"],
    edited: ["the operator signed the whole chain", "the chain of events is unbroken"],
    used_again: ["no later round of the chain has a contribution of site-0001"],
    cut: ["the operator signed the whole chain"],
    another_left: ["the certificate names an event of the chain"],
    swapped: ["the operator signed the certificate"],
}


@pytest.mark.parametrize(("change", "found"), CHANGES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_changed_proof_is_rejected_for_the_right_reason(proof: Path, change: Change, found: list[str]):
    change(proof)
    said = verified(proof)
    assert said.returncode == 1 and "FAILED" in said.stdout, said.stdout
    assert len(failed(said.stdout)) == len(found), said.stdout
    assert all(line.startswith(words) for line, words in zip(failed(said.stdout), found, strict=True)), said.stdout


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


def test_after_a_change_of_the_operators_key_the_chain_is_not_signed(
    forgotten: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert key_path().exists()
    monkeypatch.setenv("FEDLOOM_KEY", str(tmp_path / "new.key"))
    with zipfile.ZipFile(write_proof(folder(forgotten), "r1", tmp_path / "p.zip")) as archive:
        archive.extractall(tmp_path / "p")
    said = verified(tmp_path / "p")
    assert said.returncode == 0 and "later events may be missing" in said.stdout


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


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_page_finds_what_the_program_finds(page: Any, proof: Path, change: Change):
    change(proof)
    verdict, found = seen(page, proof, *proof.iterdir())
    assert "FAILED" in verdict and len(found) == len(CHANGES[change]), found
    ours = [line.split(":")[0].lower() for line in failed(verified(proof).stdout)]
    theirs = [line.removesuffix(".").lower() for line in found]
    assert all(one[:25] == other[:25] for one, other in zip(ours, theirs, strict=True) if "chain of" not in one), (
        ours,
        theirs,
    )
