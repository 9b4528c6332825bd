"""The page of a proof in a real browser: it finds what verify.py finds."""

import hashlib
import json
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedloom.server.unlearning.signing import operator_key, spki
from tests.server.proofs import BROKEN, FALSE, any_row, events_of, resealed, same_findings, verified
from tests.server.unlearnings import ONE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def page(chromium: "Browser") -> "Page":
    return chromium.new_context(offline=True).new_page()


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


def test_a_zip_that_unpacks_to_too_much_is_refused(page: Any, proof: Path, tmp_path: Path):
    false = Path(shutil.copy(tmp_path / "proof.zip", tmp_path / "large.zip"))
    with zipfile.ZipFile(false, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"{number}.bin", bytes(2**26))
    assert "unpacks to more than 512 MB" in seen(page, proof, false)[0]


def test_stored_entries_that_share_their_bytes_are_refused_when_they_are_too_much(page: Any, proof: Path, tmp_path: Path):
    content, local = bytes(50_000_000), b"PK\3\4" + struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sizes = struct.pack("<III", 0, len(content), len(content))
    entries = [b"PK\1\2" + struct.pack("<HHHHHH", 20, 20, 0, 0, 0, 0) + sizes
               + struct.pack("<HHHHHII", 1, 0, 0, 0, 0, 0, 0) + bytes([97 + number]) for number in range(12)]  # fmt: skip
    index, begin = b"".join(entries), len(local) + len(content)
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(index), begin, 0)
    (tmp_path / "shared.zip").write_bytes(local + content + index + end)
    assert "unpacks to more than 512 MB" in seen(page, proof, tmp_path / "shared.zip")[0]


def test_a_file_that_looks_like_a_list_is_mentioned(page: Any, proof: Path):
    (proof / "SHA256SUMS.evil").write_text("x")
    assert seen(page, proof, *proof.iterdir()) == ("All checks passed.", [])
    assert "SHA256SUMS.evil is not part of the proof" in page.inner_text("#checks")


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


def test_the_page_mentions_a_readmission_as_the_program_does(page: Any, proof: Path):
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    forgotten = next(event for event in events if event["kind"] == "forgotten")
    body = {"sites": [ONE], "contributions": {ONE: any_row(events)}, "digest": {}}
    events.append({**events[-1], "kind": "readmitted", "body": body})
    resealed(proof, content, events)
    assert seen(page, proof, *proof.iterdir())[0] == verified(proof).stdout.splitlines()[-1]
    events.append({**forgotten, "body": {**forgotten["body"], "request": "r2"}})
    resealed(proof, content, events)
    verdict = f"All checks passed. But {ONE} was readmitted later (event {len(events) - 1}), and then forgotten again."
    assert seen(page, proof, *proof.iterdir()) == (verdict, [])
    assert verified(proof).stdout.splitlines()[-1] == verdict


def test_a_round_of_very_many_sites_is_read(page: Any, proof: Path):
    """A regular expression that recurses over each letter would need too large a stack."""
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    row = any_row(events)
    rows = {f'site "{number:06d}"\\': row for number in range(150_000)}
    events.append({**events[-1], "kind": "round", "body": {"round": 99, "contributions": rows, "record": {}, "digest": {}}})
    resealed(proof, content, events)
    verdict, found = seen(page, proof, *proof.iterdir())
    assert verdict == "All checks passed." and not found


def test_the_page_compares_the_published_key(page: Any, proof: Path):
    seen(page, proof, proof.parent / "proof.zip")
    page.fill("#key", "0" * 64)
    page.locator("#key").blur()
    page.wait_for_selector("#verdict:has-text('FAILED')")
    page.fill("#key", hashlib.sha256(spki(operator_key().public_key())).hexdigest())
    page.locator("#key").blur()
    page.wait_for_selector("#verdict:has-text('passed')")
