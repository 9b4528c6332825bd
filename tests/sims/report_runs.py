"""Runs with made-up results, for tests of reports."""

import json
from pathlib import Path
from typing import Any


def results(sites: int, names: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics and summary of a made-up run: each network is good at home (0.9) and bad elsewhere (0.2)."""
    roster = [{"name": f"site-{i:04d}", "domain": names[i % len(names)], "samples": 100} for i in range(sites)]
    alone = sites <= len(names)

    def scores(home: float, away: float, domain: str) -> dict[str, float]:
        found = {name: home if name == domain else away for name in names}
        return {**found, "union": sum(found.values()) / len(names)}

    accuracy = {site["name"]: scores(0.9, 0.2, site["domain"]) for site in roster}
    summary = {
        "experiment": "digits", "method": "sum_aggregation/exact", "seed": 0, "rounds": 3, "engine": "inline",
        "seconds": 6.5, "sites": roster, "status": "finished", "aggregate": "sum", "digest": {"sum": "ab" * 32},
        "accuracy": {**accuracy, "independent": scores(0.7, 0.7, ""), "sum": scores(0.8, 0.8, "")},
        "forgotten": {site["name"]: scores(0.1 if alone else 0.8, 0.75, site["domain"]) for site in roster},
        "checks": {"commutative": True, "subtraction_exact": True},
    }  # fmt: skip
    line = {"seconds": 2.0, "train_loss": 0.5, "replies": sites, "dropped": {}}
    return [{"round": r, **line, "accuracy": scores(0.2 * r, 0.2 * r, "")} for r in (1, 2, 3)], summary


def write_run(folder: Path, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("experiment: digits\nnote: <b>bold</b>\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder
