"""What the protocol is made of: key agreement, masks, sealed messages, signatures and shared secrets, all from libraries.

X25519 (RFC 7748), Ed25519 (RFC 8032), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439), Shamir's
scheme over GF(2**128). Secrets are drawn from the operating system, never from a run's seed.
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

SECRET = 16  # bytes of what is shared out: seeds, from which keys follow
KEY, NONCE, SIGNATURE = 32, 12, 64
LABEL = "fedloom secure aggregation"


@dataclass(frozen=True)
class PublicKeys:
    """What all sites know of one in an attempt, 32 bytes each.

    `channel`: the public key with which shares are sealed. `pair`: the one that common masks follow from. `own`: the
    commitment to the secret of the mask that is the site's alone. `signing`: the key of its signatures.
    """

    channel: bytes
    pair: bytes
    own: bytes
    signing: bytes

    def packed(self) -> bytes:
        """As they travel."""
        return self.channel + self.pair + self.own + self.signing

    @staticmethod
    def read(given: bytes) -> "PublicKeys":
        """The inverse of `packed`. UserError for another length."""
        if len(given) != PUBLIC:
            raise UserError(f"secure aggregation: public keys have {len(given)} bytes, take {PUBLIC}")
        return PublicKeys(*(given[start : start + KEY] for start in range(0, PUBLIC, KEY)))


PUBLIC = 4 * KEY


def secret() -> bytes:
    """16 bytes that nobody can guess."""
    return os.urandom(SECRET)


def derived(secret: bytes, *words: str) -> bytes:
    """A key of 32 bytes that follows from a secret for one purpose only."""
    return HKDF(SHA256(), KEY, salt=None, info="\n".join((LABEL, *words)).encode()).derive(secret)


def commitment(secret: bytes) -> bytes:
    """32 bytes by which a secret is known again; they do not tell it."""
    return hashlib.sha256(derived(secret, "commitment")).digest()


def public_key(seed: bytes) -> bytes:
    """The public half (32 bytes) of the key pair that follows from a seed."""
    return _private(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def signing_key(seed: bytes) -> bytes:
    """The public half (32 bytes) of the key of signatures that follows from a seed."""
    return _signing(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def signature(seed: bytes, text: bytes) -> bytes:
    """64 bytes."""
    return _signing(seed).sign(text)


def trained_words(attempt: str, digest: str) -> bytes:
    """What a site signs when it has trained: a digest (hex) of what determined the training."""
    return f"fedloom trained\n{attempt}\n{digest}".encode()


def history_words(attempt: str, history: bytes) -> bytes:
    """What a site signs: this was agreed on in the round that it goes on from (32 bytes)."""
    return "\n".join(("fedloom history", attempt, history.hex())).encode()


def counted_words(attempt: str, digest: str, counted: Sequence[str]) -> bytes:
    """What a site signs: over whom the sum is, all of which trained by the same."""
    return "\n".join(("fedloom counted", attempt, digest, *sorted(counted))).encode()


def is_signature(public: bytes, text: bytes, given: bytes) -> bool:
    """Whether the holder of the key of signatures signed this text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(given, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreed(seed: bytes, public: bytes, *words: str) -> bytes:
    """The key of 32 bytes that both holders of two key pairs come to. UserError for bytes that are no public key."""
    try:
        both = _private(seed).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise UserError("secure aggregation: a site's public key is none") from None
    return derived(both, *words)


def mask(key: bytes, record: str, size: int) -> Tensor:
    """int64 [size] that look drawn at random modulo 2**64 to whoever has not the key."""
    return torch.from_numpy(
        np.frombuffer(stream(derived(key, "mask", record), 8 * size), dtype="<i8").astype(np.int64, copy=False)
    )


def stream(key: bytes, size: int) -> bytearray:
    """So many bytes of ChaCha20's key stream; `key`: 32 bytes, or a secret of which one follows. Never twice for one use."""
    found, whole = bytearray(size), key if len(key) == KEY else derived(key, "stream")
    Cipher(ChaCha20(whole, bytes(16)), mode=None).encryptor().update_into(bytes(size), found)
    return found


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """Encrypted and authenticated, together with what it is about."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes | None:
    """The inverse; None for what was not sealed so."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError):
        return None


def shared_out(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares of a secret of 16 bytes, 16 bytes each; any `threshold` of them tell it, fewer tell nothing."""
    return [share for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def share_commitment(share: bytes) -> bytes:
    """32 bytes by which a share is known again; they do not tell it, as shares look drawn at random."""
    return hashlib.sha256(f"{LABEL}\nshare\n".encode() + share).digest()


def rebuilt(shares: Mapping[int, bytes]) -> bytes:
    """The secret of which these are shares, by their places from 1 on."""
    return Shamir.combine(list(shares.items()), ssss=False)


def check_room(most: int, times: int) -> None:
    """UserError if so many vectors with entries of this size could add up to more than the integers modulo 2^64 hold."""
    if most * times >= 2**63:
        raise UserError("federation.scale_bits: sums over all sites would not fit under masks; take fewer bits, or "
                        "strategy.weighting=equal")  # fmt: skip


def threshold_of(share: float, sites: int) -> int:
    """How many of so many sites must answer: more than two thirds, for a server may tell each of them of others that count
    (Bonawitz et al. 2017, against an active adversary).
    """
    return max(2 * sites // 3 + 1, min(sites, int(-(-share * sites // 1))))


def places(names: Iterable[str]) -> dict[str, int]:
    """The place of each site's share, from 1 on."""
    return {name: place for place, name in enumerate(sorted(names), 1)}


def sign(mine: str, other: str) -> int:
    """Of two sites one adds their common mask and the other subtracts it."""
    return 1 if mine < other else -1


def _signing(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derived(seed, "signing key"))


def _private(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, "private key"))
