"""`fedloom proof`: one file that proves a request to others, without Fedloom on their machine.

The zip holds the certificate, its signature and key, the ledger's events, a page, and two programs that check all of them
(`proof/verify.html` in a browser, `proof/verify.py` with `cryptography` alone).
"""

import base64
import hashlib
import io
import json
import zipfile
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.tables import START, canonical, link
from fedloom.server.unlearning.certificate import CERTIFICATES, as_written, read
from fedloom.server.unlearning.readings import outcome
from fedloom.server.unlearning.signing import SUFFIX, fingerprint, former_keys, is_whole, operator_key, public_pem, spki
from fedloom.sims.report.certificates import sections, title
from fedloom.sims.report.page import page_text
from fedloom.sims.report.time_stamps import time_stamp

PROGRAMS = Path(__file__).parent / "proof"
TIME = (1980, 1, 1, 0, 0, 0)  # of all files in the zip, so that equal proofs have equal bytes
README = """Proof of request {request} of run {run}: {outcome}.

certificate.html   The certificate, as a page.
certificate.json   The same as canonical JSON (RFC 8785), which is signed.
certificate.sig    The operator's signature (Ed25519, 64 bytes).
operator.pem       The operator's public key. Its sha256 is {fingerprint}.
chain.jsonl        The events of the run's ledger. The digest of each event covers all events before it.
SHA256SUMS         The sha256 of all files here.
SHA256SUMS.sig     The operator's signature of SHA256SUMS, made with this proof.
verify.html        A page that checks all this. Open it in a browser, and drop the zip on it. It needs no network.
verify.py          The same checks: pip install cryptography, then python -I verify.py --key KEY_OR_SHA256

The operator publishes the key: `fedloom key --pem` prints it, `fedloom key --sha256` prints its sha256. Compare it with the
one in this proof. verify.html and verify.py came with the proof. If you do not trust its sender, take both from the source
of Fedloom (sims/report/proof).

The signature of the certificate alone, with OpenSSL 3:

openssl pkeyutl -verify -pubin -inkey operator.pem -rawin -in certificate.json -sigfile certificate.sig

The events name all sites of the run, and the number of their examples in each round. They hold no data and no weights.
"""
STAMPED = """
SHA256SUMS.tsr     An authority's time stamp (RFC 3161) of SHA256SUMS. To check it with the authority's certificate:

openssl ts -verify -in SHA256SUMS.tsr -data SHA256SUMS -CAfile AUTHORITY.pem
"""


def write_proof(run: Path, request: str, out: Path, authority: str = "") -> Path:
    """Write the proof of a certified request as a zip file, and return its path. Arguments and errors as of `proof_of`."""
    write_bytes(out, proof_of(run, request, authority))
    return out


def proof_of(run: Path, request: str, authority: str = "") -> bytes:
    """Return the zip file with the proof of a certified request.

    Args:
        run: The run's folder.
        request: The request's id.
        authority: The URL of an authority that adds a time stamp (RFC 3161); "": none.

    Raises:
        UserError: The run has no signed certificate of the request, it or its signature was changed, the ledger's chain is
            broken, or the authority gives no time stamp.
    """
    if Path(request).name != request:
        raise UserError(f"request: got '{request}', which is not the id of a request")
    path = run / CERTIFICATES / f"{request}.json"
    content, chain = read(path), _chain(run, request, path)
    key, signature = _signed(path)
    der = spki(key)
    mine = next((own for own in (operator_key(), *former_keys()) if spki(own.public_key()) == der), None)
    if mine is None:
        raise UserError(f"{path}: another key has signed it; set FEDLOOM_KEY to the file of that key")
    done = outcome(content, ", ".join(content["sites"]), advice=False)
    texts = {"request": content["request"], "run": content["run"], "outcome": done}
    files = {
        "README.txt": (README.format(**texts, fingerprint=fingerprint(key)) + (STAMPED if authority else "")).encode(),
        "certificate.html": page_text(title(content), sections(content)).encode(),
        "certificate.json": path.read_bytes(),
        "certificate.sig": signature,
        "operator.pem": public_pem(mine).encode(),
        "chain.jsonl": chain,
        **{name: (PROGRAMS / name).read_bytes() for name in ("verify.html", "verify.py")},
    }
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()
    stamp = {"SHA256SUMS.tsr": time_stamp(sums, authority)} if authority else {}
    return _zipped({**files, "SHA256SUMS": sums, "SHA256SUMS.sig": mine.sign(sums), **stamp})


def _signed(path: Path) -> tuple[PublicKeyTypes, bytes]:
    """Return the public key and the signature of a certificate. Raises UserError if the key did not sign it."""
    try:
        beside = json.loads(path.with_suffix(SUFFIX).read_text(encoding="utf-8"))
        found = load_ssh_public_key(str(beside["key"]).encode()), base64.b64decode(str(beside["signature"]), validate=True)
    except FileNotFoundError:
        raise UserError(f"{path}: is not signed; `fedloom key` says why the operator's key cannot be used") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path.with_suffix(SUFFIX)}: is not a signature ({type(error).__name__})") from None
    if not is_whole(path):
        raise UserError(
            f"{path.with_suffix(SUFFIX)}: is not the signature of {path.name}; restore it from a copy of the run"
        )
    return found


def _chain(run: Path, request: str, certificate: Path) -> bytes:
    """Return the ledger's events, one JSON object in each line; `body` is the text that the digests cover."""
    lines, previous = [], START
    with Ledger.open(run, server=False) as ledger:
        if not as_written(certificate, request, ledger):
            raise UserError(f"{certificate}: it differs from what the server wrote; restore it from a copy of the run")
        for event in ledger.events():
            body = canonical(event.body)
            if event.digest != link(previous, event.id, event.time, event.kind, body):
                raise UserError(f"{run}: the chain is broken at event {event.id}; run `fedloom ledger {run} --check`")
            previous = event.digest
            facts = {"id": event.id, "time": event.time, "kind": event.kind, "body": body, "digest": event.digest}
            lines.append(f"{json.dumps(facts)}\n")
    return "".join(lines).encode()


def _zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, TIME), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()
