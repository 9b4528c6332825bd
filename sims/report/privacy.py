"""What of a run's sites was hidden, and what their rounds have cost of their privacy."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.sims.report.tables import Table, cut

MASKED = (
    "Under secure aggregation: the server read sums over sites, and no site's contribution. Whoever knows the sum of all "
    "others' knows the last one's; accuracies, losses and numbers of images travelled in the clear."
)


def privacy_parts(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[str | Table]:
    """Paragraphs and a table for the report; none if nothing was hidden."""
    hidden = summary.get("privacy") or {}
    parts: list[str | Table] = [MASKED] if hidden.get("secure_aggregation") else []
    spent: dict[str, tuple[float, int]] = {}
    for record in metrics:
        for site, cost in (record.get("epsilon") or {}).items():
            spent[site] = float(cost), spent.get(site, (0.0, 0))[1] + 1
    if spent:
        ordered = sorted(spent.items(), key=lambda one: (-one[1][0], one[0]))
        rows, note = cut([[site, f"{cost:.3g}", times] for site, (cost, times) in ordered], "sites")
        told = (
            f"Noise multiplier {hidden.get('noise', 0):g}, changes clipped to {hidden.get('clip', 0):g}, delta "
            f"{hidden.get('delta', 0):g}; neighbours: the site sends its changes, or none. By the sites' own word. {note}"
        )
        parts.append(Table("Differential privacy", ["site", "epsilon", "rounds"], rows, told.strip()))
    return parts
