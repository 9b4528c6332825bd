"""Describe the privacy of a run: secure aggregation, and the epsilon that the rounds have cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.sims.report.tables import Table, cut

MASKED = (
    "Secure aggregation: the server read only sums over sites, not single contributions. Anyone who knows the contributions "
    "of all other sites can compute the last one. Accuracies, losses and numbers of images were not masked."
)


def privacy_parts(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[str | Table]:
    """Return the report's paragraphs and table on privacy; empty if the run used neither masks nor noise."""
    hidden = summary.get("privacy") or {}
    parts: list[str | Table] = [MASKED] if hidden.get("secure_aggregation") else []
    spent: dict[str, tuple[float, int]] = {}
    for record in metrics:
        for site, cost in (record.get("epsilon") or {}).items():
            spent[site] = float(cost), spent.get(site, (0.0, 0))[1] + 1
    if spent:
        ordered = sorted(spent.items(), key=lambda item: (-item[1][0], item[0]))
        rows, note = cut([[site, f"{cost:.3g}", times] for site, (cost, times) in ordered], "sites")
        explanation = (
            f"Noise multiplier {hidden.get('noise', 0):g}, changes clipped to {hidden.get('clip', 0):g}, delta "
            f"{hidden.get('delta', 0):g}. Neighbouring data sets: the site sends its change, or no change. As reported by "
            f"the sites. {note}"
        )
        parts.append(Table("Differential privacy", ["site", "epsilon", "rounds"], rows, explanation.strip()))
    return parts
