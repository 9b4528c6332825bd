"""What a site remembers over all of its runs: what its rounds have cost, and over which sites its sums were read.

One SQLite file in the site's own store. The server's names of runs and sites do not lead to it, and no request erases it:
otherwise a server could start from nothing again. Every change is one transaction: processes do not overtake each other.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clients.sketch import ALIKE, likeness
from conf.errors import UserError

FILE = "memory.sqlite"
WAIT = 60.0  # seconds for another process
MOST_NAMED = 5  # sites, in a message
TABLES = """
create table if not exists spent (site text, noise real, rounds integer, primary key (site, noise));
create table if not exists sums (site text, run text, round integer, counted text, leaving text, sketch blob);
create index if not exists sums_of on sums (site);
create table if not exists keys (site text primary key, key blob);
"""


class SummedBeforeError(UserError):
    """The site's training of this round was summed over other sites already; with other batches it may be summed again."""

    def __init__(self, text: str, round: int) -> None:
        super().__init__(text)
        self.round = round


@dataclass(frozen=True)
class Disclosure:
    """A sum that is about to be read: of a run's round, over these sites. `sketch` (float32 [n]): of this site's change.

    `leaving`: sites that are forgotten in this round, whose common masks are taken out. `idle`: nobody trains in it.
    """

    run: str
    round: int
    counted: Sequence[str]
    sketch: NDArray[np.float32]
    leaving: Sequence[str] = ()
    idle: bool = False


@dataclass(frozen=True)
class Memory:
    """The memory in the folder of a site's store. `site`: its name in a simulation, whose sites share a folder."""

    root: Path
    site: str = ""
    _path: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_path", self.root / FILE)

    def spend(self, noise: float, check: Callable[[Mapping[float, int]], None]) -> dict[float, int]:
        """Count one more round with this noise multiplier; all rounds by their noise. `check` may refuse (UserError)."""
        with self._opened() as db:
            times = self._spent(db)
            times[noise] = times.get(noise, 0) + 1
            check(times)
            rows = [(self.site, each, count) for each, count in times.items()]
            db.executemany("insert or replace into spent values (?, ?, ?)", rows)
        return times

    def key(self) -> bytes:
        """16 bytes that nobody else has: sketches depend on them."""
        with self._opened() as db:
            db.execute("insert or ignore into keys values (?, ?)", (self.site, os.urandom(16)))
            return bytes(db.execute("select key from keys where site = ?", (self.site,)).fetchone()[0])

    def check(self, disclosure: Disclosure) -> None:
        """Raise SummedBeforeError if the difference of this sum and an earlier one would be about what a few sites gave."""
        with self._opened() as db:
            self._check(db, disclosure)

    def add(self, disclosure: Disclosure) -> None:
        """Check, and note that the sum is read."""
        with self._opened() as db:
            self._check(db, disclosure)
            lists = ("\n".join(sorted(names)) for names in (disclosure.counted, disclosure.leaving))
            row = (self.site, disclosure.run, disclosure.round, *lists, disclosure.sketch.tobytes())
            db.execute("insert into sums values (?, ?, ?, ?, ?, ?)", row)

    def _spent(self, db: sqlite3.Connection) -> dict[float, int]:
        """Rounds by noise; of a store of an earlier version, whose budgets were files, what those say."""
        rows = list(db.execute("select noise, rounds from spent where site = ?", (self.site,)))
        for file in () if rows else sorted((self.root / "privacy").glob(f"{self.site or '*'}.json")):
            try:
                rows += [(noise, count) for noise, count in json.loads(file.read_text(encoding="utf-8")).items()]
            except (ValueError, AttributeError):
                raise UserError(f"{file}: cannot be read; it says what this site has spent of its privacy") from None
        times: dict[float, int] = {}
        for noise, count in rows:
            times[float(noise)] = times.get(float(noise), 0) + int(count)
        return times

    def _check(self, db: sqlite3.Connection, disclosure: Disclosure) -> None:
        rows = list(
            db.execute("select run, round, counted, leaving, sketch from sums where site = ? order by rowid", (self.site,))
        )
        left = {number: set(leaving.split("\n")) for run, number, _, leaving, _ in rows if run == disclosure.run}
        if (last := max(left, default=0)) > disclosure.round:
            raise UserError(f"secure aggregation: round {disclosure.round} is over: round {last} of the run was summed")
        left.setdefault(disclosure.round, set(disclosure.leaving))
        before = [set(counted.split("\n")) for run, _, counted, _, _ in rows if run == disclosure.run][-1:]
        if disclosure.idle and any(absent - set(disclosure.counted) - set(disclosure.leaving) for absent in before):
            raise UserError("secure aggregation: where nobody trains, all must count that counted last, or leave")
        for run, number, counted, _, sketch in rows:
            apart = set(counted.split("\n")) ^ set(disclosure.counted)
            if run == disclosure.run:  # a site that was forgotten since is in no sum any more
                apart -= set().union(*(names for later, names in left.items() if later > number))
            if apart and likeness(np.frombuffer(sketch, np.float32), disclosure.sketch) > ALIKE:
                names = ", ".join(sorted(apart)[:MOST_NAMED])
                text = (
                    f"secure aggregation: what this site has trained was summed in round {number} of '{run}', "
                    f"and {names} would be in one of two sums only; their difference tells what these gave"
                )
                raise SummedBeforeError(text, disclosure.round)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """One transaction. UserError for a file that cannot be read: nothing leaves the site without it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)) as db:
                db.executescript(TABLES)
                db.execute("begin immediate")
                try:
                    yield db
                    db.execute("commit")
                except BaseException:
                    db.execute("rollback")
                    raise
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{self._path}: cannot be used ({error}); without it the site discloses nothing: mend the disk, or put the "
                "file back from a copy"
            ) from None
