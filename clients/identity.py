"""A site's word, signed: by the key with which its node joined the federation, so that others can tell whose word it is.

ECDSA over P-384 with SHA-384 (FIPS 186-5), keys in OpenSSH's formats, by the `cryptography` package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from conf.errors import UserError

MOST_BYTES = 120  # of a signature


@dataclass(frozen=True)
class Identity:
    """`key`: the file of this site's private key. `peers`: that of all sites' public keys, a line for each: NAME KEY."""

    key: str = ""
    peers: str = ""

    def signed(self, text: bytes) -> bytes:
        """The signature; empty without a key. UserError for a file that holds none."""
        return _private(self.key).sign(text, ECDSA(SHA384())) if self.key else b""

    def check(self, site: str, text: bytes, signature: bytes) -> None:
        """UserError unless the text is signed by this site, if this one knows whose keys are whose."""
        if self.peers:
            known = _known(self.peers, _changed(self.peers))
            if site not in known or not is_signed(known[site], text, signature):
                raise UserError(f"what is said to be {site}'s word is not signed by its key (site.yaml: peers)")


def is_signed(public: str, text: bytes, signature: bytes) -> bool:
    """Whether the holder of a public key, one line of OpenSSH's, signed this."""
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
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: holds no private key ({type(error).__name__})") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"{path}: holds no key of ECDSA; 'ssh-keygen -t ecdsa -b 384' makes one")
    return key


def _changed(path: str) -> int:
    """When the file was written last; 0 if it is not there."""
    return Path(path).stat().st_mtime_ns if Path(path).is_file() else 0


@lru_cache
def _known(path: str, changed: int) -> Mapping[str, str]:
    try:
        return dict(line.split(None, 1) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, ValueError):
        raise UserError(f"{path}: takes lines of a site's name and its public key") from None
