"""Gradients and weights of two tasks added, assigned and fused: Tables 1 to 6 and the grids of the appendix."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS
from fedloom.server.strategies.coefficients import worth
from fedloom.sims.experiments import arithmetic_runs as runs
from fedloom.sims.experiments import assigned, papers
from fedloom.sims.experiments.plots import heat_maps
from fedloom.sims.experiments.study import Reproduction, Study, any_override, means
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.results import mean
from fedloom.sims.report.tables import Table, show

BAR = 0.55  # of a task's own accuracy, on both tasks at once
GRIDS = ("cnn-large", "residual")  # the runs whose grids are measured
NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. Coefficients are chosen on validation examples. "
    f"(paper): cells of {papers.source_of('arithmetic')}: one run on all images of 32x32, with the same ten classes "
    "of CIFAR-100."
)
PAPER_GRIDS = {  # by way of combining and task: coarse and fine, on test examples
    (GRADIENTS, "cifar10"): ("A8", "A10"),
    (GRADIENTS, "cifar100_ten"): ("A9", "A11"),
    (WEIGHTS, "cifar10"): ("A18", "6"),
    (WEIGHTS, "cifar100_ten"): ("A19", "A1"),
}
Results = Sequence[Mapping[str, Any]]  # of each seed: by run its summary, and its grids, pairs or scales


@dataclass(frozen=True)
class Size:
    """A preset: `samples` to train on by amount of data (0: all), and `images` of each grid cell by split."""

    samples: Mapping[str, int]
    images: Mapping[str, int]
    cnn_epochs: int


SIZES = {
    "cpu": Size({"small": 500, "medium": 2000, "large": 4500}, {"validation": 500, "test": 1000}, cnn_epochs=10),
    "paper": Size({"small": 1000, "medium": 2500, "large": 0}, {"validation": 500, "test": 1000}, cnn_epochs=30),
}


def parts(study: Study) -> list[Part]:
    """Return all tables and heat maps."""
    results = study.each_seed(lambda seed: _measured(study, seed))
    made: list[Part] = [NOTE, *assigned.tables(study), _sequential_table(results), _demo_table(results)]
    for network in GRIDS:
        made += [
            *_grid_parts(network, results, study.folder),
            _shape_table(network, results),
            _ratio_table(network, results),
        ]
    return made


reproduce = Reproduction(
    "arithmetic", "runs/reproduce-arithmetic-{preset}", SIZES, {"": parts}, check=any_override, one_thread=False
)


def configurations(study: Study, seed: int) -> dict[str, Config]:
    """Return the configurations of a seed's runs by name: "demo", "cnn-AMOUNT" and "residual"."""
    preset, size = study.preset, SIZES[study.preset]
    common = [f"seed={seed}", f"run.root={study.folder}", "strategy.search.by=none"]
    configs = {"demo": load("arithmetic", [*common, *study.overrides, f"run.name=demo-{seed}"])}
    classes = sorted(papers.classes_of("arithmetic", "cifar100_ten").values())
    cifar = [f"preset={preset}", *common, f"sites.1.classes={classes}"]
    more = {
        f"cnn-{amount}": [*(f"sites.{site}.samples={samples}" for site in (0, 1)), "network={name: lenet}",
                          "training.rate=0.01", f"training.epochs={size.cnn_epochs}"]
        for amount, samples in size.samples.items()
    }  # fmt: skip
    for name, options in {**more, "residual": []}.items():
        configs[name] = load("cifar_tasks", [*cifar, *options, *study.overrides, f"run.name={name}-{seed}"])
    return configs


def _measured(study: Study, seed: int) -> dict[str, Any]:
    configs, images = configurations(study, seed), SIZES[study.preset].images
    results: dict[str, dict[str, Any]] = dict(
        zip(configs, ({"summary": summary} for summary in study.runs(list(configs.values()))), strict=True)
    )
    for name, result in results.items():
        digest, networks = result["summary"]["digest"]["sum"], runs.Networks.of(configs[name])
        if name == "demo":
            result["scales"] = study.once(f"scales-{seed}", [digest, runs.SCALES], lambda of=networks: runs.scales(of))
        if name in GRIDS:
            result["pairs"] = study.once(
                f"{name}-pairs-{seed}",
                [digest, runs.PAIRS, images["test"]],
                lambda of=networks: runs.pairs(of, images["test"]),
            )
            result["grids"] = study.once(
                f"{name}-grids-{seed}", [digest, runs.STEPS, images], lambda of=networks: runs.all_grids(of, images)
            )
    return results


def _tasks(results: Results, run: str) -> list[str]:
    return [site["domain"] for site in results[0][run]["summary"]["sites"]]


def _sequential_table(results: Results) -> Table:
    rows, paper = [], papers.cells("arithmetic", "5")
    for run in results[0]:
        first, second = _tasks(results, run)
        for row, what in {"site-0000": f"{first} alone", "site-0001": f"{second} alone", "sequential_ab":
                          f"{first}, then {second}", "sequential_ba": f"{second}, then {first}"}.items():  # fmt: skip
            ours = means(results, *((run, "summary", "accuracy", row, task) for task in (first, second)))
            rows.append(
                [run, what, *ours, *(paper.shown(what, task) if run == "residual" else "-" for task in (first, second))]
            )
    head = ["run", "trained on", "first task", "second task", "first task (paper)", "second task (paper)"]
    return Table("Table 5: one task after the other", head, rows)


def _demo_table(results: Results) -> Table:
    """Return the rows of `fedloom run arithmetic`, and weighted fusion at several scales."""
    tasks = _tasks(results, "demo")
    rows = [[row, *means(results, *(("demo", "summary", "accuracy", row, task) for task in tasks))]
            for row in ("site-0000", "site-0001", "half", "sum", "fused")]  # fmt: skip
    rows += [[f"fused, α = β = {scale:g}", *means(results, *(("demo", "scales", index, k) for k in (0, 1)))]
             for index, scale in enumerate(runs.SCALES)]  # fmt: skip
    return Table(f"{' and '.join(tasks)}, BatchNorm with batch statistics", ["network", *tasks], rows)


def chosen(grids: Mapping[str, Any], own: Mapping[str, float]) -> tuple[int, int]:
    """Return the grid indices of the pair (alpha, beta) that is best for the worse of two tasks.

    Best: by validation accuracy, divided by `own`, the task's accuracy with its gradient alone.
    """
    indices = [(a, b) for a in range(len(runs.STEPS)) for b in range(len(runs.STEPS))]
    cells = grids["validation"]
    return max(indices, key=lambda pair: worth({task: cells[task][pair[0]][pair[1]] for task in cells}, own))


def _own(grids: Mapping[str, Any], split: str) -> dict[str, float]:
    """Return each task's own accuracy on the images of the grid: of theta_0 + its gradient alone."""
    cells, last = grids[GRADIENTS][split], len(runs.STEPS) - 1
    first, second = cells
    return {first: cells[first][last][0], second: cells[second][0][last]}


def _grid_parts(network: str, results: Results, folder: Path) -> list[Part]:
    """Return Table 6 and the appendix: the chosen pairs, the grids, and their picture."""
    rows, tables, maps, marks = [], [], {}, {}
    for how in (GRADIENTS, WEIGHTS):
        picked, grids = [], [result[network]["grids"] for result in results]
        tasks = list(grids[0][how]["test"])
        for grid in grids:
            (a, b), own = chosen(grid[how], _own(grid, "validation")), _own(grid, "test")
            scores = [grid[how]["test"][task][a][b] for task in tasks]
            relative = [score / max(own[task], 1e-9) for score, task in zip(scores, tasks, strict=True)]
            picked.append(((a, b), scores, relative))
        marks[how] = [[runs.STEPS[index] for index in pair] for pair, _, _ in picked]
        pairs = " ".join(f"({alpha:g}, {beta:g})" for alpha, beta in marks[how])
        above = sum(min(relative) > BAR for _, _, relative in picked)
        shown = means(picked, *((part, k) for part in (1, 2) for k in (0, 1)))
        rows.append([how, pairs, *shown, f"{above} of {len(results)}"])
        maps[how] = {task: np.mean([grid[how]["test"][task] for grid in grids], axis=0) for task in tasks}
        tables += [_grid_table(network, how, task, values) for task, values in maps[how].items()]
    head = ["combined", "(α, β) by seed", "first task", "second task", "first, of its own", "second, of its own",
            f"both above {100 * BAR:g} %"]  # fmt: skip
    picture = heat_maps(maps, runs.STEPS, marks, folder / f"{network}.png")
    caption = f"{network}: mean over seeds; circles: the pairs chosen on validation examples."
    summary = Table(f"Table 6 ({network}): the pair chosen on validation examples", head, rows)
    return [summary, *tables, Picture(picture, caption)]


def _grid_table(network: str, how: str, task: str, values: np.ndarray) -> Table:
    rows = [[f"{alpha:g}", *(f"{100 * cell:.1f}" for cell in row)] for alpha, row in zip(runs.STEPS, values, strict=True)]
    title = f"Appendix ({network}, {how}): accuracy on {task}, α down, β across"
    return Table(title, ["α \\ β", *(f"{beta:g}" for beta in runs.STEPS)], rows)


def _shape_table(network: str, results: Results) -> Table:
    """Return rank correlations of grids between seeds and with the paper's, and the spread along equal ratios."""
    rows = []
    for how in (GRADIENTS, WEIGHTS):
        for task in results[0][network]["grids"][how]["test"]:
            grids = [np.array(result[network]["grids"][how]["test"][task]) for result in results]
            between = [_rank(first, second) for k, first in enumerate(grids) for second in grids[:k]]
            to_paper = _with_paper(np.mean(grids, axis=0), paper_grid(how, task)) if network == "residual" else None
            spread = 100 * statistics.fmean(float(np.ptp(np.diagonal(grid)[1:])) for grid in grids)
            rows.append([f"{how} {task}", show(mean(between)), show(to_paper), f"{spread:.1f}"])
    note = ("Spread: largest minus smallest accuracy on α = β from 0.1 to 1, in points. With the paper's: over the pairs of "
            "coefficients that both have, on test examples, of the networks that were trained on all images.")  # fmt: skip
    head = ["grid", "rank correlation between seeds", "with the paper's", "spread along α = β"]
    return Table(f"Shapes ({network})", head, rows, note)


def _ratio_table(network: str, results: Results) -> Table:
    """Return whether weighted fusion depends on alpha / beta alone, and what large coefficients do to gradients."""
    tasks, rows = list(results[0][network]["grids"][WEIGHTS]["test"]), []
    for how in (WEIGHTS, GRADIENTS):
        for index, pair in enumerate(runs.PAIRS):
            row = [f"{how} ({pair[0]:g}, {pair[1]:g})"]
            for k, task in enumerate(tasks):
                theirs = paper_grid(how, task).get(pair) if network == "residual" else None
                row += [*means(results, (network, "pairs", how, index, k)), show(theirs)]
            rows.append(row)
    note = ("With batch statistics, and no bias before them, weights of one ratio are one function. A bias in the last "
            "layer breaks that: it grows with the coefficients, and its input does not.")  # fmt: skip
    head = ["(α, β)", *(text for task in tasks for text in (task, f"{task} (paper)"))]
    return Table(f"Equal ratios ({network})", head, rows, note)


def paper_grid(how: str, task: str) -> dict[tuple[float, float], float]:
    """Return the paper's accuracies in % by (alpha, beta), combined by `how`, of coarse and fine grid; {} if it has none."""
    cells = {}
    for table in PAPER_GRIDS.get((how, task), ()):
        theirs = papers.cells("arithmetic", table)
        cells |= {
            (float(alpha), float(beta)): theirs.number(beta, alpha) for beta in theirs.rows for alpha in theirs.columns
        }
    return {pair: value for pair, value in cells.items() if value is not None}


def _with_paper(grid: np.ndarray, theirs: Mapping[tuple[float, float], float]) -> float | None:
    """Return the rank correlation over the pairs in both grids; None for fewer than three."""
    ours = {(alpha, beta): grid[a, b] for a, alpha in enumerate(runs.STEPS) for b, beta in enumerate(runs.STEPS)}
    both = [pair for pair in ours if pair in theirs]
    if len(both) < 3:
        return None
    return _rank(np.array([ours[pair] for pair in both]), np.array([theirs[pair] for pair in both]))


def _rank(first: np.ndarray, second: np.ndarray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(spearmanr(first.ravel(), second.ravel())[0])  # type: ignore[arg-type]
