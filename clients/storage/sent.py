"""A site's copy of its contributions, in the server's integers. With masks or noise, the next round starts from them.

The site's contribution (TaskInstructions.slot) has its own file. The other records share one file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedloom.clients.protocol.failures import LostStateError
from fedloom.clients.storage.states import read_own_state, write_own_state
from fedloom.clients.storage.store import SiteStore
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

SUMMED, OTHERS = "summed", "sent"  # prefixes of file names


@dataclass(frozen=True)
class Sent:
    """What one site has sent in one run. All tensors are int64, in units of 2**-scale_bits.

    Attributes:
        store: The site's store for this run.
    """

    store: SiteStore

    def summed(self, round: int) -> State:
        """Return the site's contribution to the server's sum after a round. Raises LostStateError if it is missing."""
        return self._read(SUMMED, round)

    def save(self, round: int, base: int, contribution: State) -> None:
        """Save the contribution of a round. The one of the base round remains; all others are deleted.

        Args:
            round: The round.
            base: The round that this one continues from, whose contribution this one replaces in the sum.
            contribution: The contribution as the server sums it.
        """
        self._write(SUMMED, round, base, contribution)

    def records(self, round: int) -> dict[str, State]:
        """Return the other records of a round, by name. Raises LostStateError if they are missing."""
        records: dict[str, State] = {}
        for name, tensor in self._read(OTHERS, round).items():
            record, _, tensor_name = name.partition("/")
            records.setdefault(record, {})[tensor_name] = tensor
        return records

    def save_records(self, round: int, base: int, records: Mapping[str, State]) -> None:
        """Save the other records of a round, by name. Those of the base round remain; all others are deleted.

        Args:
            round: The round.
            base: The round that this one continues from.
            records: The tensors of each record.
        """
        joined = {f"{record}/{name}": tensor for record, state in records.items() for name, tensor in state.items()}
        self._write(OTHERS, round, base, joined)

    def _read(self, kind: str, round: int) -> State:
        path = self._path(kind, round)
        if not path.is_file():
            raise LostStateError(f"{self.store.site}: its contribution of round {round} is lost, and no copy exists", round)
        try:
            return read_own_state(path)
        except UserError as error:
            text = f"{self.store.site}: its contribution of round {round} is lost, and no copy exists: {error}"
            raise LostStateError(text, round) from None

    def _write(self, kind: str, round: int, base: int, state: State) -> None:
        write_own_state(self._path(kind, round), state)
        for path in self.store.folder.glob(f"{kind}-*.safetensors"):
            if path not in (self._path(kind, round), self._path(kind, base)):
                path.unlink()

    def _path(self, kind: str, round: int) -> Path:
        return self.store.folder / f"{kind}-{round:06d}.safetensors"
