"""What each site last contributed, as quantised integers in the run's ledger: the only thing that grows with the sites.

A round's contributions are written one by one as they arrive and become valid together, when the ledger commits the round.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.states import round_file
from conf.errors import UserError
from fusion.exact import State
from server.ledger import Contribution, Ledger

STAGING = "staging"  # workers that add up contributions write them here


@dataclass
class Contributions:
    """The contributions of one run. `latest`: of each site that is not forgotten, the last committed one."""

    ledger: Ledger
    bits: int
    history: str = "latest"
    latest: dict[str, Contribution] = field(init=False)
    _staged: dict[str, Contribution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.latest = self.ledger.all_latest()

    @property
    def staging(self) -> Path:
        """Where workers write (clients.states.round_file)."""
        return self.ledger.folder / STAGING

    def load(self, site: str) -> State:
        """The site's committed contribution (int64)."""
        return self.ledger.blobs.get(self.latest[site].blob)

    def file(self, site: str) -> Path:
        """Where it is kept."""
        return self.ledger.blobs.path(self.latest[site].blob)

    def stage(self, site: str, round: int, quantised: State, samples: int, like: str | None = None) -> None:
        """Write a contribution that counts once the round is committed; `like`: a staged site's that it is equal to."""
        same = self._staged.get(like or "")
        self._staged[site] = Contribution(same.blob if same else self.ledger.blobs.put(quantised), samples, round, self.bits)

    def stage_written(self, site: str, round: int, samples: int) -> None:
        """Stage a contribution whose file a worker has written already. UserError if it has not: it is in the sum by now."""
        path = round_file(self.staging, site, round)
        if not path.is_file():
            raise UserError(f"{path}: was not written; federation.partial_sums needs workers that have the server's disk")
        self._staged[site] = Contribution(self.ledger.blobs.adopt(path), samples, round, self.bits)

    def commit(self, round: int, states: Mapping[str, State], digest: Mapping[str, str], record: dict[str, Any]) -> None:
        """Make the staged contributions and the server's states the valid ones, in one step."""
        blobs = {name: self.ledger.blobs.put(state) for name, state in states.items()}
        self.ledger.commit_round(round, self._staged, blobs, digest, record, self.history)
        self.latest.update(self._staged)
        self._staged = {}

    def abandon(self) -> None:
        """Forget what was staged since the last commit, and what workers wrote; blobs go with the next prune."""
        self._staged = {}
        shutil.rmtree(self.staging, ignore_errors=True)
