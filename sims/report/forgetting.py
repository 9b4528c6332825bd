"""What subtracting each site changes: its table, and what is to be expected of it."""

from collections.abc import Mapping
from typing import Any

from fedloom.sims.report.tables import ARROW, Holders, Table, before_forgetting, cut, only_domain, percent

FALLS = "its own domain should fall, the others should stay"
STAYS = "other sites hold its domain, too, so that all domains should stay near where they were"
BOTH = "a domain that it alone held should fall; others, also those that it shares, should stay near where they were"


def caption(summary: Mapping[str, Any]) -> str:
    """What a picture of it should show, whoever shares domains."""
    holders = Holders(summary)
    shared = {bool(holders.others(site)) for site in summary.get("forgotten") or {}}
    expected = BOTH if len(shared) > 1 else STAYS if shared == {True} else FALLS
    return f"What subtracting a site changes: {expected}."


def forgetting_table(summary: Mapping[str, Any]) -> Table:
    """Test accuracy before and after each site was subtracted: on its domain, on the retained ones, on the union."""
    holders, before, several = Holders(summary), before_forgetting(summary), not only_domain(summary)
    rows = []
    for site, after in (summary.get("forgotten") or {}).items():
        domain, others = holders.home.get(site, ""), holders.others(site)
        retained = [holders.retained_mean(scores, site) for scores in (before, after)]
        rest = [_change(*retained), _change(before.get("union"), after.get("union"))] if several else []
        held = others[0] if len(others) == 1 else f"{len(others)} other sites" if others else None
        rows.append([site, domain or None, _change(before.get(domain), after.get(domain)), *rest, held])
    kept, note = cut(rows, "forgotten sites")
    shared = "A domain that another site also holds is retained." if any(row[-1] for row in kept) else ""
    rest = ["mean of retained", "union"] if several else []
    title = "Forgetting: test accuracy before" + ARROW + "after"
    columns = ["site", "domain", "own domain", *rest, "held also by"]
    return Table(title, columns, kept, " ".join(filter(None, [shared, note])))


def _change(before: float | None, after: float | None) -> str:
    return percent(before) + ARROW + percent(after)
