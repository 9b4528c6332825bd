"""Collect a run's results for the terminal: closing lines, and tables."""

from collections.abc import Mapping
from typing import Any

from fedloom.conf.metrics import facts_of
from fedloom.server.run_folder.scores import SCORES, as_headline, headline
from fedloom.sims.report.forgetting import forgetting_table
from fedloom.sims.report.headline import all_domains, never_predicted
from fedloom.sims.report.heads import exchanges, heads_table
from fedloom.sims.report.selection import methods_table, selections
from fedloom.sims.report.tables import Table, accuracies, accuracy_table, at_sites_table, costs_table


def result_tables(summary: dict[str, Any]) -> list[Table]:
    """Return a table for each kind of result in a run's summary."""
    tables = [accuracy_table(summary)] if headline(summary) else []
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
