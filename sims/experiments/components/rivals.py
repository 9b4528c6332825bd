"""Methods that share a part of networks, beside auxiliary heads: own tasks, missing classes, exchanged heads, bytes."""

from collections.abc import Sequence
from typing import Any

from fedloom.clients.objectives.components.sharing import COMPATIBLE, SHARING
from fedloom.conf.formatting import count
from fedloom.sims.experiments.components.analyses import NOTE
from fedloom.sims.experiments.components.methods import ALL, DCC, PULLS, WAYS
from fedloom.sims.experiments.components.sizes import Settings
from fedloom.sims.experiments.components.study import ComponentsStudy, shown
from fedloom.sims.experiments.dot_plot import draw
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.tables import Table

LACKED = ([0, 1], [2, 3])  # classes of which the first and the second site have no images
OURS = {f"shared heads: {name}, {column}": WAYS[name].pulled(pull) for name in (DCC, ALL) for column, pull in PULLS.items()}
METHODS: dict[str, dict[str, Any]] = {
    **OURS,
    **{mode: {"objective.mode": mode} for mode in SHARING if mode != COMPATIBLE},
}


def rivals(study: ComponentsStudy, seeds: int) -> list[Part]:
    """The first task as it is, and with classes that each site lacks."""
    task, parts = study.first, list[Part]()
    title, drawn = study.size.tasks[task].title, [dict[str, Any]() for _ in range(seeds)]
    lacking = {"sites": [_without(site, lacked) for site, lacked in zip(study.size.tasks[task].sites, LACKED, strict=True)]}
    complete, some = [], []
    for name, settings in METHODS.items():
        results = study.each(task, settings, seeds)
        sent = [f"{results[0].bytes:,}", f"{results[0].bytes / results[0].fedavg_bytes:.1%}"]
        complete.append([name, shown(results, "own"), shown(results, "exchanged"), *sent])
        for seed, result in enumerate(results):
            drawn[seed][name] = {"accuracy": [result.exchanged, result.own]}
        few = study.each(task, {**settings, **lacking}, seeds)
        some.append([name, *(shown(few, what) for what in ("own", "missing", "missing_exchanged", "exchanged"))])
    bytes_told = "Bytes that a site sends in a round, and their share of FedAvg's."
    parts.append(
        Table(f"Rivals: {title}, {count(seeds, 'seed')}", ["method", "own", "exchanged", "bytes", "of FedAvg's"], complete,
              f"{NOTE} {bytes_told}")
    )  # fmt: skip
    lacks = f"The first site has no images of classes {LACKED[0]}, the second none of {LACKED[1]}. missing: on these."
    head = ["method", "own", "missing, own head", "missing, the other's head", "exchanged"]
    parts.append(Table(f"Rivals where sites lack classes: {title}, {count(seeds, 'seed')}", head, some, f"{NOTE} {lacks}"))
    picture = draw({title: drawn}, ["exchanged", "own"], study.folder / "rivals.png")
    return [*parts, Picture(picture, f"Rivals: {title}")]


def _without(site: Settings, lacked: Sequence[int]) -> dict[str, Any]:
    """A site with all images there are but those of some classes."""
    kept = {key: value for key, value in site.items() if key != "samples"}
    return {**kept, "classes": [label for label in range(10) if label not in lacked]}
