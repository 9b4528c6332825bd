"""Parts of the tests of proofs: verify.py as its reader runs it, and false proofs with what finds them."""

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.conf import Config
from fedloom.server.ledger.tables import START, canonical, link
from fedloom.server.unlearning.signing import operator_key, public_pem
from fedloom.sims.report.proofs import write_proof
from tests.server.parts import WatchedApp, folder
from tests.server.runs import method_of
from tests.server.unlearnings import ONE, TWO, asked, configured, fulfil, further, run

Event = dict[str, Any]
Change = Callable[[Path], None]


def forgotten_run(root: Path, *words: str, rounds: int = 1) -> Config:
    """A run that has forgotten a site for the request r1, and went on for some rounds."""
    config = run(configured(root, *words))
    with method_of(config) as method:
        fulfil(method.unlearning(), asked(method.unlearning(), "r1", [ONE], "consent withdrawn"))
        if rounds:
            further(method, config, method.unlearning().last_round() + rounds, WatchedApp())
    return config


def proof_of(config: Config, root: Path) -> Path:
    """Write the proof of r1 as proof.zip, unpack it, and return its folder."""
    with zipfile.ZipFile(write_proof(folder(config), "r1", root / "proof.zip")) as archive:
        archive.extractall(root / "proof")
    return root / "proof"


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


def another_sender(content: dict[str, Any], events: list[Event]) -> None:
    content["by"] = "someone else"


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


NOT_USED, REMAINING = "no later event of the chain has a contribution of site-0001", "the remaining contributions agree"
FALSE: dict[Callable[[dict[str, Any], list[Event]], None], set[str]] = {
    used_again: {NOT_USED},
    used_in_an_event_of_an_unknown_kind: {NOT_USED},
    used_with_the_readmission_of_another: {NOT_USED},
    another_sum: {"the digest of the remaining sum is in the chain"},
    no_sites: {"that event forgot the certificate's sites", REMAINING},
    another_reason: {"the request's sites, reason"},
    another_sender: {"the request's sites, reason"},
    another_run: {"the chain is of the certificate's run"},
    no_times: {"the request was received at", "the request was applied at"},
    another_start: {"the digests before it agree with the certificate"},
    better_before: {"what was measured before it"},
    nothing_deleted: {"what was deleted agrees with the certificate"},
    one_less: {REMAINING},
    another_left: {"that event forgot the certificate's sites", REMAINING, "the request left all other sites'"},
}


def damaged(name: str, old: bytes, new: bytes) -> Change:
    def change(proof: Path) -> None:
        content = (proof / name).read_bytes()
        assert old in content
        (proof / name).write_bytes(content.replace(old, new, 1))

    return change


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
                     "the request's sites, reason"}),
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
