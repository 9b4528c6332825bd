"""What each site last contributed, as quantised integers on the server's disk: the only thing that grows with the sites.

A round's contributions are staged one by one as they arrive and become valid together, when `committed.json` is replaced.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.states import read_state, round_file, write_bytes, write_state
from fusion.exact import State


@dataclass
class Contributions:
    """The contributions of one run, in `folder`. `latest` maps a site to the round of its last committed one."""

    folder: Path
    latest: dict[str, int] = field(default_factory=dict)
    _staged: dict[str, int] = field(default_factory=dict)

    def load(self, site: str) -> State | None:
        """The site's committed contribution (int64; the shared state: float32), None if it never made one."""
        return read_state(self._path(site, self.latest[site])) if site in self.latest else None

    def stage(self, site: str, round: int, quantised: State) -> None:
        """Write a contribution that counts once the round is committed."""
        write_state(self._path(site, round), quantised)
        self.stage_written(site, round)

    def stage_written(self, site: str, round: int) -> None:
        """Stage a contribution whose file a worker has written already. Raises FileNotFoundError if it has not."""
        if not self._path(site, round).is_file():
            raise FileNotFoundError(f"{self._path(site, round)} was not written")
        self._staged[site] = round

    def commit(self, round: int, **facts: Any) -> None:
        """Make the staged contributions the valid ones, in one step; then remove those they replace."""
        old = {site: self.latest[site] for site in self._staged if site in self.latest}
        self.latest.update(self._staged)
        self._staged = {}
        content = {"round": round, "latest": self.latest, **facts}
        write_bytes(self.folder / "committed.json", json.dumps(content, indent=1).encode())
        for site, round_before in old.items():
            if round_before != self.latest[site]:
                self._path(site, round_before).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove what was staged since the last commit."""
        for site, round in self._staged.items():
            if round != self.latest.get(site):
                self._path(site, round).unlink(missing_ok=True)
        self._staged = {}

    def _path(self, site: str, round: int) -> Path:
        return round_file(self.folder, site, round)
