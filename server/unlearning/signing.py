"""The operator's signature (Ed25519) on certificates, for those who have neither the run nor a reason to trust its server.

A certificate holds the digest of the ledger's event by which its request was applied, and each event's digest covers all
events before: whoever signs the one signs the chain so far.
"""

import base64
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError

VARIABLE = "FEDLOOM_KEY"
SUFFIX = ".sig"


def key_path() -> Path:
    """$FEDLOOM_KEY, else fedloom/signing.key in the user's folder of settings."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedloom" / "signing.key"


def operator_key() -> Ed25519PrivateKey:
    """The operator's key; made when there is none yet. UserError for a file that holds another thing."""
    path = key_path()
    if not path.exists():
        _make(path)
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{path}: is no private key as 'ssh-keygen -t ed25519' makes it, without a password: {error}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: is a key of another kind; 'ssh-keygen -t ed25519' makes one that fits")
    return key


def public_line(key: Ed25519PrivateKey) -> str:
    """The public half, in one line that others may have."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def sign(path: Path, content: bytes) -> None:
    """Put the operator's signature of a file's content beside it."""
    key = operator_key()
    signature = base64.b64encode(key.sign(content)).decode()
    beside = {"key": public_line(key), "signature": signature}
    write_bytes(path.with_suffix(SUFFIX), json.dumps(beside, indent=1).encode())


def signed_by(path: Path, key: str) -> bool:
    """Whether a file bears the signature of a public key (its line, or a file that holds it). UserError for what is none."""
    public = _public(key)
    try:
        beside = json.loads(path.with_suffix(SUFFIX).read_text(encoding="ascii"))
        public.verify(base64.b64decode(beside["signature"], validate=True), path.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, InvalidSignature):
        return False
    return True


def _public(key: str) -> Ed25519PublicKey:
    given = key
    if " " not in key.strip():
        try:
            given = Path(key).read_text(encoding="ascii")
        except (OSError, ValueError):
            raise UserError(f"--key: there is no file '{key}'; takes one, or the line that 'fedloom key' prints") from None
    try:
        public = load_ssh_public_key(given.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, Ed25519PublicKey):
        raise UserError("--key: takes a line that begins with 'ssh-ed25519', as 'fedloom key' prints it")
    return public


def _make(path: Path) -> None:
    """A new key, its owner's alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return  # another one was quicker
    with os.fdopen(handle, "wb") as file:
        file.write(content)
