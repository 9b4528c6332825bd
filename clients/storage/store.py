"""The site's store: its state after each round, on its own disk. The server and other sites never read it.

States are stored by run, site and round. A repeated round therefore starts from the same state. The states of a run belong
to one objective: under another one, a server could have a site send the parts that it does not share.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedloom.clients.protocol.failures import LostStateError, RefusedError
from fedloom.clients.storage.states import read_own_state, round_file, write_bytes, write_own_state
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

OBJECTIVE = "objective"  # file with the digest of the objective whose states the folder has
_ROUND = re.compile(r"round-(\d+)\.safetensors")


@dataclass(frozen=True)
class SiteStore:
    """The states of one site in one run, in the folder root/run/site.

    `objective`: a digest of the objective's options; empty: states of any objective are loaded.
    """

    root: Path
    run: str
    site: str
    objective: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the site's files."""
        return self.root / self.run / self.site

    def load(self, round: int) -> State:
        """Return the state after `round`.

        Raises LostStateError if it is missing (and names the others) or damaged, and RefusedError if it is of another
        objective.
        """
        self._check_objective()
        path = self._path(round)
        if not path.exists():
            have = ", ".join(map(str, self.rounds())) or "none"
            raise LostStateError(
                f"{self.site}: its own state after round {round} is lost ({self.folder} has rounds: {have})", round
            )
        try:
            return read_own_state(path)
        except UserError as error:
            raise LostStateError(f"{self.site}: its own state after round {round} is lost: {error}", round) from None

    def save(self, round: int, base: int, state: Mapping[str, Tensor]) -> None:
        """Save the state after `round`, and delete the states of earlier rounds, except round `base`.

        Raises RefusedError if the others are of another objective.
        """
        if self.objective and not self._check_objective():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.folder / OBJECTIVE, self.objective.encode("ascii"))
        write_own_state(self._path(round), state)
        for other in self.rounds():
            if other < round and other != base:
                self._path(other).unlink()

    def rounds(self) -> list[int]:
        """Return the rounds whose states are stored, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _ROUND.fullmatch(path.name)))

    def erase(self) -> tuple[int, int]:
        """Delete all files of the site in the run and its baselines. Returns the number of files and of bytes."""
        runs = [self.root / self.run, *self.root.glob(f"{self.run}-*")]
        folders = [run / self.site for run in runs if (run / self.site).is_dir()]
        sizes = [path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()]
        for folder in folders:
            shutil.rmtree(folder)
        return len(sizes), sum(sizes)

    def _check_objective(self) -> bool:
        """Return whether the objective of the stored states is on record. Raises RefusedError if it is another one."""
        file = self.folder / OBJECTIVE
        if not (self.objective and file.is_file()):
            return False
        if file.read_text(encoding="ascii") != self.objective:
            raise RefusedError("objective: is not the one with which this site's own state of the run was trained; "
                               "start a new run for another objective")  # fmt: skip
        return True

    def _path(self, round: int) -> Path:
        return round_file(self.root / self.run, self.site, round)
