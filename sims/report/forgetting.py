"""Describe what subtracting each site changes: a table, and the caption of its plot."""

from collections.abc import Mapping
from typing import Any

from fedloom.sims.report.tables import ARROW, Holders, Table, before_forgetting, cut, only_domain, percent

FALLS = "accuracy on its own domain should fall, accuracy on the others should stay"
STAYS = "other sites also hold its domain, so accuracy should stay about the same on all domains"
BOTH = "accuracy should fall on a domain that only this site held, and stay about the same on all others"


def caption(summary: Mapping[str, Any]) -> str:
    """Return the caption of forgetting.png: what it should show, which depends on whether sites share domains."""
    holders = Holders(summary)
    shared = {bool(holders.others(site)) for site in summary.get("forgotten") or {}}
    expected = BOTH if len(shared) > 1 else STAYS if shared == {True} else FALLS
    return f"Effect of subtracting a site: {expected}."


def forgetting_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of accuracy before and after subtracting each site: its domain, the retained ones and the union."""
    holders, before, several = Holders(summary), before_forgetting(summary), not only_domain(summary)
    rows = []
    for site, after in (summary.get("forgotten") or {}).items():
        domain, others = holders.home.get(site, ""), holders.others(site)
        retained = [holders.retained_mean(scores, site) for scores in (before, after)]
        rest = [_change(*retained), _change(before.get("union"), after.get("union"))] if several else []
        held = others[0] if len(others) == 1 else f"{len(others)} other sites" if others else None
        rows.append([site, domain or None, _change(before.get(domain), after.get(domain)), *rest, held])
    kept, note = cut(rows, "forgotten sites")
    shared = "A domain that another site also holds counts as retained." if any(row[-1] for row in kept) else ""
    rest = ["mean of retained", "union"] if several else []
    title = "Forgetting: test accuracy before" + ARROW + "after"
    columns = ["site", "domain", "own domain", *rest, "also held by"]
    return Table(title, columns, kept, " ".join(filter(None, [shared, note])))


def _change(before: float | None, after: float | None) -> str:
    return percent(before) + ARROW + percent(after)
