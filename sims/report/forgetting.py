"""Describe what subtracting each site changes: a table, and the caption of its plot."""

from collections.abc import Mapping
from typing import Any

from fedloom.conf.metrics import Facts
from fedloom.server.run_folder.scores import metric_of
from fedloom.sims.report.tables import ARROW, Holders, Table, before_forgetting, cut, only_domain, titled

FALLS = "{metric} on its own domain should {fall}, {metric} on the others should stay"
STAYS = "other sites also hold its domain, so {metric} should stay about the same on all domains"
BOTH = "{metric} should {fall} on a domain that only this site held, and stay about the same on all others"


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
    kept, note = cut(rows, "forgotten sites")
    shared = "A domain that another site also holds counts as retained." if any(row[-1] for row in kept) else ""
    rest = ["mean of retained", "union"] if several else []
    title = f"Forgetting: test {metric.title} before{ARROW}after"
    whose = "whole domain" if all(row[-1] for row in rows) else "own domain"
    columns = ["site", "domain", whose, *rest, "also held by"]
    if not any(row[-1] for row in rows):
        columns, kept = columns[:-1], [row[:-1] for row in kept]
    return Table(title, columns, kept, " ".join(filter(None, [shared, note])))


def _change(metric: Facts, before: float | None, after: float | None) -> str:
    return metric.text(before) + ARROW + metric.text(after)
