"""What the ledger's tests share: contributions that follow from site and round, and a plain model of what is committed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Contribution, Ledger
from fedloom.server.ledger.audit import Problem, check

SITES = ("a", "b", "c", "d")
CONFIG = "seed: 1\nname: 'größer'\n"


def given(site: str, round: int) -> State:
    """What a site contributes in a round: more tensors than the sum has, and entries that fill int64's upper bits."""
    seed = torch.Generator().manual_seed(1000 * round + ord(site[0]))
    draw = {"w": (3, 2), "bias": (4,), "own": (2,)}
    return {name: torch.randint(-(2**55), 2**55, shape, generator=seed) for name, shape in draw.items()}


@dataclass
class Plain:
    """What a ledger must say, kept in dicts."""

    keep: str = "latest"
    round: int = -1
    rounds: dict[str, list[int]] = field(default_factory=lambda: {site: [] for site in SITES})
    forgotten: set[str] = field(default_factory=set)

    def here(self) -> list[str]:
        return [site for site in SITES if site not in self.forgotten]

    def total(self) -> State:
        states = [given(site, self.rounds[site][-1]) for site in self.here() if self.rounds[site]]
        zero = {"w": torch.zeros(3, 2, dtype=torch.int64), "bias": torch.zeros(4, dtype=torch.int64)}
        return {name: sum((state[name] for state in states), start) for name, start in zero.items()}

    def commit(self, ledger: Ledger, sites: Iterable[str]) -> None:
        self.round += 1
        gave = {site: contribution(ledger, site, self.round) for site in sites}
        for site in gave:
            self.rounds[site] = [*(self.rounds[site] if self.keep == "all" else []), self.round]
        ledger.commit_round(self.round, gave, *self.states(ledger), {"round": self.round}, self.keep)

    def forget(self, ledger: Ledger, sites: Iterable[str], request: str | None = None) -> None:
        sites = list(sites)
        self.forgotten |= set(sites)
        self.rounds |= {site: [] for site in sites}
        ledger.forget(sites, *self.states(ledger), {"why": "asked"}, request)

    def readmit(self, ledger: Ledger, sites: Iterable[str]) -> None:
        sites = list(sites)
        self.forgotten -= set(sites)
        self.rounds |= {site: [self.round] for site in sites}
        gave = {site: contribution(ledger, site, self.round) for site in sites}
        ledger.readmit(sites, gave, *self.states(ledger))

    def states(self, ledger: Ledger) -> tuple[dict[str, str], dict[str, str]]:
        total = self.total()
        shared = {"head": torch.full((2,), self.round + 0.5)}
        return {"sum": ledger.blobs.put(total), "shared": ledger.blobs.put(shared)}, {"sum": digest(total)}

    def agrees(self, ledger: Ledger) -> None:
        """Assert that the ledger says the same."""
        assert ledger.sites() == {site: site in self.forgotten for site in SITES}
        assert {site: [one.round for one in ledger.history(site)] for site in SITES} == self.rounds
        latest = ledger.all_latest()
        assert list(latest) == [site for site in SITES if self.rounds[site]]
        for site, one in latest.items():
            assert one == ledger.latest(site)
            assert digest(ledger.blobs.get(one.blob)) == digest(given(site, one.round))
        last = ledger.last_round()
        assert (last.round if last else -1) == self.round
        if last:
            assert last.record == {"round": self.round}
            assert digest(ledger.blobs.get(last.states["sum"])) == digest(self.total()) == last.digest["sum"]


def contribution(ledger: Ledger, site: str, round: int) -> Contribution:
    return Contribution(ledger.blobs.put(given(site, round)), samples=10, round=round, bits=32)


def new(folder: Path) -> Ledger:
    """An empty ledger, with the configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return Ledger.create(folder, "digits", CONFIG, 32, SITES)


def closed(folder: Path, rounds: int = 2, keep: str = "latest") -> Plain:
    """A ledger with some rounds, closed."""
    plain = Plain(keep)
    with new(folder) as ledger:
        for _ in range(rounds + 1):
            plain.commit(ledger, SITES if plain.round < 0 else SITES[:2])
    return plain


def problems(folder: Path) -> list[Problem]:
    """What check finds, notes left out."""
    return [problem for problem in check(folder) if problem.severity == "problem"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files, but for SQLite's index of its log and the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", ".lock"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
