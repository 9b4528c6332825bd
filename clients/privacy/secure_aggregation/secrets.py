"""What a site stores for secure aggregation: the secrets of the current round, and the keys of its masks.

These files are in its own store; only the site reads them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedloom.clients.privacy.secure_aggregation.primitives import PublicKeys, commitment, public_key, secret, signing_key
from fedloom.clients.privacy.sketch import Sketch, packed, unpacked
from fedloom.clients.storage.states import write_bytes
from fedloom.clients.storage.store import SiteStore
from fedloom.conf.errors import UserError

ROUND, KEYS, MOVED, LIFTED = "secure-round.json", "secure-keys.json", "secure-moved.json", "secure-lifted.json"
AGREED, READ = "secure-agreed.json", "read"


@dataclass(frozen=True)
class Agreed:
    """What a site has signed in a round: `statement`, a digest of what determined the training, and the list `counted`."""

    statement: str = ""
    counted: list[str] = field(default_factory=list)

    @property
    def digest(self) -> bytes:
        """A hash of 32 bytes, equal for all sites that have signed the same."""
        return hashlib.sha256(json.dumps([self.statement, self.counted]).encode()).digest()


@dataclass
class Attempt:
    """One attempt at a round: this site's four secrets, and what it received from others (all bytes as hex).

    The contribution is sent once, and masks are removed once: two contributions under one mask would reveal their
    difference. Secrets are shared once (then `peers` is set): with a second round of shares, a server could get
    enough of the other secret.

    Attributes:
        channel: The secret of the key pair that seals shares.
        pair: The secret of the key pair that common masks derive from.
        own: The secret of the mask that only this site has.
        signing: The secret of the signature key.
        order: The parts of the order that are equal in all steps, as JSON.
        threshold: How many sites must answer.
        peers: Every site's public keys.
        held: Others' shares for this site.
        shares: Its share of its own secret `own`.
        statement: A digest of what determined its training.
        bases: By site, the round that it continues from.
        sketches: Of what the server does not know about its contribution.
        draws: Digests of the images that its training drew.
        config: A digest of the configuration.
        counted: The sites whose contributions count, as this site has signed.
        lifts: By leaving site, the rounds whose common masks this site has removed.
        idle: Whether no site trains in this round.
        trains: Whether the sum is of contributions; otherwise of sums over examples.
        sent: Whether it has sent its masked contribution.
        unmasked: Whether it has helped to remove masks.
    """

    id: str
    channel: str
    pair: str
    own: str
    signing: str
    order: str = ""
    threshold: int = 0
    peers: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    shares: str = ""
    statement: str = ""
    bases: dict[str, int] = field(default_factory=dict)
    sketches: dict[str, str] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    config: str = ""
    counted: list[str] = field(default_factory=list)
    lifts: dict[str, list[int]] = field(default_factory=dict)
    idle: bool = False
    trains: bool = True
    sent: bool = False
    unmasked: bool = False

    @staticmethod
    def begin(id: str, order: str) -> "Attempt":
        """Return a new attempt with new secrets."""
        channel, pair, own, signing = (secret().hex() for _ in range(4))
        return Attempt(id, channel, pair, own, signing, order)

    def public(self) -> PublicKeys:
        """Return the public keys of this site's secrets."""
        channel, pair, own, signing = map(bytes.fromhex, (self.channel, self.pair, self.own, self.signing))
        return PublicKeys(public_key(channel), public_key(pair), commitment(own), signing_key(signing))

    def keys(self, site: str) -> PublicKeys:
        """Return the public keys of a site in `peers`."""
        return PublicKeys.read(bytes.fromhex(self.peers[site]))


@dataclass(frozen=True)
class Secrets:
    """What one site stores for secure aggregation in one run: the current attempt, mask keys, sketches and agreements.

    Each group is a JSON file in the site's own store, which only the site reads.

    Attributes:
        store: The site's store for this run.
    """

    store: SiteStore

    def attempt(self, id: str) -> Attempt:
        """Return the current attempt. Raise UserError if its id is not `id`."""
        content = self._read(ROUND)
        if content.get("id") != id:
            raise UserError("order.secure: is not the attempt at a round that this site has begun")
        try:
            return Attempt(**content)
        except TypeError:
            raise UserError("order.secure: another version of fedloom began this attempt; begin the round again") from None

    def save(self, attempt: Attempt) -> None:
        """Save an attempt as the current one. It replaces the last one."""
        self._write(ROUND, asdict(attempt))

    def mask_keys(self) -> dict[int, dict[str, bytes]]:
        """Return the keys of the masks that this site shares with other sites, by round and site."""
        return {int(round): {site: bytes.fromhex(key) for site, key in keys.items()}
                for round, keys in self._read(KEYS).items()}  # fmt: skip

    def save_mask_keys(self, round: int, keys: Mapping[str, bytes]) -> None:
        """Save the keys of the masks that this site shares with other sites in a round.

        Keys of earlier attempts at the round, and of later rounds, are deleted.

        Args:
            round: The round.
            keys: The key of each shared mask, by the other site's name.
        """
        rounds = {number: masks for number, masks in self.mask_keys().items() if number < round} | {round: dict(keys)}
        self._write(KEYS, {number: {site: key.hex() for site, key in masks.items()} for number, masks in rounds.items()})

    def sketches(self, round: int) -> dict[str, Sketch]:
        """Return the sketches saved for a round: how far each tensor moved, by record and tensor. Empty without any."""
        return unpacked(self._read(MOVED).get(str(round), {}))

    def save_sketches(self, round: int, base: int, sketches: Mapping[str, Sketch]) -> None:
        """Save the sketches of a round.

        Sketches of the base round and of rounds with an agreement remain; all others are deleted.

        Args:
            round: The round.
            base: The round that this one continues from.
            sketches: How far each tensor moved, by record and tensor.
        """
        numbers = {base, *(int(one) for one in self._read(AGREED) if one != READ)} - {round}
        self._write(MOVED, {**{str(one): packed(self.sketches(one)) for one in numbers}, str(round): packed(sketches)})

    def agreement(self, round: int) -> "Agreed | None":
        """Return what this site has signed in a round; None if it signed nothing, or has sent another contribution since."""
        content = self._read(AGREED).get(str(round))
        return Agreed(**content) if content else None

    def is_new(self) -> bool:
        """Return whether the site has sent nothing in this run yet, or has lost its store."""
        return not (self.store.folder / AGREED).is_file()

    def save_agreement(self, round: int, base: int, agreed: "Agreed | None") -> None:
        """Save what this site has signed in a round.

        The agreement of the base round remains; all others are deleted.

        Args:
            round: The round.
            base: The round that this one continues from.
            agreed: The agreement; None if the site has signed nothing yet.
        """
        agreements = {
            str(one): asdict(each) for one in (base, round) if (each := agreed if one == round else self.agreement(one))
        }
        self._write(AGREED, {**agreements, READ: self.last_read()})

    def last_read(self) -> int:
        """Return the last round whose sum this site has helped to unmask; 0 without such a round."""
        return int(self._read(AGREED).get(READ, 0))

    def record_read(self, round: int) -> None:
        """Record that this site has helped to unmask the sum of a round."""
        self._write(AGREED, {**self._read(AGREED), READ: max(round, self.last_read())})

    def removed_masks(self) -> dict[str, int]:
        """Return the shared masks that this site has removed from its contribution.

        Returns:
            By "SITE ROUND" (the other site, and the mask's round), the round whose sum was read without this mask.
        """
        return {str(name): int(round) for name, round in self._read(LIFTED).items()}

    def save_removed_masks(self, attempt: Attempt, round: int) -> None:
        """Record that the sum of a round was read without some shared masks.

        Args:
            attempt: The attempt at the round. Its `lifts` lists the removed masks.
            round: The round whose sum was read.
        """
        if attempt.lifts:
            now = {f"{name} {one}": round for name, rounds in attempt.lifts.items() for one in rounds}
            self._write(LIFTED, self.removed_masks() | now)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.store.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError:
            raise UserError(f"{path}: is damaged; forget the site and readmit it") from None

    def _write(self, name: str, content: Mapping[Any, Any]) -> None:
        write_bytes(self.store.folder / name, json.dumps(content).encode(), private=True)
