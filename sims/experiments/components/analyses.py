"""Figure 2, joint and incremental training, and local steps: which auxiliary heads make components compatible."""

import math
from typing import Any

from fedloom.sims.experiments.components.methods import ALL, DCC, PULLS, WAYS
from fedloom.sims.experiments.components.runs import UPPER, each, first_task, shown, size_of, tasks_of, upper_bound, way
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import dots
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread

NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. exchanged: mean over all pairs of one site's "
    "extractor and another site's head. own: extractors with their own heads. as the paper: objective.pull=0. "
    "pulled: objective.pull=0.1, the default here. way: the share of the way from chance to the upper bound. "
    "(paper): CIFAR-10 / STL-10, ResNet-56."
)


def figure2(study: Study) -> list[Part]:
    """Return Figure 2: every combination of auxiliary heads, on every task."""
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
    """Return joint and incremental training. As in the paper, incremental training is done in both orders of the sites."""
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
    """Return DCC for several numbers of local steps between two averages, and of sites."""
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
    """Return the settings of a plan; none for the plan that runs have by default."""
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
