"""Collect the tables of a run's results."""

from typing import Any

from fedloom.server.run_folder.scores import headline
from fedloom.sims.report.forgetting import forgetting_table
from fedloom.sims.report.heads import exchanges, heads_table
from fedloom.sims.report.selection import methods_table, selections
from fedloom.sims.report.tables import Table, accuracy_table, at_sites_table, costs_table


def result_tables(summary: dict[str, Any]) -> list[Table]:
    """Return a table for each kind of result in a run's summary."""
    tables = [accuracy_table(summary)] if headline(summary) else []
    tables += [at_sites_table(summary)] if summary.get("at_sites") else []
    tables += [costs_table(summary)] if summary.get("costs") else []
    tables += [heads_table(matrices)] if (matrices := exchanges(summary)) else []
    tables += [methods_table(chosen)] if (chosen := selections(summary)) else []
    return [*tables, forgetting_table(summary)] if summary.get("forgotten") else tables
