"""The proof of a request: verify.py and openssl accept it, and reject each change of it."""

import hashlib
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.clients.protocol.signatures import Identity
from fedloom.conf import Config, UserError
from fedloom.server.unlearning.goals import PARTS
from fedloom.server.unlearning.signing import (
    fingerprint,
    former_keys,
    is_whole,
    key_path,
    operator_key,
    public_line,
    public_pem,
    rotate,
    signed_by,
)
from fedloom.sims.federation.keys import NODE_KEY
from fedloom.sims.report.proofs import write_proof
from tests.node_keys import write_node_key
from tests.server.parts import folder
from tests.server.proofs import (
    BROKEN,
    FALSE,
    Change,
    any_row,
    events_of,
    failed,
    forgotten_run,
    proof_of,
    resealed,
    same_findings,
    signed,
    verified,
)
from tests.server.unlearnings import ONE, TWO


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


def test_the_published_key_may_be_its_sha256_and_an_unusable_key_is_named_with_its_option(proof: Path, tmp_path: Path):
    digest = fingerprint(operator_key().public_key())
    assert verified(proof, "--key", digest).returncode == verified(proof, "--key", digest.upper()).returncode == 0
    other = verified(proof, "--key", digest[:-1] + ("0" if digest[-1] != "0" else "1"))
    assert failed(other.stdout) == ["the key in the proof is the operator's published key"] and other.returncode == 1
    (odd := tmp_path / "odd.pub").write_text("ssh-foo AAAA x")
    for words in (["--key", tmp_path / "none.pub"], ["--key", odd], ["--site", "site-0000", "--site-key", odd]):
        said = verified(proof, *words)
        assert said.returncode == 2 and said.stderr.startswith(f"{words[-2]} {words[-1]}: takes a file with a public key")
        assert said.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["objective=fedavg", "strategy=fedavg"], ["objective=fedavg", "strategy={name: "
                                   "fedavg, weighting: equal}"]], ids=["sum", "weighted", "equal"])  # fmt: skip
def test_the_sum_is_computed_again_without_our_software(tmp_path: Path, words: list[str]):
    config = forgotten_run(tmp_path, *words, rounds=0)
    proof, blobs = proof_of(config, tmp_path), shutil.copytree(folder(config) / "blobs", tmp_path / "blobs")
    said = verified(proof, "--contributions", blobs)
    assert said.returncode == 0 and "their exact sum agrees with the certificate" in said.stdout, said.stdout + said.stderr
    content = json.loads((proof / "certificate.json").read_bytes())
    one, other = [blobs / f"{blob}.safetensors" for blob in list(content["exact"]["remaining"].values())[:2]]
    one.write_bytes(other.read_bytes())
    said = verified(proof, "--contributions", blobs)
    assert said.returncode == 1 and "files of contributions are those of the certificate" in failed(said.stdout)[0]


ODD_NUMBERS = [("F32", "f", float("inf")), ("F64", "d", 1.7e308), ("F32", "f", float("nan"))]


@pytest.mark.parametrize(("dtype", "form", "number"), ODD_NUMBERS)
def test_a_contribution_with_an_odd_number_is_one_line(proof: Path, tmp_path: Path, dtype: str, form: str, number: float):
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    name, data = content["exact"]["tensors"][0], struct.pack(f"<{form}", number)
    header = json.dumps({name: {"dtype": dtype, "shape": [1], "data_offsets": [0, len(data)]}}).encode()
    odd = struct.pack("<Q", len(header)) + header + data
    blob = hashlib.sha256(odd).hexdigest()
    (tmp_path / f"{blob}.safetensors").write_bytes(odd)
    for old in content["exact"]["remaining"].values():
        content, events = (json.loads(json.dumps(each).replace(old, blob)) for each in (content, events))
    resealed(proof, content, events)
    said = verified(proof, "--contributions", tmp_path)
    assert said.returncode == 2 and said.stderr.startswith("the proof cannot be read") and said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "key", [b"\xef\xbb\xbfssh-ed25519 AAAA", b"ssh-foo AAAAB3NzaC1yc2E= x", b"\xef\xbb\xbf-----BEGIN X-----"]
)
def test_a_key_of_another_kind_is_one_line(proof: Path, key: bytes):
    (proof / "operator.pem").write_bytes(key)
    said = verified(proof)
    assert said.returncode == 2 and said.stderr.startswith("the proof cannot be read") and said.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["[" * 200_000, '{"key": "ssh-foo AAAAB3NzaC1yc2E=", "signature": ""}'])
def test_no_proof_with_a_signature_that_cannot_be_read(forgotten: Config, tmp_path: Path, content: str):
    run = Path(shutil.copytree(folder(forgotten), tmp_path / "copy"))
    (run / "certificates/r1.sig").write_text(content)
    assert not is_whole(run / "certificates/r1.json")
    with pytest.raises(UserError, match="is not a signature"):
        write_proof(run, "r1", tmp_path / "p.zip")


def test_a_file_of_endless_brackets_is_one_line(proof: Path):
    (proof / "chain.jsonl").write_text("[" * 200_000 + "\n")
    said = verified(proof)
    assert (
        said.returncode
        and said.stderr.startswith("the proof cannot be read: RecursionError")
        and said.stderr.count("\n") == 1
    )


def test_a_site_checks_by_its_own_key_what_counts_as_sent_by_it(proof: Path, tmp_path: Path):
    for name in ("mine", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.pub").write_text(write_node_key(tmp_path / name))
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    for event in events:
        if event["kind"] == "round" and ONE in event["body"]["contributions"]:
            words = "sent", content["run"], ONE, event["body"]["round"], "5" * 64
            record = Identity(str(tmp_path / "mine" / NODE_KEY)).sign(*words)
            assert record is not None
            event["body"]["record"]["signed"] = {ONE: {"sha256": words[-1], **record}}
    resealed(proof, content, events)
    said = {name: verified(proof, "--site", ONE, "--site-key", tmp_path / f"{name}.pub") for name in ("mine", "another")}
    assert said["mine"].returncode == 0 and f"what counts as sent by {ONE} has its signature" in said["mine"].stdout
    assert [line.split(":")[0] for line in failed(said["another"].stdout)] == [
        f"what counts as sent by {ONE} has its signature"
    ]


def test_a_signature_counts_for_one_round_and_none_for_no_round(tmp_path: Path):
    proof = proof_of(forgotten_run(tmp_path, "rounds=3"), tmp_path)
    key = tmp_path / "key.pub"
    key.write_text(write_node_key(tmp_path))
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    bodies = [event["body"] for event in events if event["kind"] == "round" and ONE in event["body"]["contributions"]]
    mine = [body for body in bodies if body["round"]]
    rounds = [body["round"] for body in mine]
    assert len(rounds) == 3

    def said(*numbers: int | None) -> subprocess.CompletedProcess[str]:
        """Verify a chain in which the site has signed these of its rounds."""
        for body, number in zip(mine, numbers, strict=True):
            body["record"].pop("signed", None)
            if number is not None:
                word = Identity(str(tmp_path / NODE_KEY)).sign("sent", content["run"], ONE, number, "5" * 64)
                assert word is not None
                body["record"]["signed"] = {ONE: {"sha256": "5" * 64, **word}}
        resealed(proof, content, events)
        return verified(proof, "--site", ONE, "--site-key", key)

    assert "All checks passed.\n" in said(1, 2, 3).stdout
    missing = f"But the chain has no signature of {ONE} in rounds {rounds[0]}."
    assert f"All checks passed. {missing}\n" in said(None, 1, 2).stdout
    (none,) = failed(said(None, None, None).stdout)
    assert none.startswith(f"the chain has a signature of {ONE}: none")
    for numbers in ((1, 1, 1), (2, 1, 3), (1, 2, 4), (1, 3, 2)):
        (line,) = failed(said(*numbers).stdout)
        assert line.startswith(f"what counts as sent by {ONE} has its signature: not in rounds"), numbers


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
    signed(proof, Ed25519PrivateKey.generate())
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
    forgotten = next(event for event in events if event["kind"] == "forgotten")
    events.append({**forgotten, "body": {**forgotten["body"], "request": "r2"}})
    resealed(proof, content, events)
    said = verified(proof).stdout
    assert (
        f"All checks passed. But {ONE} was readmitted later (event {len(events) - 1}), and then forgotten again.\n" in said
    )
    assert f"ok    no later event of the chain has a contribution of {ONE}, except while it was readmitted" in said


@pytest.mark.parametrize("name", ["certificate.json", "chain.jsonl", "operator.pem", "certificate.sig"])
def test_a_file_that_is_missing_or_damaged_is_named_in_one_line(proof: Path, name: str):
    (proof / name).write_bytes(b"{" * 30)
    said = verified(proof)
    assert said.returncode in (1, 2) and "Traceback" not in said.stderr and len(said.stderr.splitlines()) <= 1
    (proof / name).unlink()
    said = verified(proof)
    assert said.returncode == 2 and name in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_contribution_in_the_proof_names_no_other_file(proof: Path, tmp_path: Path):
    content, events = json.loads((proof / "certificate.json").read_bytes()), events_of(proof)
    content["exact"]["remaining"] = dict.fromkeys(content["exact"]["remaining"], "../secret")
    resealed(proof, content, events)
    (tmp_path / "secret.safetensors").write_text("mine")
    said = verified(proof, "--contributions", tmp_path / "proof")
    assert said.returncode == 2 and "../secret is not a sha256" in said.stderr


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


def test_a_key_is_replaced_and_what_the_old_key_signed_stays_verifiable(
    forgotten: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDLOOM_KEY", str(shutil.copy(key_path(), tmp_path / "mine.key")))
    old = public_line(operator_key())
    former = rotate()
    assert former.stat().st_mode & 0o077 == 0 and (tmp_path / "mine.key").stat().st_mode & 0o077 == 0
    assert public_line(operator_key()) != old == public_line(former_keys()[0])
    (tmp_path / "old.pub").write_text(old)
    (tmp_path / "new.pub").write_text(public_line(operator_key()))
    proof = proof_of(forgotten, tmp_path)
    assert verified(proof, "--key", tmp_path / "old.pub").returncode == 0
    assert failed(verified(proof, "--key", tmp_path / "new.pub").stdout) == [
        "the key in the proof is the operator's published key"]  # fmt: skip
    assert signed_by(folder(forgotten) / "certificates/r1.json", old)
    (tmp_path / "mine-other.key").write_text("not a former key")
    rotate()
    assert len({public_line(key) for key in (operator_key(), *former_keys())}) == 3
    former.unlink()
    with pytest.raises(UserError, match="another key has signed it"):
        write_proof(folder(forgotten), "r1", tmp_path / "p.zip")
