"""Check a proof that a federation has forgotten a site. Needs Python 3.9 and the package `cryptography`.

`python -I verify.py` checks the files in its own folder. `python -I verify.py --help` lists more checks.

Exit code 0: all checks have passed. 1: at least one has failed. 2: files are missing or unreadable.
"""
# ruff: noqa: E402

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path = [path for path in sys.path if os.path.realpath(path or ".") != HERE]  # imports nothing that came with the proof

import argparse
import hashlib
import json
import math
import re
import struct
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

START, STAMP = "0" * 64, "SHA256SUMS.tsr"
FILES = {
    "certificate.html",
    "certificate.json",
    "certificate.sig",
    "chain.jsonl",
    "operator.pem",
    "verify.html",
    "verify.py",
}
MODULUS = 1 << 64
DIGEST = re.compile("[0-9a-fA-F]{64}")


class Report:
    """Collects the checks and prints each."""

    def __init__(self):
        self.good, self.besides = True, ""

    def check(self, what, right, reason=""):
        self.good = self.good and bool(right)
        print(f"{'ok  ' if right else 'FAIL'}  {plain(what)}{'' if right or not reason else ': ' + plain(reason)}")

    def note(self, text):
        print(f"      {plain(text)}")


def plain(text):
    """Return a text without control characters, which could change what a terminal shows."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def value_of(text):
    """Return the value of a JSON text. Raises ValueError for repeated keys, and for numbers that JSON does not have."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    def unique(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def key_of(text):
    """Return a public key from PEM or from an OpenSSH line."""
    return load_pem_public_key(text) if text.lstrip().startswith(b"-----BEGIN") else load_ssh_public_key(text)


def key_in(option, path):
    """Return the public key in a file. Without one, end with a line that names the option."""
    try:
        return key_of(Path(path).read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        what = "takes a file with a public key (PEM, or an OpenSSH line)" + (", or its sha256" if option == "--key" else "")
        sys.exit(refused(f"{option} {path}: {what} ({type(error).__name__}: {error})"))


def refused(why):
    print(plain(why), file=sys.stderr)
    return 2


def spki(key):
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signature(report, folder, published):
    """Check the operator's signature of the certificate."""
    key = key_of((folder / "operator.pem").read_bytes())
    digest = hashlib.sha256(spki(key)).hexdigest()
    if published:
        by_digest = DIGEST.fullmatch(published) and not Path(published).exists()
        same = digest == published.lower() if by_digest else spki(key) == spki(key_in("--key", published))
        report.check("the key in the proof is the operator's published key", same)
    else:
        report.note(f"key of the operator (compare with the published one): sha256 {digest}")
    report.check(
        "the operator signed the certificate (Ed25519)", is_signed(key, folder, "certificate.json", "certificate.sig")
    )


def is_signed(key, folder, name, signature):
    """Return whether the holder of an Ed25519 key signed a file."""
    if not isinstance(key, Ed25519PublicKey):
        return False
    try:
        key.verify((folder / signature).read_bytes(), (folder / name).read_bytes())
    except InvalidSignature:
        return False
    return True


def manifest(report, folder):
    """Check that the operator signed the list of files, and that exactly these files are here, unchanged."""
    key = key_of((folder / "operator.pem").read_bytes())
    report.check("the operator signed the list of all files", is_signed(key, folder, "SHA256SUMS", "SHA256SUMS.sig"))
    lines = (folder / "SHA256SUMS").read_text("ascii").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    here = {path.name for path in folder.iterdir()} - {"SHA256SUMS", "SHA256SUMS.sig", STAMP}
    for name in sorted(FILES - listed.keys()):
        report.check(f"{name} is in the list", False)
    for name in sorted(listed.keys() | here):
        if name not in listed:
            report.note(f"{name} is not part of the proof")
            continue
        right = name in here and hashlib.sha256((folder / name).read_bytes()).hexdigest() == listed[name]
        report.check(f"{name} is as the operator signed it", right, "it is missing or changed")


def stamp(report, folder):
    """Check that the time stamp, if there is one, is of the list of files. openssl checks the authority's signature."""
    if (folder / STAMP).exists():
        digest = hashlib.sha256((folder / "SHA256SUMS").read_bytes()).digest()
        stamped = stamped_digest((folder / STAMP).read_bytes())
        report.check("the time stamp is of the list of all files", stamped == digest)
        report.note("The time, and who states it: openssl ts -reply -text -in SHA256SUMS.tsr")
        report.note("openssl ts -verify -in SHA256SUMS.tsr -data SHA256SUMS -CAfile AUTHORITY.pem")


def stamped_digest(reply):
    """Return the digest in the token of a time-stamping authority's reply (RFC 3161); empty if it granted none."""
    try:
        ((_, response),) = der(reply)
        status, (_, token) = der(response)[:2]
        if der(status[1])[0][1] not in (b"\0", b"\1"):  # granted, or granted with changes
            return b""
        content = der(der(der(token)[1][1])[0][1])[2][1]  # of the signed data
        stamp = der(der(der(content)[1][1])[0][1])[0][1]
        return der(der(stamp)[2][1])[1][1]
    except (IndexError, ValueError):
        return b""


def der(data):
    """Return the tag and the content of each value in DER."""
    found, place = [], 0
    while place < len(data):
        tag, size, place = data[place], data[place + 1], place + 2
        if size > 127:
            begin, place = place, place + size - 128
            size = int.from_bytes(data[begin:place], "big")
        found.append((tag, data[place : place + size]))
        place += size
    if place > len(data):
        raise ValueError("DER that ends too early")
    return found


def chain(report, events):
    """Check that each event's digest covers the event and all events before it."""
    previous = START
    for number, event in enumerate(events, 1):
        text = f"{previous}[{event['id']},{json.dumps(event['time'])},{json.dumps(event['kind'])},{event['body']}]"
        if event["id"] != number or event["digest"] != hashlib.sha256(text.encode()).hexdigest():
            report.check("the chain of events is unbroken", False, f"event {number} does not fit")
            return
        previous = event["digest"]
    report.check(f"the chain of {len(events)} events is unbroken", True)


def replayed(events, until):
    """Return the latest contribution of each site after the event number `until`, by site."""
    latest, before = {}, {}
    for event in events[:until]:
        body, kind = value_of(event["body"]), event["kind"]
        if event["id"] == until:
            before = {site: rows[-1] for site, rows in latest.items() if rows}
        if kind in ("round", "readmitted"):
            for site, row in body.get("contributions", {}).items():
                latest.setdefault(site, []).append({**row, "round": row.get("round", body.get("round"))})
        elif kind == "forgotten":
            for site in body["sites"]:
                latest.pop(site, None)
        elif kind == "rolled back":
            latest = {site: [row for row in rows if row["round"] <= body["round"]] for site, rows in latest.items()}
    return before, {site: rows[-1] for site, rows in latest.items() if rows}


def request(report, content, events):
    """Check what the certificate says against the events."""
    place = content["ledger"]["event"]
    event = events[place - 1] if isinstance(place, int) and 1 <= place <= len(events) else None
    fits = event is not None and event["kind"] == "forgotten" and event["digest"] == content["ledger"]["digest"]
    report.check("the certificate names an event of the chain", fits)
    if event is None or not fits:
        return
    body = value_of(event["body"])
    report.check("that event forgot the certificate's sites", body["sites"] == content["sites"] and content["sites"])
    report.check("for the certificate's request", body.get("request") == content["request"])
    exact = content["exact"]
    report.check("the sums' digests after it agree with the certificate", body["digest"] == exact["digest_after"])
    report.check("the digests before it agree with the certificate", body["body"]["digest_before"] == exact["digest_before"])
    measured = body["body"]["evidence"] == content["evidence"].get("before")
    report.check("what was measured before it agrees with the certificate", measured)
    made_for(report, content, events)
    report.check(
        "the chain has the sha256 of this certificate", content["sha256"] in certificates(events, content["request"])
    )
    afterwards(report, content["sites"], events[place:])
    rest(report, content, events)


def made_for(report, content, events):
    """Check the request itself: its run, sites, reason and times, and what was deleted for it."""

    def mine(kind, name="id"):
        bodies = ((event["time"], value_of(event["body"])) for event in events if event["kind"] == kind)
        return [(time, body) for time, body in bodies if body[name] == content["request"]]

    report.check("the chain is of the certificate's run", value_of(events[0]["body"])["run"] == content["run"])
    right = [all(body[part] == content[part] for part in ("sites", "reason", "options")) for _, body in mine("received")]
    right += [body.get("by", "") == content.get("by", "") for _, body in mine("received")]
    report.check("the request's sites, reason, options and sender agree with the certificate", right == [True, True])
    for kind in ("received", "applied"):
        stated = content["times"].get(kind)
        report.check(f"the request was {kind} at {stated}", stated in [time for time, _ in mine(kind)])
    paths = {path for _, body in mine("erased", "request") for path in body["paths"]}
    report.check("what was deleted agrees with the certificate", paths == set(content["erased"]))


def certificates(events, request):
    bodies = (value_of(event["body"]) for event in events if event["kind"] == "certified")
    return [body["sha256"] for body in bodies if body["request"] == request]


def afterwards(report, sites, events):
    """Check that no later round uses anything of the forgotten sites, unless they were readmitted."""
    for site in sites:
        used, back, readmitted = [], False, []
        for event in events:
            body = value_of(event["body"])
            if event["kind"] in ("readmitted", "forgotten") and site in body["sites"]:
                back = event["kind"] == "readmitted"
                readmitted += [event["id"]] if back else []
            if site in body.get("contributions", {}) and not back:
                used.append(event["id"])
        unless = ", except while it was readmitted" if readmitted else ""
        report.check(f"no later event of the chain has a contribution of {site}{unless}", not used, f"events {used}")
        if back:
            report.besides += f" But {plain(site)} participates again: it was readmitted later."
        elif readmitted:
            numbers = ", ".join(map(str, readmitted))
            report.besides += f" But {plain(site)} was readmitted later (event {numbers}), and then forgotten again."


def rest(report, content, events):
    """Check that the remaining sites' contributions are those of the chain, and that the request changed none of them."""
    settled, remaining = issued(events, content["request"]), content["exact"]["remaining"]
    report.check("the remaining contributions agree with the certificate", state_of(content, events) is not None)
    before, after = replayed(events, content["ledger"]["event"])
    kept = {site: row for site, row in before.items() if site not in content["sites"]}
    report.check("the request left all other sites' contributions unchanged", kept == after)
    report.check("no forgotten site is among the remaining ones", not set(content["sites"]) & set(remaining))
    later = events[content["ledger"]["event"] - 1 : max(settled, default=0)]
    bodies = [value_of(event["body"]) for event in later if event["kind"] in ("forgotten", "round", "readmitted")]
    digests = [one_digest(body["digest"]) for body in bodies] if content["exact"]["tensors"] else [one_digest(remaining)]
    report.check("the digest of the remaining sum is in the chain", content["exact"]["sum_of_remaining"] in digests)


def issued(events, request):
    """Return the numbers of the events by which the request's certificate was written."""
    return [e["id"] for e in events if e["kind"] == "certified" and value_of(e["body"])["request"] == request]


def state_of(content, events):
    """Return the remaining contributions, by site, when the certificate was written; None if they are not its own."""
    for number in (content["ledger"]["event"], *issued(events, content["request"])):
        state = replayed(events, number)[1]
        if {site: row["blob"] for site, row in state.items()} == content["exact"]["remaining"]:
            return state
    return None


def one_digest(digests):
    """Return one digest for several, by name; the digest itself if there is only one."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def of_site(report, content, events, site, key):
    """Check, for a site, which contributions of it were used and removed, and that it signed them."""
    rounds = [value_of(event["body"]) for event in events if event["kind"] == "round"]
    sent = [body for body in rounds if site in body["contributions"] and body["round"]]  # round 0: what the server sets
    report.note(f"{site} contributed in these rounds: {', '.join(str(body['round']) for body in sent) or 'none'}")
    if site in content["sites"]:
        before, after = replayed(events, content["ledger"]["event"])
        report.check(f"the request removed the last contribution of {site}", site in before and site not in after)
    else:
        state = state_of(content, events) or {}
        report.check(f"the last contribution of {site} is still in the sum", site in state)
    if key:
        signed(report, content["run"], site, events, key)


def _sent(public, run, site, number, word):
    """Return whether the site signed that it sent this in its round `number`; a site counts only rounds that train."""
    text = "\n".join(("fedloom", "sent", run, site, str(number), word["sha256"])).encode()
    if not isinstance(public, EllipticCurvePublicKey):
        return False
    try:
        public.verify(bytes.fromhex(word["signature"]), text, ECDSA(SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def signed(report, run, site, events, key):
    """Check that the site signed what counts as sent by it: each time for a later round of its own."""
    public, numbers, unsigned, wrong = key_in("--site-key", key), {}, [], []
    for event in events:
        body = value_of(event["body"])
        if event["kind"] == "rolled back":
            numbers = {round: number for round, number in numbers.items() if round <= body["round"]}
        if event["kind"] != "round" or site not in body["contributions"] or not body["round"]:
            continue
        word = ((body.get("record") or {}).get("signed") or {}).get(site)
        if word is None:
            unsigned.append(body["round"])
            continue
        later = range(body["round"], max(numbers.values(), default=0), -1)
        number = next((number for number in later if _sent(public, run, site, number, word)), None)
        if number is None:
            wrong.append(body["round"])
        else:
            numbers[body["round"]] = number
    if unsigned and not numbers and not wrong:
        why = "none, as in runs under masks or of a site without a key"
        report.check(f"the chain has a signature of {site}", False, why)
        return
    report.check(f"what counts as sent by {site} has its signature", not wrong, f"not in rounds {wrong}")
    report.note("A signature covers the message that the site sent, not the file of its contribution.")
    if unsigned:
        rounds = ", ".join(map(str, unsigned))
        report.besides += f" But the chain has no signature of {plain(site)} in rounds {rounds}."


# The sum of the remaining contributions, computed again


def tensors(path):
    """Return the tensors of a safetensors file: by name, dtype, shape and numbers."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    found = {}
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            form = {"F32": "f", "F64": "d", "I64": "q"}[entry["dtype"]]
            data = content[8 + size + begin : 8 + size + end]
            found[name] = (form, entry["shape"], struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))
    return found


def whole(value, form, bits):
    """Return a number in units of 2**-bits, rounded to the nearest, ties to even."""
    return value if form == "q" else round(math.ldexp(value, bits))


def summed(rows, files, names, description, bits):
    """Return the digest of the exact sum of contributions."""
    totals, shapes = {}, {}
    for row in rows:
        times = max(1, row["samples"]) if description.get("weighted") else 1
        for name, (form, shape, values) in tensors(files[row["blob"]]).items():
            name = name[len(description["prefix"]) :] if name.startswith(description["prefix"]) else ""
            if name in names:
                total = totals.setdefault(name, [0] * len(values))
                shapes[name] = shape
                for index, value in enumerate(values):
                    total[index] += times * whole(value, form, bits)
    digest = hashlib.sha256()
    for name in sorted(totals):
        shape = tuple(shapes[name])
        wrapped = [(value + MODULUS // 2) % MODULUS - MODULUS // 2 for value in totals[name]]
        digest.update(f"{name}|<i8|{shape}|".encode() + struct.pack(f"<{len(wrapped)}q", *wrapped))
    return digest.hexdigest()


def sums(report, content, events, folder):
    """Check the files of the remaining contributions, and their sum."""
    remaining, created = content["exact"]["remaining"], value_of(events[0]["body"])
    if odd := [blob for blob in remaining.values() if len(blob) != 64 or set(blob) - set("0123456789abcdef")]:
        raise ValueError(f"{odd[0]} is not a sha256")  # it would be a path
    files = {blob: folder / f"{blob}.safetensors" for blob in remaining.values()}
    missing = sorted(site for site, blob in remaining.items() if not files[blob].is_file())
    if missing:
        report.note(f"no files of {', '.join(missing)}: the sum is not computed again")
    present = [path for path in files.values() if path.is_file()]
    right = all(hashlib.sha256(path.read_bytes()).hexdigest() == path.stem for path in present)
    report.check(f"{len(present)} files of contributions are those of the certificate", right)
    described = created.get("sums", {"sum": {"prefix": "", "weighted": False}})
    if len(described) != 1 or not content["exact"]["tensors"]:
        report.note("the method has several sums or none: the sum is not computed again")
        return
    state = state_of(content, events)
    if missing or not right or state is None:
        return
    rows = state.values()
    digest = summed(rows, files, content["exact"]["tensors"], next(iter(described.values())), created["bits"])
    report.check("their exact sum agrees with the certificate", digest == content["exact"]["sum_of_remaining"])


def shown(report, content):
    """Repeat what the certificate says if its measurements do not show that the network has forgotten."""
    found = (content.get("readings") or {}).get("shown")
    if found == "no":
        report.besides += " But the certificate says that the network has not forgotten: only the contributions are removed."
    elif found != "yes":
        report.note("The certificate says that no measurement shows whether the network has forgotten.")


def parsed():
    parser = argparse.ArgumentParser(description="Check a proof that a federation has forgotten a site.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent, help="the proof's files")
    parser.add_argument("--key", help="the operator's published public key: a file (PEM, or an OpenSSH line), or its sha256")
    parser.add_argument("--site", help="also check what this site sent")
    parser.add_argument("--site-key", help="the site's public key")
    parser.add_argument("--contributions", type=Path, help="a folder with the files of the remaining contributions")
    return parser.parse_args()


def main():
    asked, report = parsed(), Report()
    try:
        content = value_of((asked.folder / "certificate.json").read_bytes().decode())
        content["sha256"] = hashlib.sha256((asked.folder / "certificate.json").read_bytes()).hexdigest()
        events = [value_of(line) for line in (asked.folder / "chain.jsonl").read_bytes().decode().split("\n")[:-1]]
        report.note(f"Request {content['request']} of run {content['run']}: forget {', '.join(content['sites'])}")
        report.note(f"The proof is as of event {events[-1]['id']}, {events[-1]['time']}")
        shown(report, content)
        signature(report, asked.folder, asked.key)
        manifest(report, asked.folder)
        stamp(report, asked.folder)
        chain(report, events)
        request(report, content, events)
        if asked.site:
            of_site(report, content, events, asked.site, asked.site_key)
        if asked.contributions:
            sums(report, content, events, asked.contributions)
    except Exception as error:  # a hostile proof may cause any
        sys.exit(refused(f"the proof cannot be read: {type(error).__name__}: {error}"))
    print(f"All checks passed.{report.besides}" if report.good else "At least one check FAILED.")
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
