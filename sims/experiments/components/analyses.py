"""Figure 2 and schemes of training: which auxiliary heads make components compatible, and how often they are averaged."""

import math
from typing import Any

from fedloom.conf.formatting import count
from fedloom.sims.experiments.components.methods import ALL, DCC, PULLS, WAYS
from fedloom.sims.experiments.components.study import UPPER, ComponentsStudy, Found, shown, way
from fedloom.sims.experiments.dot_plot import draw
from fedloom.sims.experiments.papers import cells
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. exchanged: mean over all pairs of one site's extractor and "
    "another's head; own: of extractors with their own heads. as the paper: no pull between heads (objective.pull=0); "
    "pulled: objective.pull=0.1, the default here. way: from chance to the upper bound. (paper): CIFAR-10 / STL-10, "
    "ResNet-56."
)


def figure2(study: ComponentsStudy, seeds: int) -> list[Part]:
    """Every combination of auxiliary heads on every task."""
    return [part for task in study.tasks for part in _combinations(study, task, seeds)]


def _combinations(study: ComponentsStudy, task: str, seeds: int) -> list[Part]:
    paper, rows = cells("components", "figure2"), []
    title, classes = study.size.tasks[task].title, study.size.tasks[task].classes
    upper, drawn = study.upper(task, seeds), [dict[str, Any]() for _ in range(seeds)]
    for name, method in WAYS.items():
        results = {column: study.each(task, method.pulled(pull), seeds) for column, pull in PULLS.items()}
        first, pulled = results.values()
        cellwise = [shown(first, "exchanged"), way(first, upper, classes)]
        more = [shown(pulled, "exchanged"), way(pulled, upper, classes)] if method.pulls else ["-", "-"]
        rows.append([name, paper.shown(name, "exchanged"), *cellwise, *more,
                     shown(first, "own"), shown(pulled, "own") if method.pulls else "-"])  # fmt: skip
        for seed in range(seeds):
            accuracy = [first[seed].exchanged, pulled[seed].exchanged if method.pulls else math.nan, first[seed].own]
            drawn[seed][name] = {"accuracy": accuracy}
    rows.append([UPPER, paper.shown("upper bound", "exchanged"), "-", "-", "-", "-", mean_and_spread(upper), "-"])
    columns = [text for name in PULLS for text in (f"exchanged, {name}", f"way, {name}")]
    head = ["heads", "exchanged (paper)", *columns, *(f"own, {name}" for name in PULLS)]
    stages = ["exchanged, as the paper", "exchanged, pulled", "own"]
    picture = draw({title: drawn}, stages, study.folder / f"figure2-{task}.png")
    table = Table(f"Figure 2: {title}, {count(seeds, 'seed')}", head, rows, NOTE)
    return [table, Picture(picture, f"Figure 2: {title}")]


def schemes(study: ComponentsStudy, seeds: int) -> list[Part]:
    """Joint training against incremental, which goes over both orders of the sites, as the paper's does."""
    paper, tables = cells("components", "schemes"), []
    for task, one in study.tasks.items():
        rows = []
        for name in (DCC, ALL):
            for column, pull in PULLS.items():
                joint = study.each(task, WAYS[name].pulled(pull), seeds)
                late = _incremental(study, task, WAYS[name].pulled(pull), seeds)
                accuracies = [[each.exchanged for each in both] for both in (joint, *late)]
                ordered = [(one + other) / 2 for one, other in zip(*accuracies[1:], strict=True)]
                gaps = [first - second for first, second in zip(accuracies[0], ordered, strict=True)]
                own = [(one.own + other.own) / 2 for one, other in zip(*late, strict=True)]
                theirs = [paper.shown(name, scheme) if not pull else "-" for scheme in ("joint", "incremental")]
                rows.append([f"{name}, {column}", mean_and_spread(accuracies[0]), mean_and_spread(ordered),
                             mean_and_spread(gaps), shown(joint, "own"), mean_and_spread(own), *theirs])  # fmt: skip
        head = ["heads", "joint", "incremental", "joint - incremental", "own, joint", "own, incremental",
                "joint (paper)", "incremental (paper)"]  # fmt: skip
        tables.append(Table(f"Joint and incremental training: {one.title}, {count(seeds, 'seed')}", head, rows, NOTE))
    return tables


def _incremental(study: ComponentsStudy, task: str, settings: dict[str, Any], seeds: int) -> list[list[Found]]:
    """Of each seed, in both orders."""
    sites = list(study.size.tasks[task].sites)
    orders = (sites, sites[::-1])
    return [study.each(task, {**settings, "strategy.scheme": "incremental", "sites": order}, seeds) for order in orders]


def steps(study: ComponentsStudy, seeds: int) -> list[Part]:
    """Local steps between two averages, and sites: DCC."""
    task, plans = study.first, study.size.plans
    rows = []
    for sites in study.size.several:
        for column, pull in PULLS.items():
            settings = {**WAYS[DCC].pulled(pull), "sites": _several(study, task, sites)}
            results = [study.each(task, {**settings, **_plan(study, index)}, seeds) for index in range(len(plans))]
            rows.append([f"{sites} sites, {column}", *(shown(result, "exchanged") for result in results),
                         *(shown(result, "own") for result in results)])  # fmt: skip
    names = [f"{steps} steps, {rounds} rounds" for steps, rounds in plans]
    head = ["DCC", *(f"exchanged: {name}" for name in names), *(f"own: {name}" for name in names)]
    title = f"Local steps and sites: {study.size.tasks[task].title}, {count(seeds, 'seed')}"
    return [Table(title, head, rows, NOTE + " More sites divide the same images.")]


def _plan(study: ComponentsStudy, index: int) -> dict[str, Any]:
    """The settings of a plan; none of that which runs have anyway."""
    (steps, rounds), settings = study.size.plans[index], study.size.tasks[study.first].settings
    if index == 0 and "rounds" not in settings:
        return {}
    plan: dict[str, Any] = {"training.steps": steps, "rounds": rounds}
    if "training.schedule" in settings:  # the rate falls after each quarter
        plan["training.schedule"] = {**settings["training.schedule"], "every": rounds // 4}
    return plan


def _several(study: ComponentsStudy, task: str, count: int) -> list[dict[str, Any]]:
    """As many sites, alike numbers of each domain, which have the images of two."""
    sites, divided = study.size.tasks[task].sites, []
    for site in sites:
        share, samples = count // len(sites), site.get("samples", 0)
        divided.append(
            {**site, **({"count": share} if share > 1 else {}), **({"samples": samples // share} if samples else {})}
        )
    return divided
