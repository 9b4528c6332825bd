"""The protocol's primitives, all from libraries: key agreement, masks, sealed messages, signatures, shared secrets.

X25519 (RFC 7748), Ed25519 (RFC 8032), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439),
Shamir's scheme over GF(2**128). Secrets are drawn from the operating system, never from a run's seed.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from torch import Tensor

from fedloom.conf.errors import UserError

SECRET = 16  # bytes of a shared secret: a seed, from which keys derive
KEY, NONCE, SIGNATURE = 32, 12, 64
LABEL = "fedloom secure aggregation"


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of one site in one attempt, 32 bytes each.

    Attributes:
        channel: The key that seals shares for this site.
        pair: The key from which the masks shared with other sites are derived.
        own: The commitment to the secret of the mask that only the site has.
        signing: The key that checks its signatures.
    """

    channel: bytes
    pair: bytes
    own: bytes
    signing: bytes

    def packed(self) -> bytes:
        """Return the four keys as 128 bytes, as they are sent."""
        return self.channel + self.pair + self.own + self.signing

    @staticmethod
    def read(content: bytes) -> "PublicKeys":
        """Return the keys in bytes that `packed` returned. Raise UserError for another length."""
        if len(content) != PUBLIC:
            raise UserError(f"secure aggregation: public keys have {len(content)} bytes instead of {PUBLIC}")
        return PublicKeys(*(content[start : start + KEY] for start in range(0, PUBLIC, KEY)))


PUBLIC = 4 * KEY


def secret() -> bytes:
    """Return 16 secret random bytes."""
    return os.urandom(SECRET)


def derived(secret: bytes, *words: str) -> bytes:
    """Return a key of 32 bytes, derived from a secret for one purpose only, which `words` name."""
    return HKDF(SHA256(), KEY, salt=None, info="\n".join((LABEL, *words)).encode()).derive(secret)


def commitment(secret: bytes) -> bytes:
    """Return a hash (32 bytes) that identifies a secret without revealing it."""
    return hashlib.sha256(derived(secret, "commitment")).digest()


def public_key(seed: bytes) -> bytes:
    """Return the public key (32 bytes) of the key pair that derives from a seed."""
    return _private(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def signing_key(seed: bytes) -> bytes:
    """Return the public signature key (32 bytes) that derives from a seed."""
    return _signing(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def signature(seed: bytes, text: bytes) -> bytes:
    """Return the signature (64 bytes) of a text by the key that derives from a seed."""
    return _signing(seed).sign(text)


def trained_words(attempt: str, digest: str) -> bytes:
    """Return the text that a site signs after training: a digest (hex) of what determined the training."""
    return f"fedloom trained\n{attempt}\n{digest}".encode()


def history_words(attempt: str, history: bytes) -> bytes:
    """Return the text that a site signs about its history: a digest (32 bytes) of what it agreed on in its base round."""
    return "\n".join(("fedloom history", attempt, history.hex())).encode()


def counted_words(attempt: str, digest: str, counted: Sequence[str]) -> bytes:
    """Return the text that a site signs about a sum: its sites, all of which trained in the same way (`digest`)."""
    return "\n".join(("fedloom counted", attempt, digest, *sorted(counted))).encode()


def is_signature(public: bytes, text: bytes, signed: bytes) -> bool:
    """Return whether `signed` is a signature of this text by the holder of the public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signed, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreed(seed: bytes, public: bytes, *words: str) -> bytes:
    """Return the key (32 bytes) that two sites share, from a seed and the other's public key. Raise UserError if invalid."""
    try:
        both = _private(seed).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise UserError("secure aggregation: a site's public key is not valid") from None
    return derived(both, *words)


def mask(key: bytes, record: str, size: int) -> Tensor:
    """Return the mask of a record, int64 [size], computed from a key. Without the key it looks random modulo 2**64."""
    return torch.from_numpy(
        np.frombuffer(stream(derived(key, "mask", record), 8 * size), dtype="<i8").astype(np.int64, copy=False)
    )


def stream(key: bytes, size: int) -> bytearray:
    """Return `size` bytes of ChaCha20's key stream. `key`: 32 bytes, or a secret. Use a key only once per purpose."""
    output, full_key = bytearray(size), key if len(key) == KEY else derived(key, "stream")
    Cipher(ChaCha20(full_key, bytes(16)), mode=None).encryptor().update_into(bytes(size), output)
    return output


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """Return the encrypted text. `unseal` opens it only with the same key and context `about`."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes | None:
    """Return the text that `seal` encrypted; None if the key or `about` differs, or bytes were changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError):
        return None


def shared_out(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret of 16 bytes into `count` shares of 16 bytes: `threshold` of them reveal it, fewer reveal nothing."""
    return [share for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def share_commitment(share: bytes) -> bytes:
    """Return 32 bytes that identify a share without revealing it, because shares look random."""
    return hashlib.sha256(f"{LABEL}\nshare\n".encode() + share).digest()


def rebuilt(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that these shares reveal together; they are by index, from 1."""
    return Shamir.combine(list(shares.items()), ssss=False)


def check_room(most: int, times: int) -> None:
    """Raise UserError if the sum of `times` entries of at most `most` could exceed 64 bits (signed)."""
    if most * times >= 2**63:
        raise UserError("federation.scale_bits: sums over all sites would not fit under masks; use fewer bits, or "
                        "strategy.weighting=equal")  # fmt: skip


def threshold_of(share: float, sites: int) -> int:
    """Return how many of `sites` sites must answer: more than two thirds, and at least the share `share`.

    With fewer, a server could send different sites different lists of sites that count (Bonawitz et al. 2017, against
    an active adversary).
    """
    return max(2 * sites // 3 + 1, min(sites, int(-(-share * sites // 1))))


def places(names: Iterable[str]) -> dict[str, int]:
    """Return the index of each site's share, from 1, in the order of names."""
    return {name: index for index, name in enumerate(sorted(names), 1)}


def sign(mine: str, other: str) -> int:
    """Return 1 or -1: the sign with which `mine` adds its common mask with `other`, who uses the other sign."""
    return 1 if mine < other else -1


def _signing(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derived(seed, "signing key"))


def _private(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, "private key"))
