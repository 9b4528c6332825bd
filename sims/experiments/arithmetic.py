"""arithmetic: two tasks added, assigned and fused; Tables 1 to 6 and the grids of the appendix, on our data."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from fedloom.conf import UserError, load
from fedloom.conf.schema import Config
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS
from fedloom.server.strategies.coefficients import worth
from fedloom.sims.experiments import arithmetic_runs as runs
from fedloom.sims.experiments import assigned, papers
from fedloom.sims.experiments.arithmetic_plot import draw
from fedloom.sims.experiments.kept import kept
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.simulate import simulate_once
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.page import Part, Picture, write_page
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table, mean, show

BAR = 0.55  # of a task's own accuracy, on both tasks at once
DATA = ("small", "medium", "large")
NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. Coefficients are chosen on validation images. (paper): "
    f"cells of {papers.source_of('arithmetic')}: all images of 32x32, one run; the same ten classes of CIFAR-100."
)
PAPER_GRIDS = {  # by way of combining and task: coarse and fine, on test images
    (GRADIENTS, "cifar10"): ("A8", "A10"),
    (GRADIENTS, "cifar100_ten"): ("A9", "A11"),
    (WEIGHTS, "cifar10"): ("A18", "6"),
    (WEIGHTS, "cifar100_ten"): ("A19", "A1"),
}


@dataclass(frozen=True)
class Size:
    """How large a preset's runs are: training images a task, by amount of data (0: all); images looked at in each cell."""

    samples: Mapping[str, int]
    images: Mapping[str, int]
    cnn_epochs: int


SIZES = {
    "cpu": Size({"small": 500, "medium": 2000, "large": 4500}, {"validation": 500, "test": 1000}, cnn_epochs=10),
    "paper": Size({"small": 1000, "medium": 2500, "large": 0}, {"validation": 500, "test": 1000}, cnn_epochs=30),
}


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Train, combine and write the tables and heat maps; what is finished is taken as it is. Returns the folder.

    Raises UserError for an unknown preset or bad overrides.
    """
    if preset not in SIZES:
        raise UserError(f"--preset: got '{preset}', takes one of: {', '.join(SIZES)}")
    root = Path(f"runs/reproduce-arithmetic-{preset}")
    results = [_measured(preset, seed, root, overrides, quiet) for seed in range(seeds)]
    parts: list[Part] = [
        NOTE,
        *assigned.tables(Study(preset, root / "assigned", quiet), seeds),
        _sequential_table(results),
        _demo_table(results),
    ]
    for network in ("cnn-large", "residual"):
        parts += [*_grid_parts(network, results, root), _shape_table(network, results), _ratio_table(network, results)]
    texts = [part.markdown() if isinstance(part, Table) else part for part in parts if not isinstance(part, Picture)]
    (root / "tables.md").write_text("\n".join(f"{text}\n" for text in texts), encoding="utf-8")
    write_page(root / "report.html", f"arithmetic, preset {preset}, {seeds} seeds", [("", parts)])
    return root


def configurations(preset: str, seed: int, root: Path, overrides: Sequence[str]) -> dict[str, Config]:
    """The runs of a seed, by name."""
    common = [f"seed={seed}", f"run.root={root}", "strategy.search.by=none"]
    size = SIZES[preset]
    configs = {"demo": load("arithmetic", [*common, *overrides, f"run.name=demo-{seed}"])}
    classes = sorted(papers.classes_of("arithmetic", "cifar100_ten").values())
    cifar = [f"preset={preset}", *common, f"sites.1.classes={classes}"]
    for amount, samples in size.samples.items():
        data = [f"sites.{site}.samples={samples}" for site in (0, 1)]
        network = ["network={name: lenet}", "training.rate=0.01", f"training.epochs={size.cnn_epochs}"]
        name = f"cnn-{amount}"
        configs[name] = load("cifar_tasks", [*cifar, *data, *network, *overrides, f"run.name={name}-{seed}"])
    configs["residual"] = load("cifar_tasks", [*cifar, *overrides, f"run.name=residual-{seed}"])
    return configs


def _measured(preset: str, seed: int, root: Path, overrides: Sequence[str], quiet: bool) -> dict[str, Any]:
    """A seed's summaries, grids and scales, by the name of the run."""
    results: dict[str, Any] = {}
    for name, config in configurations(preset, seed, root, overrides).items():
        results[name] = {"summary": simulate_once(config, listener=listener_for(quiet))}
        folder = root / config.run.name / "measured"
        digest = results[name]["summary"]["digest"]["sum"]
        networks, images = runs.Networks.of(config), SIZES[preset].images
        if name == "demo":
            results[name]["scales"] = kept(
                folder / "scales.json", [digest, runs.SCALES], lambda of=networks: runs.scales(of)
            )
        if name in ("cnn-large", "residual"):
            key = [digest, runs.STEPS, dict(images)]
            far = [digest, runs.PAIRS, images["test"]]
            results[name]["pairs"] = kept(
                folder / "pairs.json", far, lambda of=networks, n=images["test"]: runs.pairs(of, n)
            )
            results[name]["grids"] = kept(folder / "grids.json", key, lambda of=networks, n=images: runs.all_grids(of, n))
    return results


def _tasks(results: Sequence[Mapping[str, Any]], run: str) -> tuple[str, str]:
    """The domains of a run's two sites."""
    first, second = (site["domain"] for site in results[0][run]["summary"]["sites"])
    return first, second


def _sequential_table(results: Sequence[Mapping[str, Any]]) -> Table:
    rows, paper = [], papers.cells("arithmetic", "5")
    for run in ("demo", *(f"cnn-{amount}" for amount in DATA), "residual"):
        first, second = _tasks(results, run)
        for row, what in {"site-0000": f"{first} alone", "site-0001": f"{second} alone", "sequential_ab":
                          f"{first}, then {second}", "sequential_ba": f"{second}, then {first}"}.items():  # fmt: skip
            scores = [result[run]["summary"]["accuracy"][row] for result in results]
            ours = [mean_and_spread([score[task] for score in scores]) for task in (first, second)]
            theirs = [paper.shown(what, task) if run == "residual" else "-" for task in (first, second)]
            rows.append([run, what, *ours, *theirs])
    head = ["run", "trained on", "first task", "second task", "first task (paper)", "second task (paper)"]
    return Table("Table 5: one task after the other", head, rows)


def _demo_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of `fedloom run arithmetic`, and weighted fusion at several scales."""
    rows, tasks = [], _tasks(results, "demo")
    for row in ("site-0000", "site-0001", "half", "sum", "fused"):
        scores = [result["demo"]["summary"]["accuracy"][row] for result in results]
        rows.append([row, *(mean_and_spread([score[task] for score in scores]) for task in tasks)])
    for index, scale in enumerate(runs.SCALES):
        cells = [[result["demo"]["scales"][index][k] for result in results] for k in (0, 1)]
        rows.append([f"fused, α = β = {scale:g}", *map(mean_and_spread, cells)])
    return Table(f"{' and '.join(tasks)}, BatchNorm with batch statistics", ["network", *tasks], rows)


def chosen(grids: Mapping[str, Any], own: Mapping[str, float]) -> tuple[int, int]:
    """The places of the pair of coefficients whose worst relative validation accuracy is largest."""
    places = [(a, b) for a in range(len(runs.STEPS)) for b in range(len(runs.STEPS))]
    cells = grids["validation"]
    return max(places, key=lambda cell: worth({task: cells[task][cell[0]][cell[1]] for task in cells}, own))


def _own(grids: Mapping[str, Any], split: str) -> dict[str, float]:
    """Each task's own accuracy on the images of the grid: theta_0 + its gradient alone."""
    first, second = grids[GRADIENTS][split]
    cells, last = grids[GRADIENTS][split], len(runs.STEPS) - 1
    return {first: cells[first][last][0], second: cells[second][0][last]}


def _grid_parts(network: str, results: Sequence[Mapping[str, Any]], root: Path) -> list[Part]:
    """Table 6 and the appendix: the chosen pairs, the grids and their picture."""
    rows, tables, maps, marks = [], [], {}, {}
    for how in (GRADIENTS, WEIGHTS):
        tasks = list(results[0][network]["grids"][how]["test"])
        picked = []
        for result in results:
            grids = result[network]["grids"]
            cell, own = chosen(grids[how], _own(grids, "validation")), _own(grids, "test")
            scores = [grids[how]["test"][task][cell[0]][cell[1]] for task in tasks]
            relative = [score / max(own[task], 1e-9) for score, task in zip(scores, tasks, strict=True)]
            picked.append((cell, scores, relative))
        marks[how] = [[runs.STEPS[k] for k in cell] for cell, _, _ in picked]
        pairs = " ".join(f"({alpha:g}, {beta:g})" for alpha, beta in marks[how])
        held = sum(min(relative) > BAR for _, _, relative in picked)
        columns = [[result[part][k] for result in picked] for part in (1, 2) for k in (0, 1)]
        rows.append([how, pairs, *map(mean_and_spread, columns), f"{held} of {len(results)}"])
        maps[how] = {
            task: np.mean([result[network]["grids"][how]["test"][task] for result in results], axis=0) for task in tasks
        }
        tables += [_grid_table(network, how, task, values) for task, values in maps[how].items()]
    head = ["combined", "(α, β) by seed", "first task", "second task", "first, of its own", "second, of its own",
            f"both above {100 * BAR:g} %"]  # fmt: skip
    picture = draw(maps, runs.STEPS, marks, root / f"{network}.png")
    caption = f"{network}: mean over seeds; circles: the pairs chosen on validation images."
    summary = Table(f"Table 6 ({network}): the pair chosen on validation images", head, rows)
    return [summary, *tables, Picture(picture, caption)]


def _grid_table(network: str, how: str, task: str, values: np.ndarray) -> Table:
    rows = [[f"{alpha:g}", *(f"{100 * cell:.1f}" for cell in row)] for alpha, row in zip(runs.STEPS, values, strict=True)]
    title = f"Appendix ({network}, {how}): accuracy on {task}, α down, β across"
    return Table(title, ["α \\ β", *(f"{beta:g}" for beta in runs.STEPS)], rows)


def _shape_table(network: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """How alike grids are: rank correlations between seeds and with the paper's, and the spread along equal ratios."""
    rows = []
    for how in (GRADIENTS, WEIGHTS):
        for task in results[0][network]["grids"][how]["test"]:
            grids = [np.array(result[network]["grids"][how]["test"][task]) for result in results]
            between = [_rank(first, second) for k, first in enumerate(grids) for second in grids[:k]]
            to_paper = _with_paper(np.mean(grids, axis=0), paper_grid(how, task)) if network == "residual" else None
            spread = 100 * statistics.fmean(_along_ratio(grid) for grid in grids)
            rows.append([f"{how} {task}", show(mean(between)), show(to_paper), f"{spread:.1f}"])
    note = ("Spread: largest less smallest accuracy on α = β from 0.1 to 1, in points. With the paper's: over the pairs of "
            "coefficients that both have, on test images of the nets of all images.")  # fmt: skip
    head = ["grid", "rank correlation between seeds", "with the paper's", "spread along α = β"]
    return Table(f"Shapes ({network})", head, rows, note)


def _ratio_table(network: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Whether weighted fusion depends on alpha / beta alone, and what large coefficients do to gradients."""
    tasks, rows = list(results[0][network]["grids"][WEIGHTS]["test"]), []
    for how in (WEIGHTS, GRADIENTS):
        for index, pair in enumerate(runs.PAIRS):
            row = [f"{how} ({pair[0]:g}, {pair[1]:g})"]
            for k, task in enumerate(tasks):
                theirs = paper_grid(how, task).get(pair) if network == "residual" else None
                row += [mean_and_spread([result[network]["pairs"][how][index][k] for result in results]), show(theirs)]
            rows.append(row)
    note = ("With batch statistics and no bias in front of them, weights of one ratio are one function; a bias in the last "
            "layer, which grows with the coefficients and not with what enters it, breaks that.")  # fmt: skip
    head = ["(α, β)", *(text for task in tasks for text in (task, f"{task} (paper)"))]
    return Table(f"Equal ratios ({network})", head, rows, note)


def paper_grid(how: str, task: str) -> dict[tuple[float, float], float]:
    """The paper's accuracy by (alpha, beta), coarse and fine grid together; none for tasks that are not its own."""
    cells = {}
    for table in PAPER_GRIDS.get((how, task), ()):
        theirs = papers.cells("arithmetic", table)
        pairs = [(alpha, beta) for beta in theirs.rows for alpha in theirs.columns]
        cells |= {(float(alpha), float(beta)): theirs.number(beta, alpha) for alpha, beta in pairs}
    return {pair: value for pair, value in cells.items() if value is not None}


def _with_paper(grid: np.ndarray, theirs: Mapping[tuple[float, float], float]) -> float | None:
    """Rank correlation over the pairs that both have; None where they are fewer than three."""
    ours = {(alpha, beta): grid[a, b] for a, alpha in enumerate(runs.STEPS) for b, beta in enumerate(runs.STEPS)}
    both = [pair for pair in ours if pair in theirs]
    if len(both) < 3:
        return None
    return _rank(np.array([ours[pair] for pair in both]), np.array([theirs[pair] for pair in both]))


def _rank(first: np.ndarray, second: np.ndarray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(spearmanr(first.ravel(), second.ravel())[0])  # type: ignore[arg-type]


def _along_ratio(grid: np.ndarray) -> float:
    diagonal = np.diagonal(grid)[1:]
    return float(diagonal.max() - diagonal.min())
