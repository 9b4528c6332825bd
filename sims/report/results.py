"""Read a run's results from its summary, and make tables of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.conf.sites import BEST, PERSONAL
from fedloom.server.run_folder.scores import headline, metric_of
from fedloom.sims.report.tables import Table, cut, percent

MAX_DOMAINS = 12


def domains(summary: Mapping[str, Any]) -> list[str]:
    """Return the domains with test accuracies, in the order of the summary, without `union`."""
    found = {name: None for scores in accuracies(summary).values() for name in scores}
    return [name for name in found if name != "union"]


def only_domain(summary: Mapping[str, Any]) -> str:
    """Return the domain of all test accuracies if there is only one (it equals the union), else an empty text."""
    names = domains(summary)
    rows = [row for row in accuracies(summary).values() if "union" in row]
    return names[0] if len(names) == 1 and all(row.get(names[0]) == row["union"] for row in rows) else ""


def columns_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the columns of test accuracies: the domains, and the union if there are several."""
    return domains(summary) if only_domain(summary) else [*domains(summary), "union"]


def accuracies(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the first metric by network and domain: first the aggregate, then the baselines, then the sites' own networks.

    A method without an aggregate is listed by its mode, with the mean of its sites' networks.
    """
    scores, sites, first = dict(headline(summary)), homes(summary), aggregate(summary)
    own, mode = [scores[name] for name in scores if name in sites], str(summary.get("method")).rpartition("/")[2]
    if own and not has_aggregate(summary) and mode not in scores:
        first = mode
        scores[mode] = {key: sum(row[key] for row in own) / len(own) for key in own[0] if all(key in row for row in own)}
    return {name: scores[name] for name in sorted(scores, key=lambda name: (name != first, name in sites))}


def has_aggregate(summary: Mapping[str, Any]) -> bool:
    """Return whether the method has one network for all sites."""
    return summary.get("aggregate") != ""


def aggregate(summary: Mapping[str, Any]) -> str:
    """Return the aggregated network's name among the test accuracies; empty if it was not measured.

    In summaries without this name, it is the first network that is not a site's.
    """
    scores, sites = headline(summary), homes(summary)
    recorded = str(summary.get("aggregate"))
    if recorded in scores or not has_aggregate(summary):
        return recorded
    return next((name for name in scores if name not in sites), "")


def homes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each site's domain, by the site's name."""
    return {site["name"]: site["domain"] for site in summary.get("sites") or []}


def titled(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each site's name with the value of the column that divides a table among sites, if there is one."""
    parts = {site["name"]: site.get("part") for site in summary.get("sites") or []}
    return {name: f"{name} ({part})" if part else name for name, part in parts.items()}


def before_forgetting(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the test accuracies by domain of the aggregated network, which contains all sites."""
    return accuracies(summary).get(aggregate(summary), {})


def shown(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the test accuracies by domain of the network that the run keeps: the best one, if it has one, or the last."""
    return accuracies(summary).get(BEST, {}) if summary.get(BEST) else before_forgetting(summary)


def which(summary: Mapping[str, Any]) -> str:
    """Return which network `shown` is about, "best, round 7"; empty for the last one."""
    return f"{BEST}, round {best['round']}" if (best := summary.get(BEST)) else ""


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None or NaN; None without any."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else None


class Holders:
    """Which sites of a run have which domain. Build it once for each summary, because there may be many sites.

    Attributes:
        home: The domain of each site, by the site's name.
    """

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self.home = homes(summary)
        self._domains = domains(summary)
        self._sites: dict[str, list[str]] = {}
        for site, domain in self.home.items():
            self._sites.setdefault(domain, []).append(site)

    def others(self, site: str) -> list[str]:
        """Return the other sites with the same domain as `site`."""
        return [name for name in self._sites.get(self.home.get(site, ""), []) if name != site]

    def retained(self, site: str) -> list[str]:
        """Return the domains that remain in the federation without `site`: all, except one that only `site` has."""
        lost = None if self.others(site) else self.home.get(site)
        return [name for name in self._domains if name != lost]

    def retained_mean(self, scores: Mapping[str, float], site: str) -> float | None:
        """Return the mean accuracy on the domains that remain in the federation without `site` (see `retained`).

        Args:
            scores: The accuracy on each domain.
            site: The site to leave out.

        Returns:
            The mean; None if no remaining domain has a score.
        """
        return mean([scores.get(name) for name in self.retained(site)])


def accuracy_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the first metric of aggregate, baselines and sites' own networks on every domain."""
    sites, columns, several = homes(summary), domains(summary), not only_domain(summary)
    first, metric, titles = columns[:MAX_DOMAINS], metric_of(summary), {**titled(summary), BEST: which(summary) or BEST}
    rows = []
    for name, scores in accuracies(summary).items():
        cells = [_marked(metric.text(scores.get(domain)), domain == sites.get(name)) for domain in first]
        rows.append([titles.get(name, name), *cells, *([metric.text(scores.get("union"))] if several else [])])
    kept, note = cut(rows, "networks")
    starred = "* the site's own domain" if sites.keys() & accuracies(summary).keys() else ""
    mark = "; ".join(filter(None, [starred, "union: test examples of all domains together" if several else ""]))
    few = f"The first {MAX_DOMAINS} of {len(columns)} domains are shown." if len(columns) > len(first) else ""
    means = "Methods without an aggregated network: mean over the sites' own networks."
    means = means if starred and not has_aggregate(summary) else ""
    own = PERSONAL in accuracies(summary)
    own_tests = "each on its own site's test examples; all these examples have the same weight"
    at_home = f"{PERSONAL}: the sites' own networks, {own_tests}."
    personal = at_home if own else ""
    best = "best: chosen by validation examples; the other networks are those of the last round." if which(summary) else ""
    notes = " ".join(filter(None, [f"{mark}." if mark else "", means, best, personal, note, few]))
    return Table(f"Test {metric.title}", ["network", *first, *(["union"] if several else [])], kept, notes)


def at_sites_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the mean accuracy of the networks that sites use (server.evaluation.per_client_metrics)."""
    rows = [[name, *(percent(scores.get(key)) for key in ("own", "lacking", "union"))]
            for name, scores in summary["at_sites"].items()]  # fmt: skip
    note = (
        "Means over sites, each with the shared network of its architecture, else its own. own test: the site's domain, "
        "classes as frequent as at the site; classes it lacks: classes without images at the site; all: all domains."
    )
    return Table("At the sites", ["method", "own test", "classes it lacks", "all"], rows, note)


def costs_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of each network's size, traffic and time (server.evaluation.per_client_metrics)."""
    rows = [[name, cost["sites"], cost["parameters"], _megabytes(cost.get("bytes")), f"{1e3 * cost['seconds']:.1f}"]
            for name, cost in summary["costs"].items()]  # fmt: skip
    columns = ["network", "sites", "parameters", "MB per site and round", "ms for 1,000 images"]
    return Table("Cost of the networks", columns, rows, "MB: sent and received. ms: measured on the server's machine.")


def traffic_table(metrics: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return, as a list, a table of each site's mean MB per round, both ways; no table if no round has recorded bytes."""
    rounds: dict[str, list[tuple[int, int]]] = {}
    for record in metrics:
        for site, both in (record.get("bytes") or {}).items():
            rounds.setdefault(site, []).append(both)
    rows = [[site, len(each), *(sum(pair[direction] for pair in each) / len(each) / 1e6 for direction in (0, 1))]
            for site, each in sorted(rounds.items())]  # fmt: skip
    if len(rows) > 2 and all(row[1:] == rows[0][1:] for row in rows):
        rows = [[f"each of {len(rows)}", *rows[0][1:]]]
    kept, few = cut(rows, "sites")
    explanation = "Data per round and site. What goes to several sites counts for each, even if the engine sends it once."
    columns = ["site", "rounds", "to the site", "from the site"]
    return [Table("Traffic per round, MB", columns, kept, f"{explanation} {few}".strip())] if rows else []


def _megabytes(number: int | None) -> float | None:
    return None if number is None else round(number / 1e6, 3)


def _marked(value: str, own: bool) -> str:
    return f"* {value}" if own else value
