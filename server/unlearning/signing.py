"""The operator's signature (Ed25519) on certificates, for readers who have neither the run nor trust in its server.

A certificate holds the digest of the ledger's event by which its request was applied. That digest covers all earlier events,
so the signature covers the chain so far.
"""

import base64
import glob
import hashlib
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError, locked

VARIABLE = "FEDLOOM_KEY"
SUFFIX = ".sig"
NAMED = 16  # digits of its fingerprint in the name of a former key's file


def key_path() -> Path:
    """Return the path of the operator's key: $FEDLOOM_KEY, else fedloom/signing.key in the user's configuration folder."""
    if path := os.environ.get(VARIABLE):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedloom" / "signing.key"


def operator_key() -> Ed25519PrivateKey:
    """Return the operator's key, which is created at its first use. Raises UserError if the file is not a valid key."""
    path = key_path()
    if not path.exists():
        _make(path)
    return _read(path)


def former_keys() -> list[Ed25519PrivateKey]:
    """Return the keys that `rotate` has replaced. Raises UserError if a file is not a valid key."""
    path = key_path()
    name = glob.escape(path.stem) + "-" + "[0-9a-f]" * NAMED + glob.escape(path.suffix)
    return [_read(old) for old in sorted(path.parent.glob(name))]


def rotate() -> Path:
    """Replace the operator's key by a new one, and return the old key's file, which is next to it."""
    path, old = key_path(), operator_key()
    former = path.with_name(f"{path.stem}-{fingerprint(old.public_key())[:NAMED]}{path.suffix}")
    try:
        path.rename(former)
        _make(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be replaced ({error.strerror}); check the permissions of its folder") from None
    return former


def _read(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except TypeError:
        raise locked(path) from None
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{path}: is not a private key without a password; create one with 'ssh-keygen -t ed25519': {error}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: is a key of another type; create one with 'ssh-keygen -t ed25519'")
    return key


def public_line(key: Ed25519PrivateKey) -> str:
    """Return the public half of the key, in one line."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def spki(key: PublicKeyTypes) -> bytes:
    """Return a public key in DER (SubjectPublicKeyInfo), whose sha256 names it in proofs."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: PublicKeyTypes) -> str:
    """Return the sha256 by which proofs name a public key."""
    return hashlib.sha256(spki(key)).hexdigest()


def public_pem(key: Ed25519PrivateKey) -> str:
    """Return the public half of the key as PEM."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def sign(path: Path, content: bytes) -> None:
    """Sign a file's content with the operator's key, and write the signature next to the file."""
    key = operator_key()
    signature = base64.b64encode(key.sign(content)).decode()
    beside = {"key": public_line(key), "signature": signature}
    write_bytes(path.with_suffix(SUFFIX), json.dumps(beside, indent=1).encode())


def signed_by(path: Path, key: str) -> bool:
    """Return whether a file has the signature of a public key.

    `key`: the key's line, or a file that holds it. Raises UserError if it is neither.
    """
    return _is_signed(path, _public(key))


def is_whole(path: Path) -> bool:
    """Return whether the signature next to a file is by the key next to it. This does not say whose key it is."""
    return _is_signed(path, None)


def _is_signed(path: Path, public: Ed25519PublicKey | None) -> bool:
    """Return whether a file has the signature of a public key; None: of the key next to the file."""
    try:
        beside = json.loads(path.with_suffix(SUFFIX).read_text(encoding="ascii"))
        public = public or _public_line(beside["key"])
        public.verify(base64.b64decode(beside["signature"], validate=True), path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidSignature):
        return False
    return True


def _public(key: str) -> Ed25519PublicKey:
    line = key
    if " " not in key.strip():
        try:
            line = Path(key).read_text(encoding="ascii")
        except (OSError, ValueError):
            raise UserError(f"--key: the file '{key}' does not exist; pass a file, or the line of `fedloom key`") from None
    try:
        return _public_line(line.strip())
    except ValueError:
        raise UserError("--key: needs a line that begins with 'ssh-ed25519', or PEM, as `fedloom key` prints it") from None


def _public_line(line: str) -> Ed25519PublicKey:
    """Return the Ed25519 key in an OpenSSH line, or in PEM. Raises ValueError for another text."""
    try:
        public = (load_pem_public_key if line.startswith("-----BEGIN") else load_ssh_public_key)(line.encode())
    except UnsupportedAlgorithm:
        public = None
    if not isinstance(public, Ed25519PublicKey):
        raise ValueError("is not an Ed25519 key")
    return public


def _make(path: Path) -> None:
    """Create a key that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return  # another process was faster
    with os.fdopen(handle, "wb") as file:
        file.write(content)
