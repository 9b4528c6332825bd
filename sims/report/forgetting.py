"""Describe what subtracting each site changes, and list the sites that a run has forgotten, with their certificates."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.metrics import Facts
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.database import LEDGER, begun
from fedloom.server.run_folder.scores import metric_of
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.sims.report.results import Holders, before_forgetting, only_domain, titled
from fedloom.sims.report.tables import ARROW, Cell, Link, Table, cut, when

FALLS = "{metric} on its own domain should {fall}, {metric} on the others should stay"
STAYS = "other sites also hold its domain, so {metric} should stay about the same on all domains"
BOTH = "{metric} should {fall} on a domain that only this site held, and stay about the same on all others"
UNCERTIFIED = "not yet; `fedloom resume` completes it"


def caption(summary: Mapping[str, Any]) -> str:
    """Return the caption of forgetting.png: what it should show, which depends on whether sites share domains."""
    holders = Holders(summary)
    shared = {bool(holders.others(site)) for site in summary.get("forgotten") or {}}
    expected = BOTH if len(shared) > 1 else STAYS if shared == {True} else FALLS
    metric = metric_of(summary)
    what = expected.format(metric=metric.title, fall="fall" if metric.higher_is_better else "rise")
    return f"Effect of subtracting a site: {what}."


def forgetting_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the first metric before and after subtracting each site: on its domain, the others and the union."""
    holders, before, several = Holders(summary), before_forgetting(summary), not only_domain(summary)
    metric, titles, rows = metric_of(summary), titled(summary), []
    for site, after in (summary.get("forgotten") or {}).items():
        domain, others = holders.home.get(site, ""), holders.others(site)
        retained = [holders.retained_mean(scores, site) for scores in (before, after)]
        rest = [_change(metric, *retained), _change(metric, before.get("union"), after.get("union"))] if several else []
        held = others[0] if len(others) == 1 else f"{len(others)} other sites" if others else None
        rows.append(
            [titles.get(site, site), domain or None, _change(metric, before.get(domain), after.get(domain)), *rest, held]
        )
    kept, note = cut(rows, "sites")
    shared = (
        "If another site has the same domain, forgetting this site does not lose the domain."
        if any(row[-1] for row in kept)
        else ""
    )
    rest = ["other domains, mean", "union"] if several else []
    title = f"Forgetting: test {metric.title} before{ARROW}after"
    whose = "whole domain" if all(row[-1] for row in rows) else "own domain"
    columns = ["site", "domain", whose, *rest, "also held by"]
    if not any(row[-1] for row in rows):
        columns, kept = columns[:-1], [row[:-1] for row in kept]
    return Table(title, columns, kept, " ".join(filter(None, [shared, note])))


def _change(metric: Facts, before: float | None, after: float | None) -> str:
    return metric.text(before) + ARROW + metric.text(after)


@dataclass(frozen=True)
class Forgotten:
    """A forgotten site. All fields but `site` are empty where unknown.

    `page` is relative to the run's folder. `part`: "COLUMN=VALUE" of a site that has the rows of a table with this value.
    `shown`: whether measurements show that the network has forgotten the site: yes, no, or not measurable. `round`: the
    last round before it was forgotten.
    """

    site: str
    request: str = ""
    time: str = ""
    page: str = ""
    part: str = ""
    shown: str = ""
    round: int | None = None

    @property
    def title(self) -> str:
        """The site's name in tables."""
        return f"{self.site} ({self.part})" if self.part else self.site

    def row(self) -> list[Cell]:
        """Return the site's row in `forgotten_table`."""
        certificate = Link(self.page, self.page) if self.page else UNCERTIFIED if self.request else None
        return [self.title, self.request or None, when(self.time) if self.time else None, self.shown or None, certificate]


def forgotten_sites(folder: Path, summary: Mapping[str, Any]) -> list[Forgotten]:
    """Return the sites that are forgotten now, according to the ledger or, without a readable ledger, the summary."""
    try:
        return _of_ledger(folder) if begun(folder / LEDGER) else _of_summary(summary)
    except UserError:
        return _of_summary(summary)


def by_round(found: Iterable[Forgotten]) -> dict[int, str]:
    """Return the names of the sites that were forgotten after a round, by the round."""
    names: dict[int, list[str]] = {}
    for site in found:
        if site.round is not None:
            names.setdefault(site.round, []).append(site.site)
    return {round: _few(sites) for round, sites in names.items()}


def forgotten_table(found: list[Forgotten]) -> Table:
    """Return a table of forgotten sites: request, time, whether measurements show that they are forgotten, certificate."""
    rows, note = cut([site.row() for site in found], "forgotten sites")
    return Table(
        "Forgotten on request",
        ["site", "request", "forgotten at (UTC)", "do measurements confirm it?", "certificate"],
        rows,
        note,
    )


def forgotten_sentence(names: list[str], traces: Mapping[str, str], known: Sequence[str] = ()) -> str:
    """Return sentences that name the forgotten sites, for a report's first lines; empty without any.

    `traces`: where they may have left traces, each with the reason. `known`: those that the network has not forgotten,
    according to the certificates' measurements.
    """
    were, them, their = ("was", "it", "its") if len(names) == 1 else ("were", "them", "their")
    sentence = f"{_few(names)} {were} forgotten on request: {their} contributions are removed."
    not_forgotten = f" But measurements show that the network has not forgotten {_few(known)}." if known else ""
    left = "".join(f" Traces may remain in {place}: {reason}." for place, reason in traces.items())
    return f"{sentence}{not_forgotten}{left} Results of earlier rounds still include {them}." if names else ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_ledger(folder: Path) -> list[Forgotten]:
    with Ledger.open(folder, server=False) as ledger:
        last = {site: event for event in ledger.events("forgotten") for site in event.body["sites"]}
        gone = [site for site, is_forgotten in ledger.sites().items() if is_forgotten]
    forgotten = []
    for site in gone:
        request = last[site].body.get("request") or ""
        page = Path(CERTIFICATES) / f"{request}.html"
        done = _certificate(folder / page.with_suffix(".json"))
        part, seen = done.get("parts", {}).get(site, ""), _shown(done)
        here = str(page) if (folder / page).is_file() else ""
        before = last[site].body.get("body")
        round = before.get("round") if isinstance(before, dict) else None
        forgotten.append(Forgotten(site, request, last[site].time, here, part, seen, round))
    return forgotten


def _shown(certificate: Mapping[str, Any]) -> str:
    from fedloom.server.unlearning.readings import SHOWN  # imported only here: most reports do not need it

    return (certificate.get("readings") or {}).get(SHOWN, "")


def _certificate(path: Path) -> dict[str, Any]:
    with contextlib.suppress(UserError):
        return read(path)
    return {}


def _of_summary(summary: Mapping[str, Any]) -> list[Forgotten]:
    return [Forgotten(site) for site in summary.get("unlearned") or []]
