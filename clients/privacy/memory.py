"""What a site remembers over all its runs: the privacy cost of its rounds, and the sites of each sum that was read.

One SQLite file in the site's own store. It does not depend on the server's names of runs and sites, and no request
erases it. Otherwise a server could reset it. Every change is one transaction, so processes do not conflict.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.clients.data.standardise import STATISTICS
from fedloom.clients.privacy.draws import repeated
from fedloom.clients.privacy.sketch import ALIKE, Sketch, likeness, packed, unpacked
from fedloom.clients.protocol.failures import SummedBeforeError
from fedloom.conf.errors import UserError

FILE = "memory.sqlite"
WAIT = 60.0  # seconds for another process
MOST_NAMED = 5  # sites, in a message
TABLES = """
create table if not exists spent (site text, noise real, rounds integer, primary key (site, noise));
create table if not exists sums (site text, run text, round integer, counted text, beside text, first integer, leaving text,
  config text, sketches text, draws text);
create index if not exists sums_of on sums (site);
create table if not exists keys (site text primary key, key blob);
create table if not exists begun (site text, run text, round integer, primary key (site, run));
"""  # plain: ignore


@dataclass(frozen=True)
class Disclosure:
    """A sum over sites that the server is about to read.

    Attributes:
        run: The run.
        round: The round.
        counted: The sites of the sum.
        same_base: Those of the sites that continue from the same round as this one.
        first: Whether no site continues from a round: all start from what the server sends.
        config: A digest of the configuration.
        sketches: By summed record, a sketch of what the server does not know about this site's contribution.
        leaving: Sites that are forgotten in this round, whose common masks are removed.
        idle: Whether no site trains in this round.
        draws: Digests of the images that this site drew (clients.privacy.draws).
    """

    run: str
    round: int
    counted: Sequence[str]
    same_base: Sequence[str]
    first: bool
    config: str
    sketches: Mapping[str, Sketch]
    leaving: Sequence[str] = ()
    idle: bool = False
    draws: Sequence[str] = ()


@dataclass(frozen=True)
class Memory:
    """A site's memory, a database in the folder `root`. `site`: its name in a simulation, where sites share a folder."""

    root: Path
    site: str = ""
    _path: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_path", self.root / FILE)

    def spend(self, noise: float, check: Callable[[Mapping[float, int]], None]) -> dict[float, int]:
        """Count one more round with this noise multiplier. Returns all rounds by noise, unless `check` of them raises."""
        with self._opened() as db:
            times = self._spent(db)
            times[noise] = times.get(noise, 0) + 1
            check(times)
            rows = [(self.site, each, count) for each, count in times.items()]
            db.executemany("insert or replace into spent values (?, ?, ?)", rows)
        return times

    def begin(self, run: str, round: int) -> bytes:
        """Record the start of a masked round, and return 16 secret bytes, on which sketches depend.

        Raise UserError if a later round of the run has started. A server could change a site's base between two sums.
        """
        with self._opened() as db:
            last = db.execute("select round from begun where site = ? and run = ?", (self.site, run)).fetchone()
            if last and last[0] > round:
                raise UserError(f"secure aggregation: round {round} is over: round {last[0]} of the run has begun")
            db.execute("insert or replace into begun values (?, ?, ?)", (self.site, run, round))
            db.execute("insert or ignore into keys values (?, ?)", (self.site, os.urandom(16)))
            return bytes(db.execute("select key from keys where site = ?", (self.site,)).fetchone()[0])

    def check(self, disclosure: Disclosure) -> None:
        """Raise SummedBeforeError if this sum minus an earlier one would reveal approximately what a few sites sent."""
        with self._opened() as db:
            self._check(db, disclosure)

    def add(self, disclosure: Disclosure) -> None:
        """Record that the server reads this sum. Raises the errors of `check` if it may not."""
        with self._opened() as db:
            self._check(db, disclosure)
            counted, same_base, leaving = (
                "\n".join(sorted(names)) for names in (disclosure.counted, disclosure.same_base, disclosure.leaving)
            )
            row = (self.site, disclosure.run, disclosure.round, counted, same_base, disclosure.first, leaving)
            row = (*row, disclosure.config, json.dumps(packed(disclosure.sketches)), "\n".join(disclosure.draws))
            db.execute(f"insert into sums values ({', '.join('?' * len(row))})", row)

    def _spent(self, db: sqlite3.Connection) -> dict[float, int]:
        """Return rounds by noise. A store of an earlier version has budgets in files; read those."""
        rows = list(db.execute("select noise, rounds from spent where site = ?", (self.site,)))
        for file in () if rows else sorted((self.root / "privacy").glob(f"{self.site or '*'}.json")):
            try:
                rows += [(noise, count) for noise, count in json.loads(file.read_text(encoding="utf-8")).items()]
            except (ValueError, AttributeError):
                raise UserError(f"{file}: cannot be read; it records what this site has spent of its privacy") from None
        times: dict[float, int] = {}
        for noise, count in rows:
            times[float(noise)] = times.get(float(noise), 0) + int(count)
        return times

    def _check(self, db: sqlite3.Connection, disclosure: Disclosure) -> None:
        before = self._before(db)
        own = [past for past in before if past.run == disclosure.run]
        left = {past.round: set(past.leaving) for past in own}
        if (last := max(left, default=0)) > disclosure.round:
            raise UserError(f"secure aggregation: round {disclosure.round} is over: round {last} of the run was summed")
        left.setdefault(disclosure.round, set(disclosure.leaving))
        trained = [past for past in own if STATISTICS not in past.sketches]
        if disclosure.idle and any(set(past.counted) - {*disclosure.counted, *disclosure.leaving} for past in trained[-1:]):
            raise UserError("secure aggregation: if no site trains, all sites of the last sum must count again, or leave")
        for past in before:
            later = [names for number, names in left.items() if number > past.round] if past.run == disclosure.run else []
            apart, others = _apart(past, disclosure, gone := set().union(*later)), _others(past, disclosure) - gone
            alike = apart and likeness(past.sketches, disclosure.sketches) > ALIKE
            if alike or (apart and repeated(past.draws, disclosure.draws, whole=bool(others))):
                text = f"what this site has trained was summed in round {past.round} of '{past.run}', {apart}"
                raise SummedBeforeError(
                    f"secure aggregation: {text}; the difference of the two sums would reveal what a few sites sent",
                    disclosure.round,
                )

    def _before(self, db: sqlite3.Connection) -> list[Disclosure]:
        """Return the sums that were read, oldest first."""
        columns = "run, round, counted, beside, first, config, sketches, leaving, draws"  # plain: ignore
        query = f"select {columns} from sums where site = ? order by rowid"
        return [
            Disclosure(run, round, counted.split("\n"), same_base.split("\n"), bool(first), config,
                       unpacked(json.loads(sketches)), leaving.split("\n"), draws=(draws or "").split())
            for run, round, counted, same_base, first, config, sketches, leaving, draws in db.execute(query, (self.site,))
        ]  # fmt: skip

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open one transaction. Raise UserError for an unreadable file: without it nothing leaves the site."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)) as db:
                db.executescript(TABLES)
                db.execute("begin immediate")
                if "draws" not in {row[1] for row in db.execute("pragma table_info(sums)")}:  # of an earlier version
                    db.execute("alter table sums add column draws text")
                try:
                    yield db
                    db.execute("commit")
                except BaseException:
                    db.execute("rollback")
                    raise
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{self._path}: cannot be used ({error}); without it the site discloses nothing: repair the disk, or "
                "restore the file from a copy"
            ) from None


def _apart(before: Disclosure, now: Disclosure, gone: set[str]) -> str:
    """Return how two sums differ in what only some sites sent, as text; empty if they do not.

    `gone`: sites that were forgotten in between.
    """
    if some := _others(before, now) - gone:
        return f"and {_named(some)} would be in only one of two sums"
    if some := (set(before.same_base) ^ set(now.same_base)) - gone:
        return f"where {_named(some)} did not continue from the same round as now"
    if before.config != now.config:
        return "by another configuration, under which a few sites could train differently"
    if before.run != now.run and not (before.first and now.first):
        return "another run, in which some sites could continue from something else"
    return ""


def _others(before: Disclosure, now: Disclosure) -> set[str]:
    """Return the sites that are in only one of two sums."""
    return set(before.counted) ^ set(now.counted)


def _named(sites: set[str]) -> str:
    return ", ".join(sorted(sites)[:MOST_NAMED])
