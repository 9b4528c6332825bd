"""Requests in sequence: sites leave by subtraction only, compared with networks trained without them."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.clients.data import label
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.experiments.unlearning.shadows import LEAVER, METHODS, SETTING, Looker, configured, opened
from fedloom.sims.report.tables import Table

LEAVING = (LEAVER, "kept-1", "kept-2")  # in this order


def tables(study: Study) -> list[Table]:
    rows = []
    for method, options in METHODS.items():
        results = study.saved_each(f"sequence-{method}", [SETTING, options, LEAVING], partial(left, method))
        rows += [_row(method, number, [result[number] for result in results]) for number in range(len(LEAVING) + 1)]
    head = ["method", "sites that left", "their angles", "retrained", "the others' angles", "retrained"]
    note = "Sites are subtracted in sequence, without training in between. Accuracy in %, mean over the angles on each side."
    return [study.table("Requests one after the other", head, rows, note)]


def left(method: str, seed: int) -> list[dict[str, dict[str, float]]]:
    """Return after each request the accuracy on both sides, of the subtracted and of the retrained network."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = configured(method, seed, folder / "run")
        with opened(config) as run:
            looker, gone = Looker(config, run.train().method.evaluator), [LEAVING[:number] for number in range(4)]
            results = [{"subtract": sides(looker, run.model(), [])}]
            for names in gone[1:]:
                run.method.state.forget([names[-1]], {})
                results.append({"subtract": sides(looker, run.model(), names)})
        for names, shares in zip(gone[1:], results[1:], strict=True):
            with opened(configured(method, seed, folder / f"without-{len(names)}"), names) as run:
                shares["retrained"] = sides(looker, run.train().model(), names)
    return results


def sides(looker: Looker, model: Any, gone: Sequence[str]) -> dict[str, float]:
    """Return the mean accuracy on the test images of the sites that left, and of the other sites."""
    shares = looker.evaluator.accuracy(model, "test")
    of = {site.name: shares[label(site.spec)] for site in looker.config.roster}
    left, stay = [of[name] for name in gone], [share for name, share in of.items() if name not in gone]
    return {"left": sum(left) / max(1, len(left)), "stay": sum(stay) / len(stay)}


def _row(method: str, number: int, results: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    row = [method, str(number)]
    for side in ("left", "stay"):
        for way in ("subtract", "retrained"):
            there = way in results[0] and (number or side == "stay")
            row += means(results, (way, side)) if there else [""]
    return row
