"""The paper's figures and tables from what was found, its numbers beside ours."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fedloom.clients.objectives.layer_selection.configurations import every, shown
from fedloom.conf.formatting import count
from fedloom.sims.experiments.lasem.federated import federated
from fedloom.sims.experiments.lasem.lifelong import Outcome
from fedloom.sims.experiments.lasem.plots import over, ranges
from fedloom.sims.experiments.lasem.study import COMPARED, LEARNERS, LasemStudy, of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import spread
from fedloom.sims.report.tables import Table

STATIC = ("all", "top-1", "top-2", "top-3", "bottom-1", "bottom-2", "bottom-3", "alternating")  # the paper's, of four layers
CERTAINTIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GROUPS = {4: [5, 4, 4, 4], 5: [5, 4, 4, 2, 2], 6: [5, 4, 2, 2, 2, 2], 7: [5, 2, 2, 2, 2, 2, 2]}  # of ResNet-18
SEARCHES = ("exact", "pruned", "sampled")
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's, of so many trials, for 95 % confidence
PEAK = "Mean peak accuracy over the tasks in %, ± 95 % confidence over seeds, as the paper has it."
RATIOS = (
    "final / peak: what is kept of the accuracy at the best epoch by validation images, the paper's ratio; above 1, the "
    "best epoch was luck. final / end: of the accuracy at the end of the task."
)


def figure1(study: LasemStudy, seeds: int) -> list[Part]:
    """Given configurations, and none at all."""
    parts: list[Part] = []
    for name, sequence in study.sequences.items():
        results = {learner: _static(study, name, learner, seeds) for learner in LEARNERS}
        rows = [[mode, *(_percent(_peaks(results[learner][mode])) for learner in LEARNERS)] for mode in ("none", *STATIC)]
        parts.append(
            Table(f"Figure 1: configurations, {sequence.title}, {count(seeds, 'seed')}", ["shared", *LEARNERS], rows, PEAK)
        )
    return parts


def figure4(study: LasemStudy, seeds: int) -> list[Part]:
    """LASEM beside the range of given configurations, and what is forgotten."""
    parts: list[Part] = []
    for name, sequence in study.sequences.items():
        rows, series = [], {}
        for learner in LEARNERS:
            static = {mode: runs for mode, runs in _static(study, name, learner, seeds).items() if mode != "none"}
            means = {mode: statistics.fmean(_peaks(runs)) for mode, runs in static.items()}
            ours, best = study.each(name, of(learner), seeds), max(means, key=means.__getitem__)
            here = statistics.fmean(_peaks(ours))
            low, high = min(means.values()), max(means.values())
            position = f"{(here - low) / (high - low):.0%}" if high > low else "-"
            rows.append([learner, _percent(_peaks(ours)), position, _percent(_peaks(static["all"])),
                         f"{best}: {_percent(_peaks(static[best]))}", f"{100 * low:.1f}",
                         *(_number(_kept(runs)) for runs in (ours, static["all"], static[best]))])  # fmt: skip
            series[learner] = (list(means.values()), means["all"], _peaks(ours))
        head = ["", "LASEM", "place in the range", "all", "best", "worst", "final / peak: LASEM", "all", "best"]
        note = f"{PEAK} {RATIOS} The range: of {', '.join(STATIC)}."
        parts.append(Table(f"Figure 4: {sequence.title}, {count(seeds, 'seed')}", head, rows, note))
        told_of = (
            f"{sequence.title}: boxes are the range of given configurations, blue lines all layers shared, red dots LASEM."
        )
        parts.append(Picture(ranges(series, study.folder / f"figure4-{name}.png"), told_of))
    return parts


def figure5(study: LasemStudy, seeds: int) -> list[Part]:
    """How often each layer is shared."""
    parts: list[Part] = []
    for name, sequence in study.sequences.items():
        rows = []
        for learner in LEARNERS:
            chosen = [fact["configuration"] for run in study.each(name, of(learner), seeds) for fact in run.facts]
            rows.append([learner, *(f"{100 * statistics.fmean(c[layer] == '1' for c in chosen):.0f}" for layer in range(4))])
        head = ["", *(f"layer {layer}" for layer in range(1, 5))]
        note = "Of tasks in %. In the paper HPS prefers layers of its own, TF and DF-CNN shared ones, and upper ones."
        parts.append(
            Table(f"Figure 5: layers that LASEM shares, {sequence.title}, {count(seeds, 'seed')}", head, rows, note)
        )
    return parts


def figure6(study: LasemStudy, seeds: int) -> list[Part]:
    """The best configuration's posterior fixed."""
    name = next(iter(study.sequences))
    series = {fixed: _peaks(study.each(name, of("DF-CNN", "top-2", certainty=fixed, search={"name": "exact"}), seeds))
              for fixed in CERTAINTIES}  # fmt: skip
    ours = _peaks(study.each(name, of("DF-CNN"), seeds))
    rows = [*([f"P = {fixed:g}", _percent(results)] for fixed, results in series.items()), ["LASEM", _percent(ours)]]
    note = f"{PEAK} P: posterior of top-2 in all steps, the rest alike. In the paper P = 1 is the best, by little."
    picture = over(series, ours, study.folder / "figure6.png")
    return [
        Table(f"Figure 6: a fixed posterior, DF-CNN, {count(seeds, 'seed')}", ["", "peak"], rows, note),
        Picture(picture, note),
    ]


def table1(study: LasemStudy, seeds: int) -> list[Part]:
    """Beside other methods that select what is shared."""
    name = next(iter(study.sequences))
    accuracy, forgetting = cells("lasem", "1"), cells("lasem", "1 forgetting")
    results = {**{method: study.compared(name, method, seeds) for method in COMPARED},
             **{f"LASEM {learner}": study.each(name, of(learner), seeds) for learner in LEARNERS}}  # fmt: skip
    rows = []
    for method, runs in results.items():
        theirs = accuracy.shown(method, "accuracy"), forgetting.shown(method, "forgetting")
        rows.append([method, theirs[0], _percent(_peaks(runs)), theirs[1], *_ratios_and_seconds(runs)])
    head = ["", "peak (paper)", "peak", "final / peak (paper)", "final / peak", "final / end", "seconds"]
    note = f"{PEAK} {RATIOS} The paper's are of Office-Home. DEN is left out."
    return [Table(f"Table 1: {study.sequences[name].title}, {count(seeds, 'seed')}", head, rows, note)]


def table2(study: LasemStudy, seeds: int) -> list[Part]:
    """Groups of layers of a ResNet-18."""
    accuracy, forgetting, parts = cells("lasem", "2"), cells("lasem", "2 forgetting"), list[Part]()
    for name in (sequence for sequence in ("resnet", "resnet40") if sequence in _sizes(study)):
        sequence = study.named(name)
        ways = {"all": of("HPS", "all", groups=GROUPS[4])}
        ways |= {f"{number} groups": of("HPS", groups=sizes) for number, sizes in GROUPS.items()}
        rows = []
        for row, options in ways.items():
            runs = study.each(name, options, seeds)
            theirs = accuracy.shown(row, sequence.paper), forgetting.shown(row, sequence.paper)
            rows.append([row, theirs[0], _percent(_peaks(runs)), theirs[1], *_ratios_and_seconds(runs)])
        head = ["shared", "peak (paper)", "peak", "final / peak (paper)", "final / peak", "final / end", "seconds"]
        parts.append(Table(f"Table 2: {sequence.title}, {count(seeds, 'seed')}", head, rows, f"{PEAK} {RATIOS}"))
    return parts


def table3(study: LasemStudy, seeds: int) -> list[Part]:
    """Beside brute force: the best configuration of each task, by validation images, of sequences trained with each."""
    accuracy, times, parts = cells("lasem", "3"), cells("lasem", "3 time"), list[Part]()
    for name in (one for one in study.sequences if study.sequences[one].paper):
        rows = []
        for learner in LEARNERS:
            row = f"{study.sequences[name].paper} {learner}"
            ours, whole = study.each(name, of(learner), seeds), study.each(name, of(learner, "all"), seeds)
            tried = [study.each(name, of(learner, shown(one)), seeds) for one in every(4)]
            best = [_best([runs[seed] for runs in tried]) for seed in range(seeds)]
            took = statistics.fmean(run.seconds for run in ours)
            brute = sum(run.seconds for runs in tried for run in runs) / seeds / took
            shares = statistics.fmean(run.seconds for run in whole) / took
            ratios = [times.shown(row, "brute force"), f"{brute:.2f}", times.shown(row, "all"), f"{shares:.2f}"]
            pairs = zip(("LASEM", "brute force", "all"), (_peaks(ours), best, _peaks(whole)), strict=True)
            rows.append(
                [learner, *itertools.chain(*((accuracy.shown(row, of_), _percent(here)) for of_, here in pairs)), *ratios]
            )
        columns = ("LASEM", "brute force", "all", "time of brute force", "time of all")
        head = ["", *itertools.chain(*((f"{column} (paper)", column) for column in columns))]
        note = f"{PEAK} Times relative to LASEM's."
        parts.append(Table(f"Table 3: {study.sequences[name].title}, {count(seeds, 'seed')}", head, rows, note))
    return parts


def searches(study: LasemStudy, seeds: int) -> list[Part]:
    """Ways to find a step, on the same tasks and seeds."""
    name = next(iter(study.sequences))
    rows = []
    for learner in LEARNERS:
        runs = {search: study.each(name, of(learner, search={"name": search}), seeds) for search in SEARCHES}
        exact, base = _peaks(runs["exact"]), study.each(name, of(learner, "alternating"), seeds)
        for search, results in runs.items():
            apart = [peak - reference for peak, reference in zip(_peaks(results), exact, strict=True)]
            ratio = sum(run.seconds for run in results) / sum(run.seconds for run in base)
            rows.append(
                [learner, search, _percent(_peaks(results)), _percent(apart), _number(_kept(results)), f"{ratio:.2f}"]
            )
    head = ["", "search", "peak", "beside exact", "final / peak", "time beside alternating"]
    return [Table(f"Ways to find a step, {study.sequences[name].title}, {count(seeds, 'seed')}", head, rows, PEAK)]


TABLES: dict[str, Callable[[LasemStudy, int], list[Part]]] = {
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


def _static(study: LasemStudy, name: str, learner: str, seeds: int) -> dict[str, list[Outcome]]:
    return {mode: study.each(name, of(learner, mode), seeds) for mode in ("none", *STATIC)}


def _best(tried: Sequence[Outcome]) -> float:
    """Mean peak accuracy of the tasks, of each with the configuration that is best on its validation images."""
    tasks = range(len(tried[0].peak))
    chosen = [max(range(len(tried)), key=lambda choice, task=task: tried[choice].validation[task]) for task in tasks]
    return statistics.fmean(tried[choice].peak[task] for task, choice in zip(tasks, chosen, strict=True))


def _sizes(study: LasemStudy) -> Any:
    from fedloom.sims.experiments.lasem.study import SIZES

    return SIZES[study.preset]


def _peaks(runs: Sequence[Outcome]) -> list[float]:
    return [run.accuracy for run in runs]


def _kept(runs: Sequence[Outcome]) -> list[float]:
    return [run.kept for run in runs]


def _ratios_and_seconds(runs: Sequence[Outcome]) -> list[str]:
    seconds = statistics.fmean(run.seconds for run in runs)
    return [_number(_kept(runs)), _number([run.kept_of_end for run in runs]), f"{seconds:.0f}"]


def _percent(values: Sequence[float]) -> str:
    return _with_confidence([100 * value for value in values], ".1f")


def _number(values: Sequence[float]) -> str:
    return _with_confidence(values, ".2f")


def _with_confidence(values: Sequence[float], form: str) -> str:
    around = spread(values)
    mean = format(around.mean, form)
    if around.n < 2:
        return mean
    half = T95.get(around.n, 1.96) * around.deviation / math.sqrt(around.n)
    return f"{mean} ± {format(half, form)}"
