"""Summarise a run: in a few sentences, and for the terminal in closing lines and tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.conf.metrics import facts_of
from fedloom.server.run_folder.scores import SCORES, as_headline, metric_of
from fedloom.server.run_folder.scores import headline as headline_of
from fedloom.sims.report.forgetting import forgetting_table, forgotten_sentence
from fedloom.sims.report.heads import exchanges, heads_table
from fedloom.sims.report.results import (
    Holders,
    accuracies,
    accuracy_table,
    at_sites_table,
    before_forgetting,
    costs_table,
    has_aggregate,
    homes,
    mean,
    only_domain,
    shown,
)
from fedloom.sims.report.selection import methods_table, selections
from fedloom.sims.report.tables import Table, clean, percent

MOST_NAMED, ENOUGH = 5, 5  # classes in a warning; test examples of a class that may be in it
FAR, GOOD = 0.5, 0.5  # a class is named if its share of right answers is at most FAR of the others', which is at least GOOD


def headline(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], known: Sequence[str] = ()) -> str:
    """Return a few sentences with the run's main numbers.

    `known`: the forgotten sites that the network has not forgotten, according to the certificates.
    """
    sites, done = len(homes(summary)), metrics[-1]["round"] if metrics else 0
    run = f"{summary['method']} on {sites} site{'s' if sites != 1 else ''}"
    ended = f"{summary['status']} after round {done} of {summary['rounds']}"
    metric = metric_of(summary, metrics)
    gone = forgotten_sentence(summary.get("unlearned") or [], summary.get("traces") or {}, known)
    before = shown(summary)
    if before:
        best = summary.get("best")
        union, worst = metric.text(before.get("union")), "" if best else worst_class(summary)
        name = f"network of round {best['round']}, the best on validation examples," if best else "aggregated network"
        text = f"{run}, {ended}: the {name} reaches {union} test {metric.title} on {all_domains(summary)}{worst}."
        return " ".join(filter(None, [text, gone, _forgetting_sentence(summary)]))
    if not has_aggregate(summary) and (means := next(iter(accuracies(summary).values()), {})):
        text = f"{run}, {ended}: the sites' own networks reach {metric.text(means.get('union'))} test {metric.title} on"
        average = f"{text} {all_domains(summary)}, on average{worst_class(summary)}."
        return " ".join(filter(None, [average, _exchange_sentence(summary), gone]))
    last = next((values.get("union") for record in reversed(metrics) if (values := headline_of(record))), None)
    watched = f"; the last validation {metric.title} on the union was {metric.text(last)}" if last is not None else ""
    return f"{run}, {ended}: test {metric.title} was not measured{watched}. {gone}".strip()


def worst_class(summary: Mapping[str, Any]) -> str:
    """Return ", but class `NAME` R of N" if the network is right far less often on one class than on the others.

    Counts the answers on the sites' own test examples. A class with so few images that chance explains it is not named.
    """
    by_role = summary.get("per_site") or {}
    classes = (by_role.get("aggregate") or by_role.get("own") or {}).get("classes") or {}
    counts = {name: (right, images) for name, (right, images) in classes.items() if images}
    if len(counts) < 2:
        return ""
    name = min(counts, key=lambda name: (counts[name][0] / counts[name][1], -counts[name][1]))
    right, images = counts[name]
    rest = [sum(numbers) for numbers in zip(*(both for other, both in counts.items() if other != name), strict=True)]
    share = rest[0] / rest[1]
    noise = 2 * math.sqrt(max(share * (1 - share), 1 / (rest[1] + 2)) / images)
    if share < GOOD or right / images > min(FAR * share, share - noise):
        return ""
    title = clean(str((summary.get("class_names") or {}).get(name, name)))
    return f", but class `{title}` {right} of {images}"


def never_predicted(summary: Mapping[str, Any]) -> str:
    """Return a warning about classes or labels that no test example is predicted to have; empty without any."""
    by_role = summary.get("per_site") or {}
    result = by_role.get("aggregate") or by_role.get("own") or {}
    union, known = result.get("union") or {}, summary.get("class_names") or {}
    unseen = [name for name, (right, images) in (result.get("classes") or {}).items() if images >= ENOUGH and not right]
    numbers = [str(number) for number in union.get("never_predicted", unseen)]
    if not numbers:
        return ""
    kind = ("class", "classes") if result.get("classes") else ("label", "labels")
    names = ", ".join(f"`{clean(str(known.get(number, number)))}`" for number in numbers[:MOST_NAMED])
    names = f"{kind[len(numbers) > 1]} {names}"
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    if "never_predicted" not in union:  # only right answers were counted
        return f"Warning: no test example of {names}{more} is recognised."
    return f"Warning: {names}{more} {'is' if len(numbers) == 1 else 'are'} never predicted on the test examples."


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
    metric = metric_of(summary)
    stay = f"{metric.title} on the retained domains goes from {metric.text(kept_before)} to {metric.text(kept_after)}"
    stay = f"{stay} on average"
    own = f"goes from {metric.text(own_before)} to {metric.text(own_after)}"
    if not alone and (domain := only_domain(summary)):
        return f"{start}: {metric.title} on {domain}, which other sites also hold, {own}."
    if not alone:
        return f"{start}: {stay}; each forgotten domain is also held by another site."
    return f"{start}: {metric.title} on its own domain {own}; {stay}."


def _own_and_retained(holders: Holders, scores: Mapping[str, Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Return the first metric's mean over sites on the site's own domain, and on the domains retained without the site."""
    own = mean([row.get(holders.home.get(site, "")) for site, row in scores.items()])
    return own, mean([holders.retained_mean(row, site) for site, row in scores.items()])


def all_domains(summary: Mapping[str, Any]) -> str:
    """Return the name of the test domain, or "the union of all domains"."""
    return only_domain(summary) or "the union of all domains"


def result_tables(summary: dict[str, Any]) -> list[Table]:
    """Return a table for each kind of result in a run's summary."""
    tables = [accuracy_table(summary)] if headline_of(summary) else []
    tables += [at_sites_table(summary)] if summary.get("at_sites") else []
    tables += [costs_table(summary)] if summary.get("costs") else []
    tables += [heads_table(matrices)] if (matrices := exchanges(summary)) else []
    tables += [methods_table(chosen)] if (chosen := selections(summary)) else []
    return [*tables, forgetting_table(summary)] if summary.get("forgotten") else tables


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines for the end of a run: all metrics, if there are several, and a warning about classes."""
    return [line for line in (_metrics_line(summary), never_predicted(summary)) if line]


def _metrics_line(summary: Mapping[str, Any]) -> str:
    """Return the configured metrics of the first network, on all domains together; empty for a single metric."""
    if len(scores := summary.get(SCORES) or {}) < 2 or not (name := next(iter(accuracies(summary)), "")):
        return ""
    rows = {metric: accuracies({**summary, **as_headline(summary, table)}).get(name, {}) for metric, table in scores.items()}
    values = ", ".join(f"{facts_of(metric).title} {facts_of(metric).text(row.get('union'))}" for metric, row in rows.items())
    return f"{name}, test on {all_domains(summary)}: {values}"
