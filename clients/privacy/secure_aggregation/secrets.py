"""What a site keeps for secure aggregation, in its own store: the secrets of the round under way, and the keys of its masks.
Nobody else ever reads it.
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
    """A round whose list of sites a site has signed. `statement`: what determined the training; `counted`: the sites."""

    statement: str = ""
    counted: list[str] = field(default_factory=list)

    @property
    def digest(self) -> bytes:
        """32 bytes, the same for all sites that have signed the same."""
        return hashlib.sha256(json.dumps([self.statement, self.counted]).encode()).digest()


@dataclass
class Attempt:
    """One attempt at a round: this site's four secrets, and what it heard from others (all bytes as hex).

    `channel`: of the key pair that seals shares; `pair`: of the one that common masks follow from; `own`: of the mask that
    is this site's alone; `signing`: of the key of its signatures. `order`: what all steps of it have in common.
    `threshold`: how many must answer. `peers`: every site's public keys. `held`: others' shares for this site. `shares`: its
    share of its own secret `own`. `statement`: what determined its training; `bases`: by site, the round that it goes on
    from; `sketches`: of what the server does not know of its contribution; `config`: a digest of what was
    configured. `counted`: the sites whose contributions count, as it has signed.
    `lifts`: by site that leaves, the rounds whose common masks it has taken out. `idle`: nobody trains in this round.
    `sent`, `unmasked`: it has sent its masked contribution, and has helped to take masks off. Each is done once, for two
    that differ under one mask would tell the difference. Secrets are shared out once, too (then there are `peers`): of a
    second round of shares, enough could be asked for the other secret.
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
    config: str = ""
    counted: list[str] = field(default_factory=list)
    lifts: dict[str, list[int]] = field(default_factory=dict)
    idle: bool = False
    sent: bool = False
    unmasked: bool = False

    @staticmethod
    def begin(id: str, order: str) -> "Attempt":
        """A new one, its secrets drawn."""
        channel, pair, own, signing = (secret().hex() for _ in range(4))
        return Attempt(id, channel, pair, own, signing, order)

    def public(self) -> PublicKeys:
        """What this site tells the others of its secrets."""
        channel, pair, own, signing = map(bytes.fromhex, (self.channel, self.pair, self.own, self.signing))
        return PublicKeys(public_key(channel), public_key(pair), commitment(own), signing_key(signing))

    def keys(self, site: str) -> PublicKeys:
        """A site's public keys."""
        return PublicKeys.read(bytes.fromhex(self.peers[site]))


@dataclass(frozen=True)
class Secrets:
    """The files of one site in one run."""

    store: SiteStore

    def attempt(self, id: str) -> Attempt:
        """The attempt under way. UserError if it is another one."""
        found = self._read(ROUND)
        if found.get("id") != id:
            raise UserError("order.secure: is not the attempt at a round that this site has begun")
        try:
            return Attempt(**found)
        except TypeError:
            raise UserError(
                "order.secure: this attempt was begun by another version of fedloom; begin the round again"
            ) from None

    def save(self, attempt: Attempt) -> None:
        """Keep an attempt in place of the one before."""
        self._write(ROUND, asdict(attempt))

    def masks(self) -> dict[int, dict[str, bytes]]:
        """By round and site, the key of the mask that both had in common."""
        return {int(round): {site: bytes.fromhex(key) for site, key in keys.items()}
                for round, keys in self._read(KEYS).items()}  # fmt: skip

    def masked(self, round: int, keys: Mapping[str, bytes]) -> None:
        """Keep the keys of a round's masks, in place of those of an earlier attempt at it; later ones never counted."""
        kept = {number: one for number, one in self.masks().items() if number < round} | {round: dict(keys)}
        self._write(KEYS, {number: {site: key.hex() for site, key in one.items()} for number, one in kept.items()})

    def moved(self, round: int) -> dict[str, Sketch]:
        """By record and tensor, the sketch of how far it moved in a round; of the last two rounds."""
        return unpacked(self._read(MOVED).get(str(round), {}))

    def keep_moved(self, round: int, base: int, sketches: Mapping[str, Sketch]) -> None:
        """Save them, beside those of the round that this one is based on, and of rounds that are agreed on."""
        numbers = {base, *(int(one) for one in self._read(AGREED) if one != READ)} - {round}
        self._write(MOVED, {**{str(one): packed(self.moved(one)) for one in numbers}, str(round): packed(sketches)})

    def agreed(self, round: int) -> "Agreed | None":
        """What this site has agreed on in a round; None if it has sent something else in that round since, or nothing."""
        found = self._read(AGREED).get(str(round))
        return Agreed(**found) if found else None

    def is_new(self) -> bool:
        """Whether the site has sent nothing of the run yet, or its store was lost."""
        return not (self.store.folder / AGREED).is_file()

    def agree(self, round: int, base: int, agreed: "Agreed | None") -> None:
        """Save what is agreed on in a round (None: nothing yet), beside that of the round that it is based on."""
        kept = {str(one): asdict(each) for one in (base, round) if (each := agreed if one == round else self.agreed(one))}
        self._write(AGREED, {**kept, READ: self.last_read()})

    def last_read(self) -> int:
        """The last round in which this site has helped to take masks off; 0: none."""
        return int(self._read(AGREED).get(READ, 0))

    def read(self, round: int) -> None:
        """Note that the sum of a round is read."""
        self._write(AGREED, {**self._read(AGREED), READ: max(round, self.last_read())})

    def lifted(self) -> dict[str, int]:
        """By 'SITE ROUND', in which round a sum was read without the mask in common with that site, of that round."""
        return {str(name): int(round) for name, round in self._read(LIFTED).items()}

    def keep_lifted(self, attempt: Attempt, round: int) -> None:
        """Note that the sum of an attempt is read, in which masks were taken out."""
        if attempt.lifts:
            now = {f"{name} {one}": round for name, rounds in attempt.lifts.items() for one in rounds}
            self._write(LIFTED, self.lifted() | now)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.store.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError:
            raise UserError(f"{path}: is damaged; the site must be forgotten and readmitted") from None

    def _write(self, name: str, content: Mapping[Any, Any]) -> None:
        write_bytes(self.store.folder / name, json.dumps(content).encode(), private=True)
