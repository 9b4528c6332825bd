"""What a site keeps for secure aggregation, in its own store: the secrets of the round under way, the keys of its masks, and
its contribution as it was summed. Nobody else ever reads it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clients.states import read_state, write_bytes, write_state
from clients.store import LostStateError, SiteStore
from conf.errors import UserError
from fusion.exact import State

ROUND, KEYS, TOLD = "secure-round.json", "secure-keys.json", "secure-told.json"


@dataclass
class Attempt:
    """One attempt at a round: this site's three secrets, and what it heard from others (all bytes as hex).

    `channel`: of the key pair that seals shares; `pair`: of the one that common masks follow from; `own`: of the mask that
    is this site's alone. `threshold`: how many must answer. `peers`: every site's public keys. `held`: others' shares for
    this site. `shares`: its share of its own secret `own`. `sent`, `unmasked`: it has sent its masked contribution, and has
    helped to take masks off: each is done once, for two that differ under one mask would tell the difference. Secrets are
    shared out once, too (then there are `peers`): of a second round of shares, enough could be asked for the other secret.
    `leaving`: masks in common with a site that leaves are taken out in it.
    """

    id: str
    channel: str
    pair: str
    own: str
    threshold: int = 0
    peers: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    shares: str = ""
    sent: bool = False
    unmasked: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Secrets:
    """The files of one site in one run."""

    store: SiteStore

    def attempt(self, id: str) -> Attempt:
        """The attempt under way. UserError if it is another one."""
        found = self._read(ROUND)
        if found.get("id") != id:
            raise UserError("order.secure: is not the attempt at a round that this site has begun")
        return Attempt(**found)

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

    def tell(self, round: int, counted: Sequence[str]) -> None:
        """Note over whom a round's sum is told. UserError if it was told over others: the two would tell what these gave."""
        before = self._read(TOLD)
        if before.get("round") == round and before["counted"] != sorted(counted):
            apart = sorted(set(before["counted"]) ^ set(counted))
            raise UserError(f"secure aggregation: this round's sum was told already, and {', '.join(apart)} would be in one "
                            "of two sums only; resume when the same sites are there")  # fmt: skip
        self._write(TOLD, {"round": round, "counted": sorted(counted)})

    def summed(self, round: int) -> State:
        """This site's contribution as it was summed after a round (int64). LostStateError if it is not there."""
        if not self._contribution(round).is_file():
            told = f"{self.store.site}: what it gave in round {round} is lost, and nobody else can know it"
            raise LostStateError(told, round)
        return read_state(self._contribution(round))

    def keep(self, round: int, base: int, contribution: State) -> None:
        """Keep the contribution of a round, and the one that it replaces; older ones go."""
        write_state(self._contribution(round), contribution)
        for path in self.store.folder.glob("summed-*.safetensors"):
            if path not in (self._contribution(round), self._contribution(base)):
                path.unlink()

    def _contribution(self, round: int) -> Path:
        return self.store.folder / f"summed-{round:06d}.safetensors"

    def _read(self, name: str) -> dict[str, Any]:
        path = self.store.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError:
            raise UserError(f"{path}: is damaged; the site must be forgotten and readmitted") from None

    def _write(self, name: str, content: Mapping[Any, Any]) -> None:
        write_bytes(self.store.folder / name, json.dumps(content).encode(), private=True)
