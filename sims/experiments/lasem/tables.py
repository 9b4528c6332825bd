"""The figures and tables of LASEM, with the paper's numbers, and ten sites at once in a federation."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.clients.objectives.layer_selection.configurations import every, shown
from fedloom.conf import load
from fedloom.sims.experiments.lasem.lifelong import Outcome
from fedloom.sims.experiments.lasem.runs import COMPARED, LEARNERS, SIZES, each, named, of, sequences_of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import curves, ranges
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.scratch_run import erased_run
from fedloom.sims.report.heads import exchanges
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.selection import selections
from fedloom.sims.report.spread import spread

STATIC = ("all", "top-1", "top-2", "top-3", "bottom-1", "bottom-2", "bottom-3", "alternating")  # the paper's, of four layers
CERTAINTIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GROUPS = {4: [5, 4, 4, 4], 5: [5, 4, 4, 2, 2], 6: [5, 4, 2, 2, 2, 2], 7: [5, 2, 2, 2, 2, 2, 2]}  # of ResNet-18
SEARCHES = ("exact", "pruned", "sampled")
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's, of so many trials, for 95% confidence
PEAK = "Mean peak accuracy over the tasks in %, ± 95% confidence over seeds, as in the paper."
RATIOS = (
    "final / peak: the paper's forgetting ratio. The peak is the test accuracy at the epoch with the best "
    "validation accuracy; above 1, that epoch was luck. final / end: the ratio to the accuracy at the end of the "
    "task."
)
EXPERIMENT = "layer_selection"
RUNS: dict[str, list[str]] = {
    "selected": [],
    "parts": ["objective={name: components, mode: fedavg}", "strategy={name: head_transfer}",
              "baselines=[fedper, fedbabu, lg_fedavg, alone]"],
}  # fmt: skip
FIXED = ["evaluation.every=100", "engine.name=inline", "run.overwrite=true"]
NAMES = {"learned": "LASEM", "all": "all convolutions shared", "none": "none shared", "fedavg": "FedAvg", "fedper": "FedPer",
         "fedbabu": "FedBABU", "lg_fedavg": "LG-FedAvg", "alone": "local training"}  # fmt: skip
FEDERATED_NOTE = (
    "Test accuracy in % on the sites' own tasks, mean over sites; mean and standard deviation over seeds. The first "
    "three are measured with the server's last mean, the others with the networks that sites trained last. kB: what "
    "a site sends in a round."
)


def figure1(study: Study) -> list[Part]:
    """Return Figure 1: the accuracy of fixed configurations of shared layers, and without sharing."""
    parts: list[Part] = []
    for name, sequence in sequences_of(study).items():
        results = {learner: _static(study, name, learner) for learner in LEARNERS}
        rows = [[mode, *(_percent(results[learner][mode]) for learner in LEARNERS)] for mode in ("none", *STATIC)]
        parts.append(study.table(f"Figure 1: configurations, {sequence.title}", ["shared", *LEARNERS], rows, PEAK))
    return parts


def figure4(study: Study) -> list[Part]:
    """Return Figure 4: LASEM compared with the range of fixed configurations, and how much both forget."""
    parts: list[Part] = []
    for name, sequence in sequences_of(study).items():
        rows, series = [], {}
        for learner in LEARNERS:
            static = {mode: runs for mode, runs in _static(study, name, learner).items() if mode != "none"}
            peaks = {mode: fmean(_peaks(runs)) for mode, runs in static.items()}
            ours, best = each(study, name, of(learner)), max(peaks, key=peaks.__getitem__)
            low, high = min(peaks.values()), max(peaks.values())
            position = f"{(fmean(_peaks(ours)) - low) / (high - low):.0%}" if high > low else "-"
            kept = [_number(_kept(runs)) for runs in (ours, static["all"], static[best])]
            rows.append([learner, _percent(ours), position, _percent(static["all"]), f"{best}: {_percent(static[best])}",
                         f"{100 * low:.1f}", *kept])  # fmt: skip
            series[learner] = (list(peaks.values()), peaks["all"], _peaks(ours))
        head = ["", "LASEM", "place in the range", "all", "best", "worst", "final / peak: LASEM", "all", "best"]
        note = f"{PEAK} {RATIOS} The range: of {', '.join(STATIC)}."
        caption = (
            f"{sequence.title}: boxes show the range of fixed configurations, blue lines all layers shared, red dots LASEM."
        )
        parts.append(study.table(f"Figure 4: {sequence.title}", head, rows, note))
        parts.append(Picture(ranges(series, study.folder / f"figure4-{name}.png"), caption))
    return parts


def figure5(study: Study) -> list[Part]:
    """Return Figure 5: how often each layer is shared."""
    parts: list[Part] = []
    for name, sequence in sequences_of(study).items():
        rows = []
        for learner in LEARNERS:
            chosen = [fact["configuration"] for run in each(study, name, of(learner)) for fact in run.facts]
            rows.append([learner, *(f"{100 * fmean(choice[layer] == '1' for choice in chosen):.0f}" for layer in range(4))])
        head = ["", *(f"layer {layer}" for layer in range(1, 5))]
        note = "Share of tasks in %. In the paper, HPS prefers own layers, TF and DF-CNN prefer shared ones, and upper ones."
        parts.append(study.table(f"Figure 5: layers that LASEM shares, {sequence.title}", head, rows, note))
    return parts


def figure6(study: Study) -> list[Part]:
    """Return Figure 6: accuracy with a fixed posterior of the best configuration, by its value."""
    name = next(iter(sequences_of(study)))
    fixed = {certainty: each(study, name, of("DF-CNN", "top-2", certainty=certainty, search={"name": "exact"}))
             for certainty in CERTAINTIES}  # fmt: skip
    ours = each(study, name, of("DF-CNN"))
    rows = [*([f"P = {certainty:g}", _percent(runs)] for certainty, runs in fixed.items()), ["LASEM", _percent(ours)]]
    note = f"{PEAK} P: posterior of top-2 in all steps; the others share the rest. In the paper, P = 1 is slightly the best."
    series = {"top-2": {certainty: _peaks(runs) for certainty, runs in fixed.items()}}
    labels = "posterior of top-2, fixed", "peak accuracy, mean over tasks"
    picture = curves(series, labels, study.folder / "figure6.png", {"LASEM": fmean(_peaks(ours))})
    return [study.table("Figure 6: a fixed posterior, DF-CNN", ["", "peak"], rows, note), Picture(picture, note)]


def table1(study: Study) -> list[Part]:
    """Return Table 1: LASEM, and other methods that select what is shared."""
    name, sequence = next(iter(sequences_of(study).items()))
    methods = {**{method: method for method in COMPARED}, **{f"LASEM {learner}": of(learner) for learner in LEARNERS}}
    rows = [_with_papers(study, name, row, ("1", row, "accuracy"), ("1 forgetting", row, "forgetting"), what)
            for row, what in methods.items()]  # fmt: skip
    note = f"{PEAK} {RATIOS} The paper's numbers are of Office-Home. DEN is missing."
    return [study.table(f"Table 1: {sequence.title}", ["", *COLUMNS], rows, note)]


def table2(study: Study) -> list[Part]:
    """Return Table 2: LASEM on a ResNet-18, by number of groups of layers."""
    parts: list[Part] = []
    ways = {"all": of("HPS", "all", groups=GROUPS[4]),
            **{f"{number} groups": of("HPS", groups=sizes) for number, sizes in GROUPS.items()}}  # fmt: skip
    for name in (sequence for sequence in ("resnet", "resnet40") if sequence in SIZES[study.preset]):
        sequence = named(study, name)
        rows = [_with_papers(study, name, row, ("2", row, sequence.paper), ("2 forgetting", row, sequence.paper), what)
                for row, what in ways.items()]  # fmt: skip
        parts.append(study.table(f"Table 2: {sequence.title}", ["shared", *COLUMNS], rows, f"{PEAK} {RATIOS}"))
    return parts


COLUMNS = ("peak (paper)", "peak", "final / peak (paper)", "final / peak", "final / end", "seconds")


def _with_papers(study: Study, name: str, row: str, peak: tuple[str, str, str], ratio: tuple[str, str, str],
                 what: Any) -> list[str]:  # fmt: skip
    """Return a row of COLUMNS. `peak` and `ratio` have table, row and column of the paper's cells."""
    runs = each(study, name, what)
    theirs = [cells("lasem", table).shown(*cell) for table, *cell in (peak, ratio)]
    ratios = _number(_kept(runs)), _number([run.kept_of_end for run in runs])
    return [row, theirs[0], _percent(runs), theirs[1], *ratios, f"{fmean(run.seconds for run in runs):.0f}"]


def table3(study: Study) -> list[Part]:
    """Return Table 3: LASEM, and brute force.

    Brute force trains sequences with each configuration, and takes the best for each task by validation examples.
    """
    accuracy, times, parts = cells("lasem", "3"), cells("lasem", "3 time"), list[Part]()
    for name, sequence in sequences_of(study).items():
        if not sequence.paper:
            continue
        rows = []
        for learner in LEARNERS:
            row = f"{sequence.paper} {learner}"
            ours, whole = each(study, name, of(learner)), each(study, name, of(learner, "all"))
            tried = [each(study, name, of(learner, shown(configuration))) for configuration in every(4)]
            best = [_best(runs) for runs in zip(*tried, strict=True)]
            took = fmean(run.seconds for run in ours)
            brute = sum(run.seconds for runs in tried for run in runs) / study.seeds / took
            rows.append([
                learner, accuracy.shown(row, "LASEM"), _percent(ours), accuracy.shown(row, "brute force"), _percent(best),
                accuracy.shown(row, "all"), _percent(whole), times.shown(row, "brute force"), f"{brute:.2f}",
                times.shown(row, "all"), f"{fmean(run.seconds for run in whole) / took:.2f}",
            ])  # fmt: skip
        columns = ("LASEM", "brute force", "all", "time of brute force", "time of all")
        head = ["", *(text for column in columns for text in (f"{column} (paper)", column))]
        parts.append(study.table(f"Table 3: {sequence.title}", head, rows, f"{PEAK} Times relative to LASEM's."))
    return parts


def searches(study: Study) -> list[Part]:
    """Return accuracy and time by the search for a training step (SEARCHES), on the same tasks and seeds."""
    (name, sequence), rows = next(iter(sequences_of(study).items())), []
    for learner in LEARNERS:
        runs = {search: each(study, name, of(learner, search={"name": search})) for search in SEARCHES}
        base = sum(run.seconds for run in each(study, name, of(learner, "alternating")))
        for search, results in runs.items():
            apart = [run.accuracy - exact.accuracy for run, exact in zip(results, runs["exact"], strict=True)]
            ratio = sum(run.seconds for run in results) / base
            rows.append([learner, search, _percent(results), _percent(apart), _number(_kept(results)), f"{ratio:.2f}"])
    head = ["", "search", "peak", "less exact", "final / peak", "time / alternating"]
    return [study.table(f"Ways to find a step, {sequence.title}", head, rows, PEAK)]


def federated(study: Study) -> list[Part]:
    """Return LASEM and other methods on the sites of the experiment `layer_selection`, in a federation."""
    config = load(EXPERIMENT, [])
    key = [RUNS, FIXED, [str(site) for site in config.sites], config.network, config.objective, config.rounds]
    results = study.saved_each("federated", key, lambda seed: _measured(study.folder / "runs", seed))
    rows = [
        [NAMES[mode], *means(results, (mode, "own")), f"{first['bytes'] / 1e3:,.0f}"] for mode, first in results[0].items()
    ]
    return [study.table("Ten sites at once", ["", "own task", "kB"], rows, FEDERATED_NOTE)]


def _measured(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return by mode the mean accuracy on the sites' own tasks, and the bytes. The folders of the runs are erased."""
    results: dict[str, dict[str, float]] = {}
    for name, options in RUNS.items():
        config = load(EXPERIMENT, [*options, *FIXED, f"seed={seed}", f"run.root={folder}", f"run.name={name}-{seed}"])
        with erased_run(config) as (summary, _):
            for method in selections(summary):
                own = fmean(site.last or 0.0 for site in method.sites)
                results[method.method] = {"own": own, "bytes": method.bytes}
            for matrix in exchanges(summary):
                results[matrix.method] = {"own": matrix.own or 0.0, "bytes": matrix.bytes}
    return results


TABLES: dict[str, Callable[[Study], list[Part]]] = {
    "figure1": figure1,
    "figure4": figure4,
    "figure5": figure5,
    "figure6": figure6,
    "searches": searches,
    "federated": federated,
    "table1": table1,
    "table2": table2,
    "table3": table3,
}


def _static(study: Study, name: str, learner: str) -> dict[str, list[Outcome]]:
    return {mode: each(study, name, of(learner, mode)) for mode in ("none", *STATIC)}


def _best(tried: Sequence[Outcome]) -> float:
    """Return the mean peak accuracy, of each task with the configuration that is best on its validation examples."""
    tasks = range(len(tried[0].peak))
    return fmean(max(tried, key=lambda run, task=task: run.validation[task]).peak[task] for task in tasks)


def _peaks(runs: Sequence[Outcome]) -> list[float]:
    return [run.accuracy for run in runs]


def _kept(runs: Sequence[Outcome]) -> list[float]:
    return [run.kept for run in runs]


def _percent(values: Sequence[Outcome | float]) -> str:
    shares = [value.accuracy if isinstance(value, Outcome) else value for value in values]
    return _with_confidence([100 * share for share in shares], ".1f")


def _number(values: Sequence[float]) -> str:
    return _with_confidence(values, ".2f")


def _with_confidence(values: Sequence[float], form: str) -> str:
    around = spread(values)
    mean = format(around.mean, form)
    if around.n < 2:
        return mean
    half = T95.get(around.n, 1.96) * around.deviation / math.sqrt(around.n)
    return f"{mean} ± {format(half, form)}"
