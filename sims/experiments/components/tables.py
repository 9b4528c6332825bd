"""The federated tables: Figures 2, 5, 6, 8 and 9, joint and incremental training, local steps, and other methods."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedloom.clients.objectives.components.sharing import COMPATIBLE, SHARING
from fedloom.sims.experiments.components.runs import (
    UPPER,
    each,
    first_task,
    network_of,
    shown,
    size_of,
    tasks_of,
    upper_bound,
    way,
)
from fedloom.sims.experiments.components.sizes import ALL, DCC, IIW, INDEPENDENT, PULLS, WAYS, Settings
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import blocks, curves, dots
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread, spread

NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. exchanged: mean over all pairs of one site's "
    "extractor and another site's head. own: extractors with their own heads. as the paper: objective.pull=0. "
    "pulled: objective.pull=0.1, the default here. way: the share of the way from chance to the upper bound. "
    "(paper): CIFAR-10 / STL-10, ResNet-56."
)


def figure2(study: Study) -> list[Part]:
    """Return Figure 2: accuracy with exchanged heads, for every combination of auxiliary heads, on every task."""
    return [part for task in tasks_of(study) for part in _combinations(study, task)]


def _combinations(study: Study, name: str) -> list[Part]:
    paper, rows, task = cells("components", "figure2"), [], size_of(study).tasks[name]
    upper, drawn = upper_bound(study, name), [dict[str, list[float]]() for _ in range(study.seeds)]
    for heads, method in WAYS.items():
        first, pulled = (each(study, name, method.pulled(pull)) for pull in PULLS.values())
        columns = [(*shown(runs, "exchanged"), way(runs, upper, task.classes)) for runs in (first, pulled)]
        own = [*shown(first, "own"), *shown(pulled, "own")]
        if not method.pulls:
            columns[1], own[1] = ("-", "-"), "-"
        rows.append([heads, paper.shown(heads, "exchanged"), *columns[0], *columns[1], *own])
        for seed, picture in enumerate(drawn):
            picture[heads] = [first[seed].exchanged, pulled[seed].exchanged if method.pulls else math.nan, first[seed].own]
    rows.append([UPPER, paper.shown("upper bound", "exchanged"), "-", "-", "-", "-", mean_and_spread(upper), "-"])
    head = ["heads", "exchanged (paper)", *(text for column in PULLS for text in (f"exchanged, {column}", f"way, {column}")),
            *(f"own, {column}" for column in PULLS)]  # fmt: skip
    stages = ["exchanged, as the paper", "exchanged, pulled", "own"]
    picture = dots({task.title: drawn}, stages, study.folder / f"figure2-{name}.png")
    table = study.table(f"Figure 2: {task.title}", head, rows, NOTE)
    return [table, Picture(picture, f"Figure 2: {task.title}")]


def schemes(study: Study) -> list[Part]:
    """Return the accuracies of joint and incremental training, the latter in both orders of the sites as in the paper."""
    paper, tables = cells("components", "schemes"), list[Part]()
    for name, task in tasks_of(study).items():
        rows = []
        for heads in (DCC, ALL):
            for column, pull in PULLS.items():
                settings = WAYS[heads].pulled(pull)
                joint = each(study, name, settings)
                late = [each(study, name, {**settings, "strategy.scheme": "incremental", "sites": order})
                        for order in (list(task.sites), list(task.sites)[::-1])]  # fmt: skip
                ordered, own = ([(getattr(run, what) + getattr(twin, what)) / 2 for run, twin in zip(*late, strict=True)]
                                for what in ("exchanged", "own"))  # fmt: skip
                gaps = [run.exchanged - after for run, after in zip(joint, ordered, strict=True)]
                theirs = [paper.shown(heads, scheme) if not pull else "-" for scheme in ("joint", "incremental")]
                rows.append([f"{heads}, {column}", *shown(joint, "exchanged"), mean_and_spread(ordered),
                             mean_and_spread(gaps), *shown(joint, "own"), mean_and_spread(own), *theirs])  # fmt: skip
        head = ["heads", "joint", "incremental", "joint - incremental", "own, joint", "own, incremental",
                "joint (paper)", "incremental (paper)"]  # fmt: skip
        tables.append(study.table(f"Joint and incremental training: {task.title}", head, rows, NOTE))
    return tables


def steps(study: Study) -> list[Part]:
    """Return the accuracy with a head of common classes (DCC), by number of local steps in a round, and of sites."""
    (name, task), plans, rows = first_task(study), size_of(study).plans, []
    for sites in size_of(study).several:
        for column, pull in PULLS.items():
            settings = {**WAYS[DCC].pulled(pull), "sites": _several(task.sites, sites)}
            results = [each(study, name, {**settings, **_plan(study, index)}) for index in range(len(plans))]
            rows.append([f"{sites} sites, {column}", *(text for what in ("exchanged", "own")
                                                        for runs in results for text in shown(runs, what))])  # fmt: skip
    names = [f"{steps} steps, {rounds} rounds" for steps, rounds in plans]
    head = ["DCC", *(f"{what}: {plan}" for what in ("exchanged", "own") for plan in names)]
    return [study.table(f"Local steps and sites: {task.title}", head, rows, NOTE + " More sites divide the same images.")]


def _plan(study: Study, index: int) -> dict[str, Any]:
    (steps, rounds), settings = size_of(study).plans[index], first_task(study)[1].settings
    if index == 0 and "rounds" not in settings:
        return {}
    plan: dict[str, Any] = {"training.steps": steps, "rounds": rounds}
    if "training.schedule" in settings:  # the rate falls after each quarter
        plan["training.schedule"] = {**settings["training.schedule"], "every": rounds // 4}
    return plan


def _several(sites: Any, number: int) -> list[dict[str, Any]]:
    """Return so many sites, the same number for each domain. Together they have the images of two sites."""
    share = number // len(sites)
    return [{**site, **({"count": share} if share > 1 else {}),
             **({"samples": site["samples"] // share} if site.get("samples") else {})} for site in sites]  # fmt: skip


BOTH, TURNS = "IIW+DCC", "IIW+RP"
NORMS = {  # by the paper's row: settings, or the norm of all parts of the network
    "batch statistics": {},
    "statistics recomputed": {"evaluation.statistics": "recomputed"},
    "stored statistics": {"evaluation.statistics": "running"},
    "LayerNorm": {"norm": "layer"},
    "InstanceNorm": {"norm": "instance"},
    "unit-length features": {"unit": True},
    "loss for unit length": {"objective.unit": 0.001},  # with 0.1 and 0.01 training diverges
}
STORED = ("batch statistics", "stored statistics")  # also measured without IIW
CORRELATED = (INDEPENDENT, IIW, "RP", DCC, ALL)
CORRELATION_NOTE = (
    "Correlation of each channel of one extractor with the same channel of the other, mean over channels, on 500 "
    "test examples of each domain and all positions. permuted: channels in the best order (a linear assignment). "
    "Accuracies in %, standard deviations over seeds. (paper): CIFAR-10 / STL-10, ResNet-56, where IIW starts from "
    "pre-trained weights."
)
EXCHANGED = "exchanged: test accuracy"  # the vertical axis


def figure5(study: Study) -> list[Part]:
    """Return Figure 5: accuracy by norm, and with features of unit length, for IIW+DCC as in the paper, and for DCC."""
    (task, of), paper, rows = first_task(study), cells("components", "figure5"), []
    for heads, name in [*((BOTH, name) for name in NORMS), *((DCC, name) for name in STORED)]:
        settings = normed(study, task, NORMS[name])
        results = [each(study, task, {**WAYS[heads].pulled(pull), **settings}) for pull in PULLS.values()]
        theirs = paper.shown(name, "exchanged") if heads == BOTH else "-"
        ours = [text for what in ("exchanged", "own") for result in results for text in shown(result, what)]
        rows.append([f"{heads}, {name}", theirs, *ours])
    head = [
        "heads and norm",
        "exchanged (paper)",
        *(f"{what}, {column}" for what in ("exchanged", "own") for column in PULLS),
    ]
    return [study.table(f"Figure 5: norms, {of.title}", head, rows, NOTE)]


def normed(study: Study, task: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a network with the norm, or features of unit length, in `chosen`; without either, `chosen`."""
    if not {"norm", "unit"} & chosen.keys():
        return chosen
    network = network_of(study, task)
    if "unit" in chosen:
        return {"network": {**network, **chosen}}
    head = {"head": {**network["head"], **chosen}} if network.get("head") else {}
    return {"network": {**network, "of": {**network["of"], **chosen}, **head}}


def figure6(study: Study) -> list[Part]:
    """Return Figure 6: how much two extractors' features correlate, and the accuracy with exchanged heads."""
    (task, of), paper, rows, drawn = first_task(study), cells("components", "figure6"), [], {}
    for name in CORRELATED:
        for column, pull in WAYS[name].columns.items():
            results = each(study, task, WAYS[name].pulled(pull))
            title = f"{name}, {column}" if WAYS[name].pulls else name
            drawn[title] = results[0].correlation
            row = [title]
            for what, values in {"correlation": [fmean(result.correlation) for result in results],
                                 "permuted": [result.permuted for result in results]}.items():  # fmt: skip
                theirs = paper.shown(name, what) if not pull else "-"
                row.append(spread(values).text(2) + ("" if theirs == "-" else f" ({theirs})"))
            rows.append([*row, *shown(results, "exchanged")])
    head = ["heads", "correlation (paper)", "permuted (paper)", "exchanged"]
    picture = blocks(drawn, study.folder / "figure6.png")
    return [study.table(f"Figure 6: correlation of features, {of.title}", head, rows, CORRELATION_NOTE),
            Picture(picture, "Correlation of each channel, sorted; seed 0")]  # fmt: skip


def figure8(study: Study) -> list[Part]:
    """Return Figure 8: accuracy by where the network is cut into extractor and head, for IIW+RP as in the paper, and DCC."""
    name, task = first_task(study)
    ways = {f"{heads}, {column}": WAYS[heads].pulled(pull) for heads in (TURNS, DCC)
            for column, pull in WAYS[heads].columns.items()}  # fmt: skip
    rows, drawn = [], {way: dict[str, list[float]]() for way in ways}
    for point in task.points:
        network = {"network": {"name": "split", "of": dict(task.whole), "at": point}}
        results = {way: each(study, name, {**settings, **network}) for way, settings in ways.items()}
        exchanged = [text for runs in results.values() for text in shown(runs, "exchanged")]
        rows.append([point, *exchanged, *shown(results[f"{DCC}, pulled"], "own")])
        for title, runs in results.items():
            drawn[title][point] = [run.exchanged for run in runs]
    head = ["cut after", *ways, f"own: {DCC}, pulled"]
    note = (
        f"{NOTE} The paper has no numbers. Its IIW+RP falls slowly up to the first block of stage 3, and steeply after it."
    )
    title = f"Figure 8: the point of the cut, {task.title}"
    picture = curves(drawn, ("cut after", EXCHANGED), study.folder / "figure8.png", limits=(0.0, 1.0))
    return [study.table(title, head, rows, note), Picture(picture, title)]


def figure9(study: Study) -> list[Part]:
    """Return Figure 9: accuracy by the number of common classes of the shared head (IIW+DCC), and without it (IIW+RP)."""
    (task, of), paper, rows = first_task(study), cells("components", "figure9"), []
    columns = {f"IIW+DCC, {column}": pull for column, pull in PULLS.items()}
    drawn = {name: dict[str, list[float]]() for name in columns}
    for most in size_of(study).most:
        limited = {"objective.auxiliary": [{"name": "dcc", "most": most}]}
        results = {name: each(study, task, {**WAYS[BOTH].pulled(pull), **limited}) for name, pull in columns.items()}
        exchanged = [text for runs in results.values() for text in shown(runs, "exchanged")]
        rows.append([str(most), *exchanged, paper.shown(most, "IIW+DCC")])
        for name, runs in results.items():
            drawn[name][str(most)] = [run.exchanged for run in runs]
    turns = each(study, task, WAYS[TURNS].settings)
    rows.append(["none: IIW+RP", *shown(turns, "exchanged"), "-", paper.shown("IIW+RP", "IIW+DCC")])
    title = f"Figure 9: common classes, {of.title}"
    picture = curves(
        drawn, ("common classes of the shared head", EXCHANGED), study.folder / "figure9.png", limits=(0.0, 1.0)
    )
    return [study.table(title, ["classes", *columns, "paper"], rows, NOTE), Picture(picture, title)]


LACKED = ([0, 1], [2, 3])  # classes of which the first and the second site have no images
METHODS: dict[str, dict[str, Any]] = {
    **{f"shared heads: {name}, {column}": WAYS[name].pulled(pull) for name in (DCC, ALL) for column, pull in PULLS.items()},
    **{mode: {"objective.mode": mode} for mode in SHARING if mode != COMPATIBLE},
}


def rivals(study: Study) -> list[Part]:
    """Return shared heads and other methods side by side: on the first task, and where each site lacks classes."""
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
    rest = {key: value for key, value in site.items() if key != "samples"}
    return {**rest, "classes": [label for label in range(10) if label not in lacked]}
