"""Which sites a run has forgotten, by which requests, and where their certificates are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.database import LEDGER, begun
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.sims.report.tables import Cell, Link, Table, cut

UNCERTIFIED = "not yet: fedloom resume goes on with it"


@dataclass(frozen=True)
class Forgotten:
    """A site that was taken out; of the request and its time only what is known, `page` from the run's folder."""

    site: str
    request: str = ""
    time: str = ""
    page: str = ""

    def row(self) -> list[Cell]:
        """Its line in a table."""
        certificate = Link(self.page, self.page) if self.page else UNCERTIFIED if self.request else None
        return [self.site, self.request or None, self.time[:19].replace("T", " ") or None, certificate]


def forgotten_sites(folder: Path, summary: Mapping[str, Any]) -> list[Forgotten]:
    """The sites that are forgotten by now, as the run's ledger says; without one that can be read, as the summary does."""
    try:
        return _of_ledger(folder) if begun(folder / LEDGER) else _of_summary(summary)
    except UserError:
        return _of_summary(summary)


def forgotten_table(found: list[Forgotten]) -> Table:
    """Who was forgotten, by which request, when, and what certifies it."""
    rows, note = cut([one.row() for one in found], "forgotten sites")
    return Table("Forgotten on request", ["site", "request", "forgotten at (UTC)", "certificate"], rows, note)


def forgotten_sentence(names: list[str]) -> str:
    """For a report's first lines; empty if no site is forgotten."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    were, them = ("was", "it") if len(names) == 1 else ("were", "them")
    told = f"{', '.join(names[:3])}{more} {were} forgotten on request: the networks are without {them}"
    return f"{told}, rounds before that are shown as they were." if names else ""


def _of_ledger(folder: Path) -> list[Forgotten]:
    with Ledger.open(folder, server=False) as ledger:
        last = {site: event for event in ledger.events("forgotten") for site in event.body["sites"]}
        gone = [site for site, is_forgotten in ledger.sites().items() if is_forgotten]
    found = []
    for site in gone:
        request = last[site].body.get("request") or ""
        page = Path(CERTIFICATES) / f"{request}.html"
        found.append(Forgotten(site, request, last[site].time, str(page) if (folder / page).is_file() else ""))
    return found


def _of_summary(summary: Mapping[str, Any]) -> list[Forgotten]:
    return [Forgotten(site) for site in summary.get("unlearned") or []]
