"""List the sites that a run has forgotten, with their requests and certificates."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.database import LEDGER, begun
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.sims.report.tables import Cell, Link, Table, cut

UNCERTIFIED = "not yet; `fedloom resume` completes it"


@dataclass(frozen=True)
class Forgotten:
    """A forgotten site. `request`, `time`, `page` and `part` are empty where unknown.

    `page` is relative to the run's folder. `part`: "COLUMN=VALUE" of a site that has the rows of a table with this value.
    """

    site: str
    request: str = ""
    time: str = ""
    page: str = ""
    part: str = ""

    @property
    def title(self) -> str:
        """The site's name in tables."""
        return f"{self.site} ({self.part})" if self.part else self.site

    def row(self) -> list[Cell]:
        """Return the site's row in `forgotten_table`."""
        certificate = Link(self.page, self.page) if self.page else UNCERTIFIED if self.request else None
        return [self.title, self.request or None, self.time[:19].replace("T", " ") or None, certificate]


def forgotten_sites(folder: Path, summary: Mapping[str, Any]) -> list[Forgotten]:
    """Return the sites that are forgotten now, according to the ledger or, without a readable ledger, the summary."""
    try:
        return _of_ledger(folder) if begun(folder / LEDGER) else _of_summary(summary)
    except UserError:
        return _of_summary(summary)


def forgotten_table(found: list[Forgotten]) -> Table:
    """Return a table of forgotten sites with request, time and certificate."""
    rows, note = cut([site.row() for site in found], "forgotten sites")
    return Table("Forgotten on request", ["site", "request", "forgotten at (UTC)", "certificate"], rows, note)


def forgotten_sentence(names: list[str]) -> str:
    """Return a sentence that names the forgotten sites, for a report's first lines; empty without any."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    were, them = ("was", "it") if len(names) == 1 else ("were", "them")
    sentence = f"{', '.join(names[:3])}{more} {were} forgotten on request: the networks are without {them}"
    return f"{sentence}. Results of earlier rounds still include {them}." if names else ""


def _of_ledger(folder: Path) -> list[Forgotten]:
    with Ledger.open(folder, server=False) as ledger:
        last = {site: event for event in ledger.events("forgotten") for site in event.body["sites"]}
        gone = [site for site, is_forgotten in ledger.sites().items() if is_forgotten]
    forgotten = []
    for site in gone:
        request = last[site].body.get("request") or ""
        page = Path(CERTIFICATES) / f"{request}.html"
        part = _parts(folder / page.with_suffix(".json")).get(site, "")
        forgotten.append(Forgotten(site, request, last[site].time, str(page) if (folder / page).is_file() else "", part))
    return forgotten


def _parts(certificate: Path) -> dict[str, str]:
    with contextlib.suppress(UserError):
        return read(certificate).get("parts", {})
    return {}


def _of_summary(summary: Mapping[str, Any]) -> list[Forgotten]:
    return [Forgotten(site) for site in summary.get("unlearned") or []]
