"""Summarise a run in a few sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.sims.report.forgotten import forgotten_sentence
from fedloom.sims.report.heads import exchanges
from fedloom.sims.report.tables import (
    Holders,
    accuracies,
    before_forgetting,
    has_aggregate,
    homes,
    mean,
    only_domain,
    percent,
)


def headline(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return a few sentences with the run's main numbers."""
    sites, done = len(homes(summary)), metrics[-1]["round"] if metrics else 0
    run = f"{summary['method']} on {sites} site{'s' if sites != 1 else ''}"
    ended = f"{summary['status']} after round {done} of {summary['rounds']}"
    before, gone = before_forgetting(summary), forgotten_sentence(summary.get("unlearned") or [])
    if before:
        union = percent(before.get("union"))
        text = f"{run}, {ended}: the aggregated network reaches {union} test accuracy on {all_domains(summary)}."
        return " ".join(filter(None, [text, gone, _forgetting_sentence(summary)]))
    if not has_aggregate(summary) and (means := next(iter(accuracies(summary).values()), {})):
        text = f"{run}, {ended}: the sites' own networks reach {percent(means.get('union'))} test accuracy on"
        return " ".join(filter(None, [f"{text} {all_domains(summary)}, on average.", _exchange_sentence(summary), gone]))
    last = next((record["accuracy"].get("union") for record in reversed(metrics) if record.get("accuracy")), None)
    watched = f"; the last validation accuracy on the union was {percent(last)}" if last is not None else ""
    return f"{run}, {ended}: test accuracy was not measured{watched}. {gone}".strip()


def _exchange_sentence(summary: Mapping[str, Any]) -> str:
    """Return the accuracy of exchanged heads, with that of the baselines; empty without another site."""
    matrices = [matrix for matrix in exchanges(summary) if matrix.exchanged is not None]
    if not matrices:
        return ""
    first, *others = matrices
    text = f"With their own heads, extractors reach {percent(first.own)}; with other sites' heads {percent(first.exchanged)}"
    baselines = ", ".join(f"{matrix.method} {percent(matrix.exchanged)}" for matrix in others)
    return f"{text}{f' ({baselines})' if baselines else ''}. A site sends {percent(first.share)} of FedAvg's traffic."


def _forgetting_sentence(summary: Mapping[str, Any]) -> str:
    """Return the effect of forgetting, over the sites that alone hold their domain (over all, if no site does)."""
    forgotten, before = summary.get("forgotten") or {}, before_forgetting(summary)
    holders = Holders(summary)
    alone = {site: after for site, after in forgotten.items() if not holders.others(site)}
    counted = alone or forgotten
    if not counted:
        return ""
    own_before, kept_before = _own_and_retained(holders, dict.fromkeys(counted, before))
    own_after, kept_after = _own_and_retained(holders, counted)
    start = f"Forgetting {next(iter(counted))}" if len(counted) == 1 else f"Forgetting a site (mean of {len(counted)})"
    stay = f"accuracy on the retained domains goes from {percent(kept_before)} to {percent(kept_after)} on average"
    own = f"goes from {percent(own_before)} to {percent(own_after)}"
    if not alone and (domain := only_domain(summary)):
        return f"{start}: accuracy on {domain}, which other sites also hold, {own}."
    if not alone:
        return f"{start}: {stay}; each forgotten domain is also held by another site."
    return f"{start}: accuracy on its own domain {own}; {stay}."


def _own_and_retained(holders: Holders, scores: Mapping[str, Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Return the mean accuracy over sites on the site's own domain, and on the domains retained without the site."""
    own = mean([row.get(holders.home.get(site, "")) for site, row in scores.items()])
    return own, mean([holders.retained_mean(row, site) for site, row in scores.items()])


def all_domains(summary: Mapping[str, Any]) -> str:
    """Return the name of the test domain, or "the union of all domains"."""
    return only_domain(summary) or "the union of all domains"
