"""Signatures of a site's statements, by the key with which its node joined the federation.

ECDSA over P-384 with SHA-384 (FIPS 186-5), keys in OpenSSH's formats, by the `cryptography` package.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, RecordDict

from fedloom.conf.errors import UserError, locked

MOST_BYTES, MOST_KEY = 120, 400  # of a signature, and letters of a public key
SIGNED = "signed"  # a record of a reply


@dataclass(frozen=True)
class Identity:
    """A site's keys. `key`: file of its private key. `peers`: file of all sites' public keys, one line `NAME KEY` each."""

    key: str = ""
    peers: str = ""

    def signed(self, text: bytes) -> bytes:
        """Return the signature of a text; empty without a key. Raises UserError for a file without a valid key."""
        return _private(self.key).sign(text, ECDSA(SHA384())) if self.key else b""

    def sign(self, *parts: object) -> ConfigRecord | None:
        """Sign a statement of these parts. Returns a record of the signature and the public key, or None without a key."""
        if not self.key:
            return None
        public = _private(self.key).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        return ConfigRecord({"signature": self.signed(signing_payload(*parts)).hex(), "key": public})

    def known(self) -> Mapping[str, str]:
        """Return the public keys in the file `peers`, by site; empty without the file."""
        return _known(self.peers, _changed(self.peers)) if self.peers else {}

    def check(self, site: str, text: bytes, signature: bytes) -> None:
        """Raise UserError unless `site` signed the text. Checks nothing without the file `peers`."""
        if self.peers:
            known = self.known()
            if site not in known or not is_signed(known[site], text, signature):
                raise UserError(f"a statement in {site}'s name is not signed by its key (site.yaml: peers)")


def signing_payload(*parts: object) -> bytes:
    """Return the bytes to sign for a statement with these parts."""
    return "\n".join(("fedloom", *map(str, parts))).encode()


def update_payload(run: str, site: str, round: int, content: RecordDict) -> tuple[object, ...]:
    """Return the statement to sign for a reply: "this site sent these arrays in this round".

    Returns:
        The parts of the statement for `signing_payload`; the last one is a digest of the arrays.
    """
    total = hashlib.sha256()
    for record, arrays in sorted(content.array_records.items()):
        for name, array in sorted(arrays.items()):
            total.update(f"{record}\n{name}\n{array.dtype}\n{list(array.shape)}\n{len(array.data)}\n".encode() + array.data)
    return "sent", run, site, round, total.hexdigest()


def erased_words(run: str, site: str, files: int, size: int, request: str) -> tuple[object, ...]:
    """Return the statement to sign for an erasure: "this site deleted all its files of this run".

    Args:
        run: The run's id.
        site: The site's name.
        files: The number of deleted files.
        size: Their bytes.
        request: The id of the request; "" in statements of earlier versions.

    Returns:
        The parts of the statement for `signing_payload`.
    """
    return "erased", run, site, files, size, *([request] if request else [])


def verified_signature(content: RecordDict, *parts: object) -> dict[str, str]:
    """Return the signature (hex) and public key (an OpenSSH line) of a signed statement; empty unless it is valid."""
    record = content.config_records.get(SIGNED) or {}
    signature, key = str(record.get("signature", ""))[: 2 * MOST_BYTES], str(record.get("key", ""))[:MOST_KEY]
    try:
        good = is_signed(key, signing_payload(*parts), bytes.fromhex(signature))
    except ValueError:
        good = False
    return {"signature": signature, "key": key} if good else {}


def fingerprint(public: str) -> str:
    """Return the SHA-256 (hex) of a public key (an OpenSSH line), as Flower computes it; empty for an invalid key."""
    try:
        key = load_ssh_public_key(public.encode())
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def is_signed(public: str, text: bytes, signature: bytes) -> bool:
    """Return whether the holder of a public key (an OpenSSH line) signed the text."""
    try:
        key = load_ssh_public_key(public.encode())
        if not isinstance(key, EllipticCurvePublicKey):
            return False
        key.verify(signature, text, ECDSA(SHA384()))
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


@lru_cache
def _private(path: str) -> EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except TypeError:
        raise locked(path) from None
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: does not contain a readable private key ({type(error).__name__})") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not an ECDSA key. Make one with 'ssh-keygen -t ecdsa -b 384'.")
    return key


def _changed(path: str) -> int:
    """Return when the file was last written; 0 if it is missing."""
    return Path(path).stat().st_mtime_ns if Path(path).is_file() else 0


@lru_cache
def _known(path: str, changed: int) -> Mapping[str, str]:
    try:
        return dict(line.split(None, 1) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, ValueError):
        raise UserError(f"{path}: cannot be read; each line must be a site's name and its public key") from None
