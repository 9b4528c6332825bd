"""Other methods that share a part of networks: own tasks, missing classes, exchanged heads, bytes."""

from collections.abc import Sequence
from typing import Any

from fedloom.clients.objectives.components.sharing import COMPATIBLE, SHARING
from fedloom.sims.experiments.components.analyses import NOTE
from fedloom.sims.experiments.components.methods import ALL, DCC, PULLS, WAYS
from fedloom.sims.experiments.components.runs import each, first_task, shown
from fedloom.sims.experiments.components.sizes import Settings
from fedloom.sims.experiments.plots import dots
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.page import Part, Picture

LACKED = ([0, 1], [2, 3])  # classes of which the first and the second site have no images
METHODS: dict[str, dict[str, Any]] = {
    **{f"shared heads: {name}, {column}": WAYS[name].pulled(pull) for name in (DCC, ALL) for column, pull in PULLS.items()},
    **{mode: {"objective.mode": mode} for mode in SHARING if mode != COMPATIBLE},
}


def rivals(study: Study) -> list[Part]:
    """Return the methods on the first task, and on the same task where each site lacks classes."""
    (name, task), complete, some = first_task(study), [], []
    drawn = [dict[str, list[float]]() for _ in range(study.seeds)]
    lacking = {"sites": [_without(site, lacked) for site, lacked in zip(task.sites, LACKED, strict=True)]}
    for method, settings in METHODS.items():
        results, few = each(study, name, settings), each(study, name, {**settings, **lacking})
        sent = [f"{results[0].bytes:,}", f"{results[0].bytes / results[0].fedavg_bytes:.1%}"]
        complete.append([method, *shown(results, "own", "exchanged"), *sent])
        some.append([method, *shown(few, "own", "missing", "missing_exchanged", "exchanged")])
        for picture, result in zip(drawn, results, strict=True):
            picture[method] = [result.exchanged, result.own]
    sends = "bytes: what a site sends in a round."
    lacks = (
        f"The first site has no images of classes {LACKED[0]}, the second none of {LACKED[1]}. missing: accuracy on these."
    )
    head = ["method", "own", "missing, own head", "missing, the other's head", "exchanged"]
    return [
        study.table(
            f"Rivals: {task.title}", ["method", "own", "exchanged", "bytes", "of FedAvg's"], complete, f"{NOTE} {sends}"
        ),
        study.table(f"Rivals where sites lack classes: {task.title}", head, some, f"{NOTE} {lacks}"),
        Picture(dots({task.title: drawn}, ["exchanged", "own"], study.folder / "rivals.png"), f"Rivals: {task.title}"),
    ]


def _without(site: Settings, lacked: Sequence[int]) -> dict[str, Any]:
    """Return a site with all its images except those of some classes."""
    rest = {key: value for key, value in site.items() if key != "samples"}
    return {**rest, "classes": [label for label in range(10) if label not in lacked]}
